"""``--help`` of a script: what it does, how to start it, and the options it reads with their values and meanings."""

import shutil
import textwrap
from typing import Any, Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from deepspec.cli.scripts import SCRIPTS, console_name
from deepspec.config.compose import PACKAGED, options
from deepspec.config.describe import about, described, section_class
from deepspec.config.schema import STAGES

_HELP = ("--help", "-h")
_ADDED = ("experiment", "sweep")  # in no defaults list: chosen with a plus
_COLUMN = 44


def wants_options(flags: Sequence[str]) -> bool:
    """Whether the project's own help is asked for rather than Hydra's."""
    return any(flag in _HELP for flag in flags)


def command_line(name: str) -> str:
    """How ``name`` is started, from the repository or as an installed command."""
    script = SCRIPTS[name]
    if PACKAGED:
        return console_name(name)
    return f"{'deepspeed' if script.ranks else 'python'} {script.folder}/{name}.py"


def help_text(name: str, composed: DictConfig) -> str:
    """All of it for the script ``name``; values are those of ``composed``, the command line's included."""
    script, width = SCRIPTS[name], min(120, shutil.get_terminal_size((100, 24)).columns)
    command = command_line(name)
    lines = [script.summary, "", f"    {command} {script.example}", ""]
    if script.ranks:
        before = f"{command} --num_gpus 4 -- {script.example}" if PACKAGED else \
            f"deepspeed --num_gpus 4 {script.folder}/{name}.py {script.example}"
        lines += [f"On several GPUs:  {before}", ""]
    lines += textwrap.wrap("Options are written key=value and come after an experiment (+experiment=NAME) or an "
                           "existing run (run.dir=DIR), whose values they replace.", width)
    lines += ["", *(["  plan=true             print memory, disk and time, and stop"] if name != "sweep" else []),
              "  --cfg job             print the whole configuration, and stop", ""]
    if name == "train_drafter":
        lines += [*textwrap.wrap(f"  stages=[A,B]          of {', '.join(STAGES)}", width,
                                 subsequent_indent=" " * 24), ""]
    lines += ["Choices", *_groups(script.sections, width), ""]
    for section in script.sections:
        lines += [f"{section}: {about(section)}", *_options(section, composed, width), ""]
    return "\n".join(lines).rstrip() + "\n"


def _groups(sections: Sequence[str], width: int) -> Iterator[str]:
    for group in ("experiment", "budget", *sections):
        names = options("benchmark" if group == "evaluate" else group)
        key = "benchmark" if group == "evaluate" else group
        if len(names) > 1:
            plus = "+" if group in _ADDED else ""
            yield from textwrap.wrap(f"  {plus + key + '=':<22}{', '.join(names)}", width, subsequent_indent=" " * 24)


def _options(section: str, composed: DictConfig, width: int) -> Iterator[str]:
    values = OmegaConf.to_container(composed, resolve=False)
    for option in described(section_class(section), section):
        shown = "" if ".N." in option.key else _text(_value(values, option.key))
        if option.element is not None:
            shown = "[...]" if shown else "[]"
        head = f"  {option.key}={shown}"
        gap = " " * (_COLUMN - len(head)) if len(head) < _COLUMN - 1 else ""
        if not option.comment:
            yield head
        elif gap:
            yield from textwrap.wrap(option.comment, width, initial_indent=head + gap, subsequent_indent=" " * _COLUMN)
        else:
            yield head
            yield from textwrap.wrap(option.comment, width, initial_indent=" " * 44, subsequent_indent=" " * _COLUMN)


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_text(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(one)}" for key, one in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
