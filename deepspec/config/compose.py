"""From a command line to a checked ``Config``. With ``cli`` and the scripts, the only place that knows Hydra."""

import difflib
import logging
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from deepspec.config.schema import Config
from deepspec.errors import ConfigError

_IN_PACKAGE = Path(__file__).resolve().parents[1] / "conf"  # where a wheel has what a repository has in its root
PACKAGED = _IN_PACKAGE.is_dir()
CONF_DIR = _IN_PACKAGE if PACKAGED else Path(__file__).resolve().parents[2] / "conf"
_HYDRA_FLAGS_WITH_VALUE = (
    "--cfg", "-c", "--package", "-p", "--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--info",
    "-i", "--experimental-rerun",
)
_LAUNCHER_FLAGS = (
    "--num_gpus", "--num_accelerators", "--num_nodes", "--hostfile", "--include", "--exclude", "--no_ssh",
    "--node_rank", "--master_addr", "--master_port", "--launcher", "--launcher_args",
)
_HYDRA_FLAGS = (*_HYDRA_FLAGS_WITH_VALUE, "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r",
                "--shell-completion", "-sc")


def register_schema() -> None:
    """Make ``defaults: [schema]`` of conf/base.yaml mean deepspec.config.schema.Config.

    ``${one_less:N}`` in a configuration file is N - 1: the id of the last of N layers.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("one_less", lambda count: count - 1, replace=True)


def adapt_argv(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Make an argv built by the deepspeed launcher acceptable to Hydra (which knows no ``--local_rank``)."""
    for argument in argv:
        if argument.startswith(("--local_rank=", "--local-rank=")):
            given = argument.split("=", 1)[1]
            if environ.get("LOCAL_RANK", given) != given:
                raise ConfigError(
                    f"{argument} on the command line, but LOCAL_RANK={environ['LOCAL_RANK']} in the environment. "
                    "Leave the flag out: the launcher sets the variable."
                )
    argv = [argument for argument in argv if not argument.startswith(("--local_rank", "--local-rank"))]
    if {"-m", "--multirun"} & set(argv):
        raise ConfigError(
            "-m starts a sweep, and a sweep starts its own launcher for every job. "
            "Run it without one: python launch/sweep.py -m +experiment=NAME OPTION=VALUE,VALUE"
        )
    if int(environ.get("RANK", "0")) > 0:
        argv += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    return argv


def _without_dashes(argument: str) -> str:
    key, separator, value = argument.lstrip("-").partition("=")
    if key == "plan":
        return ": plan=true"
    return f": {key}={value}" if separator and key else ""


def split_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """Overrides and Hydra's own flags (with their values), in order. Raises ConfigError for any other flag."""
    overrides: list[str] = []
    flags: list[str] = []
    takes_value = False
    for argument in argv:
        if takes_value or argument.startswith("-"):
            if not takes_value and argument.split("=")[0] not in _HYDRA_FLAGS:
                if argument.split("=")[0] in _LAUNCHER_FLAGS:
                    raise ConfigError(f"{argument} belongs to the launcher and stands before the script: deepspeed "
                                      f"{argument} ... launch/train_drafter.py +experiment=NAME, or with a console "
                                      f"command: deepspec-train {argument} ... -- +experiment=NAME")
                raise ConfigError(f"{argument} is not an option here. Options are written key=value, without dashes"
                                  f"{_without_dashes(argument)}.")
            flags.append(argument)
            takes_value = not takes_value and argument in _HYDRA_FLAGS_WITH_VALUE
        else:
            overrides.append(argument)
    return overrides, flags


def compose_config(overrides: list[str], config_name: str = "train_drafter", group: str = "") -> Config:
    """The configuration ``overrides`` give; misspelt ones without a group are first looked for in ``group``.

    Raises ConfigError for anything unknown, misspelt or of a wrong type.
    """
    try:
        return to_config(compose_checked(overrides, config_name, group))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from None


def compose_checked(overrides: list[str], config_name: str, group: str = "") -> DictConfig:
    """The same before it is resolved: it may still lack values, to be looked at with ``--cfg job`` or ``--help``."""
    register_schema()
    for override in parse_overrides(overrides):
        _check_override(override, group)
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return compose(config_name, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None
    except YAMLError as error:
        raise ConfigError(f"A configuration file is not valid YAML: {' '.join(str(error).split())}.") from None


def to_config(composed: DictConfig) -> Config:
    """The dataclass of a composed configuration, interpolations resolved. Raises ConfigError for missing values."""
    plain = OmegaConf.masked_copy(composed, [field.name for field in fields(Config)])
    if OmegaConf.is_missing(plain.run, "name"):
        choices = ", ".join(f"+experiment={name}" for name in options("experiment"))
        raise ConfigError(f"No experiment was chosen. For a run that is there say run.dir=runs/NAME; else add one of: "
                          f"{choices}.")
    missing = sorted(OmegaConf.missing_keys(plain))
    if missing:
        raise ConfigError(f"{missing[0]} has no value (it is ???). Give one on the command line: {missing[0]}=VALUE")
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(plain, resolve=True))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Hydra's own reading of ``overrides``. Raises ConfigError with the quoted form for text its grammar refuses."""
    parsed = []
    for text in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            key, separator, value = text.partition("=")
            hint = f" A value with special characters is quoted twice: '{key}=\"{value}\"'." if separator else \
                " Options are written key=value; flags of other programs do not exist here."
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{text!r} is not an override Hydra can read ({reason}).{hint}") from None
    return parsed


def options(group: str) -> list[str]:
    """The choices of a config group."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def known_keys(cls: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted option path of the schema, sections included."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        path = f"{prefix}{field.name}"
        yield path
        if is_dataclass(hints[field.name]):
            yield from known_keys(hints[field.name], path + ".")


def _key_exists(path: str) -> bool:
    cls: Any = Config
    for part in path.split("."):
        if is_dataclass(cls):
            hints = get_type_hints(cls)
            if part not in hints:
                return False
            cls = hints[part]
        elif getattr(cls, "__origin__", None) is list and part.isdigit():
            cls = get_args(cls)[0]
        else:
            return getattr(cls, "__origin__", None) is dict
    return True


def _choices(key: str) -> list[str]:
    """What ``key`` may have been meant to be; of a list of groups the options of the element it names."""
    found = list(known_keys())
    for name, kind in _element_groups(Config):
        element = re.match(rf"{re.escape(name)}\.\d+\.", key)
        if element:
            found += known_keys(kind, element[0])
    return found


def _element_groups(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option that is a list of groups, and the class of these."""
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            yield from _element_groups(kind, f"{prefix}{name}.")
        elif getattr(kind, "__origin__", None) is list and is_dataclass(get_args(kind)[0]):
            yield prefix + name, get_args(kind)[0]


def _check_override(override: Override, group: str) -> None:
    key = override.key_or_group
    if key.startswith("hydra.") or key.startswith("hydra/") or key == "hydra":
        return
    if override.is_delete():
        raise ConfigError(f"{override.input_line!r}: options cannot be removed, only set.")
    if (CONF_DIR / key).is_dir():
        value = override.value()
        choices = options(key)
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, dict) and name not in choices:
                line = override.input_line
                raise ConfigError(f"{line!r}: there is no {key} called {name!r}. {_nearest(str(name), choices)}")
        if key == "experiment" and not override.is_add():
            raise ConfigError(f"Write +experiment={value} (with the plus: an experiment adds to the configuration).")
        return
    if not _key_exists(key):
        near = _nearest(key, _choices(key), group)
        raise ConfigError(f"{override.input_line!r}: there is no option {key!r}. {near}")


# What other trainers call it, where spelling leads nowhere.
_ELSEWHERE = {
    "learning_rate": "optimizer.lr", "lr_scheduler": "optimizer.min_lr_ratio", "warmup_steps": "optimizer.warmup_ratio",
    "gradient_accumulation_steps": "trainer.global_batch_size", "num_train_epochs": "trainer.epochs",
    "per_device_train_batch_size": "trainer.micro_batch_size", "batch_size": "trainer.global_batch_size",
    "max_seq_length": "data.max_length", "max_seq_len": "data.max_length", "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_last", "eval_steps": "trainer.validate_every", "logging_steps":
    "trainer.log_every", "report_to": "tracking.mode", "output_dir": "run.dir", "ema": "trainer.ema_decay",
    "gradient_checkpointing": "trainer.activation_checkpointing", "bf16": "trainer.precision",
}


def _nearest(key: str, choices: list[str], group: str = "") -> str:
    """What ``key`` was meant to be. ``group``: the group whose options this script takes without its name."""
    head, _, leaf = key.rpartition(".")
    if _ELSEWHERE.get(leaf) in choices:
        return f"Did you mean {_ELSEWHERE[leaf]!r}?"

    def likeness(name: str) -> tuple[float, int, str]:
        other_head, _, other_leaf = name.rpartition(".")
        around = _alike(head, other_head) if head else 0.5 * (other_head == group)
        return _alike(leaf, other_leaf) * (1.0 + around), -name.count("."), name

    close = [name for name in choices if _alike(leaf, name.rpartition(".")[2]) >= 0.5]
    if not close:
        beside = [name for name in choices if head and name.startswith(f"{head}.")]
        return f"There are: {', '.join((beside or choices)[:20])}."
    best = max(close, key=likeness)
    return f"Did you mean {best.removeprefix(f'{group}.') if group and not head else best!r}?"


def _alike(one: str, other: str) -> float:
    """How much of two names is the same, from 0 to 1."""
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def explain(error: Exception) -> str:
    """One paragraph for an error of Hydra or OmegaConf, with the nearest key where a key is wrong."""
    cause: Optional[BaseException] = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OmegaConfBaseException):
        full_key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key or cause.key or ""))
        first = str(cause).splitlines()[0]
        if full_key.startswith(("engine.deepspeed.", "simulate.domain_mix.")):
            return f"{full_key} is free-form and not set yet: write it with a plus, +{full_key}=VALUE."
        if full_key and not _key_exists(full_key):
            return f"There is no option {full_key!r} ({first}). {_nearest(full_key, _choices(full_key))}"
        if full_key and "not a ListConfig" in first:
            return f"{full_key} must be a list: '{full_key}=[A,B]', in quotes, with one element '{full_key}=[A]'."
        return f"{full_key or 'configuration'}: {first.rstrip('.')}."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if lines else type(error).__name__


def quiet_third_party() -> None:
    """Loggers that talk at INFO about nothing a user can act on."""
    for name in ("httpx", "filelock", "urllib3", "matplotlib", "transformers", "DeepSpeed", "datasets", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        # DeepSpeed probes for libraries by compiling; distutils logs each compiler call to the root logger.
        handler.addFilter(lambda record: "distutils" not in record.pathname)


def is_help(flags: list[str]) -> bool:
    """Whether Hydra's own flags ask for text rather than a run."""
    texts = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version", "--shell-completion"}
    return bool(texts & set(flags))
