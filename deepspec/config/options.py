"""The page docs/options.md: every option with its type, its default and what it means, from the schema.

    python -m deepspec.config.options            # print it
    python -m deepspec.config.options --write    # replace docs/options.md
"""

import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Iterator, Sequence, Union, get_args, get_origin, get_type_hints

from deepspec.config.compose import CONF_DIR, options
from deepspec.config.describe import about, comments, described
from deepspec.config.schema import MISSING, Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
COMMAND = "python -m deepspec.config.options --write"
_HEAD = f"""# Options

Every option of every script, written `key=value` on the command line. Experiments (`+experiment=NAME`) and choices of
a group (`drafter=eagle3`) set several at once. `--cfg job` prints what a command comes to, `--help` what its script
reads. `{COMMAND}` makes this page from `deepspec/config/schema*.py`.
A default of `???` is given by the target or the experiment.
"""


def _type(kind: Any) -> str:
    """A type as the command line takes it."""
    arguments = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type, arguments)) + (" or null" if type(None) in get_args(kind) else "")
    if get_origin(kind) is list:
        return "list of groups" if is_dataclass(arguments[0]) else f"list of {_type(arguments[0])}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(kind, "anything" if kind is Any else "table")


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[...]" if value and is_dataclass(value[0]) else f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(one)}" for key, one in value.items()) + "}"
    return "???" if value == MISSING else f"{value:g}" if isinstance(value, float) else str(value)


def _find(cls: Any, key: str) -> tuple[Any, Any]:
    """Type and default of the field ``key`` names below ``cls``; ``N`` is an element of a list of groups."""
    head, _, rest = key.partition(".")
    kind = get_type_hints(cls)[head]
    if not rest:
        field = cls.__dataclass_fields__[head]
        return kind, field.default_factory() if callable(field.default_factory) else field.default
    if rest.startswith("N."):
        return _find(get_args(kind)[0], rest[2:])
    return _find(kind, rest)


def _row(key: str, comment: str) -> str:
    kind, default = _find(Config, key)
    cells = (f"`{key}`", _type(kind), f"`{_value(default)}`" if _value(default) else "", comment)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(rows: Iterator[str]) -> list[str]:
    return ["| option | type | default | what it means |", "|---|---|---|---|", *rows, ""]


def page() -> str:
    """The text of docs/options.md."""
    hints, said = get_type_hints(Config), comments(Config)
    single = [field.name for field in fields(Config) if not is_dataclass(hints[field.name])]
    lines = [_HEAD, "## Of the whole job", "", *_table(_row(name, said[name]) for name in single)]
    for field in fields(Config):
        if field.name in single:
            continue
        lines += [f"## {field.name}", "", about(field.name), ""]
        group = "benchmark" if field.name == "evaluate" else field.name
        if len(options(group)) > 1:
            lines += [f"`{group}=` {', '.join(f'`{name}`' for name in options(group))}", ""]
        lines += _table(_row(option.key, option.comment) for option in described(hints[field.name], field.name))
    lines += ["## Groups without options of their own", ""]
    for group in ("experiment", "budget", "sweep"):
        plus = "+" if not group == "budget" else ""
        lines.append(f"* `{plus}{group}=` {', '.join(f'`{name}`' for name in options(group))}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the page, or write it. Returns the exit code."""
    if list(arguments) == ["--write"] and CONF_DIR.parent == PAGE.parents[1]:
        PAGE.write_text(page(), encoding="utf-8")
    elif arguments:
        sys.stderr.write(f"usage: {COMMAND} (in the repository), or without --write to print the page\n")
        return 2
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
