"""The command line of a sweep, checked value by value before the first job starts."""

import fnmatch
import json
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from hydra.core.override_parser.types import Glob, Override
from omegaconf import OmegaConf

from deepspec.config.compose import CONF_DIR, compose_config, options, parse_overrides, split_argv
from deepspec.config.schema import Config
from deepspec.config.schema_sweep import OBJECTIVES
from deepspec.config.unread import refuse_unread
from deepspec.errors import ConfigError

_OWN = ("sweep", "run.name", "run.dir", "tracking.group")  # the sweep's, not its jobs': those get their own

Validate = Callable[[Config], None]


class SweepCommand(NamedTuple):
    """A checked command: Hydra's ``flags`` and ``overrides`` as given, and what all jobs have in ``common``."""

    flags: list[str]
    overrides: list[str]
    common: list[str]
    recognised: list[str]  # ``common`` as typed, and as Hydra writes it for a job (true as True, 1e-3 as 0.001)
    config: Config  # of the first job


def read_command(argv: Sequence[str], environ: Mapping[str, str], validate: Validate) -> SweepCommand:
    """Check ``argv`` of a sweep; ``validate`` is what checks the configuration of a single job.

    Raises ConfigError for whatever a single job's command would be refused for; under a launcher, where every rank
    would start the sweep; for ``run.dir``, which every job has of its own; and where no option has several values.
    """
    if "RANK" in environ:
        raise ConfigError("A sweep starts a launcher of its own for every job. Start it without one: "
                          f"python launch/sweep.py {' '.join(argv)}")
    words = [word for word in argv if word not in ("-m", "--multirun")]
    overrides, flags = split_argv(words)
    parsed = parse_overrides(overrides)
    if any(item.key_or_group == "run.dir" for item in parsed):
        raise ConfigError("run.dir cannot be set for a sweep: every job has a directory of its own in "
                          "runs/sweeps/NAME. Name the sweep with run.name=NAME.")
    varied = [item for item in parsed if item.is_sweep_override()]
    if not varied and not {"sweep", "hydra/sweeper"} & {item.key_or_group for item in parsed} and not any(
            item.key_or_group.startswith("hydra.sweeper") for item in parsed):
        raise ConfigError("Nothing is swept. Give an option several values, as in drafter.block_size=4,8,16, or take "
                          f"one of the sweeps there are: {', '.join(f'+sweep={name}' for name in options('sweep'))}.")
    kept = [item for item in parsed if not item.is_sweep_override()]
    common = [str(item.input_line) for item in kept]
    rewritten = [f"{item.get_key_element()}={item.get_value_element_as_str()}" for item in kept]
    config, algorithms = check_values(varied, common, validate)
    if not any(item.key_or_group == "sweep" or item.key_or_group.startswith("hydra.sweeper") for item in parsed):
        refuse_unread(parsed, algorithms)  # the others may choose drafters that are not seen here
    objective = config.sweep.objective
    if objective not in OBJECTIVES:
        raise ConfigError(f"sweep.objective={objective!r} is unknown: use one of {', '.join(OBJECTIVES)}.")
    if objective != "validation" and "evaluate" not in config.stages:
        raise ConfigError(f"sweep.objective={objective} comes from the evaluate stage, which stages={config.stages} "
                          "leaves out. Add it, or compare jobs by sweep.objective=validation.")
    return SweepCommand(flags, overrides, common, [*common, *rewritten], config)


def check_values(varied: Sequence[Override], common: Sequence[str], validate: Validate) -> tuple[Config, list[str]]:
    """Compose and validate a job for every single value of every swept option; returns the first one's configuration,
    and the drafters' algorithms.

    Options are varied one by one, so that a grid of thousands is checked in seconds; a combination that is refused
    only together fails as a job.
    """
    values = {item.get_key_element(): _values(item) for item in varied}
    first = {key: found[0] for key, found in values.items()}
    checked, algorithms = None, []
    for key, found in values.items():
        for value in found:
            chosen = first | {key: value}
            config = compose_config([*common, *(f"{name}={text}" for name, text in chosen.items())], "sweep")
            validate(config)
            checked = checked or config
            algorithms.append(config.drafter.algorithm)
    if checked is None:
        checked = compose_config(list(common), "sweep")
        validate(checked)
        algorithms.append(checked.drafter.algorithm)
    return checked, sorted(set(algorithms))


def _values(item: Override) -> list[str]:
    """The values of a swept option as written on a command line; of an interval, its ends."""
    value: Any = item.value()
    if isinstance(value, Glob):
        names = options(item.key_or_group)
        return [name for name in names if any(fnmatch.fnmatch(name, one) for one in value.include)
                and not any(fnmatch.fnmatch(name, one) for one in value.exclude)]
    if item.is_discrete_sweep():
        return list(item.sweep_string_iterator())
    return [str(value.start), str(value.end)]


def job_overrides(task: Sequence[str]) -> list[str]:
    """What a job's own command line repeats of the overrides Hydra gave it; first, so that given ones win, what the
    files of the sweep set for every job."""
    parsed = parse_overrides(list(task))
    own = [text for text, item in zip(task, parsed, strict=True) if _is_of_jobs(item.key_or_group)]
    return [*(text for item in parsed if item.key_or_group == "sweep" for text in _set_by_file(item)), *own]


def _is_of_jobs(key: str) -> bool:
    return key not in _OWN and not key.startswith("sweep.")


def _set_by_file(choice: Override) -> Iterator[str]:
    """Options of the jobs in the files that ``+sweep=NAME`` names; Hydra's own stay with the sweep."""
    chosen: Any = choice.value()
    names = chosen if isinstance(chosen, list) else [chosen]
    for name in [name for name in names if name in options("sweep")]:
        content: Any = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "sweep" / f"{name}.yaml"))
        for group, values in content.items():
            if group not in ("hydra", "defaults"):
                yield from _leaves(group, values)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif _is_of_jobs(key):
        yield f"{key}={_as_override(value)}"


def _as_override(value: Any) -> str:
    """``value`` in Hydra's grammar, whose keys are not quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_override(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_override, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
