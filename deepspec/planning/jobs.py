"""What must be there before a job that is no pipeline stage starts, looked at without torch."""

import os
import socket
from pathlib import Path
from typing import Callable
from urllib.parse import urlsplit

from deepspec.calibration.imports import record_files
from deepspec.config import paths
from deepspec.config.paths import served_folder
from deepspec.config.schema import Config
from deepspec.errors import ConfigError, InputRefused

_CONNECT_SECONDS = 2.0


def check_endpoint(key: str, endpoint: str) -> None:
    """Refuse a server that nobody listens at."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise InputRefused(f"{key}={endpoint!r} does not answer ({error}). Start the server (export/serving/launch.md "
                           "has the command), or give its address.") from None


def _doctor(config: Config) -> None:
    options = config.doctor
    if not options.endpoint:
        raise ConfigError("doctor.endpoint is not set: give the server's address, endpoint=http://host:port.")
    folder = served_folder(config)
    if not folder.is_dir():
        make = ("It holds no export: give the folder that the server was started with, drafter=DIR, or export the run, "
                f"python launch/export_drafter.py run.dir={config.run.dir}")
        raise ConfigError(f"{folder} is not there, so the served drafter cannot be compared with the run. " + (
            make if options.drafter is None else "Give the folder that the server was started with, drafter=DIR."))
    if not (folder / "config.json").is_file():
        raise InputRefused(f"doctor.drafter={str(served_folder(config))!r} has no config.json: it is no drafter. Give "
                           "the folder that the server was started with, drafter=DIR.")
    if not (paths.run_dir(config) / "checkpoints").is_dir():
        raise InputRefused(f"run.dir={config.run.dir!r} holds no checkpoints, so there is nothing to compare the "
                           "server with. Give the run that trained the drafter, run.dir=DIR.")
    if config.target.source == "hf":
        paths.target_folder(config.target)
    if options.prompts != "held_out" and not Path(options.prompts).expanduser().is_file():
        raise InputRefused(f"doctor.prompts={options.prompts!r} is not a file. Give a JSONL file of prompts, or "
                           "held_out.")
    held_out = paths.responses_dir(config) / "responses.jsonl"
    if options.prompts == "held_out" and not held_out.is_file():
        raise InputRefused(f"doctor.prompts=held_out reads {held_out}, which is not there. Give a file of prompts: "
                           "doctor.prompts=FILE.")
    if options.api_key_variable and not os.environ.get(options.api_key_variable):
        raise ConfigError(f"doctor.api_key_variable={options.api_key_variable!r} is not set in the environment.")
    check_endpoint("doctor.endpoint", options.endpoint)


def _import(config: Config) -> None:
    folder = config.drafter.init_from
    if not folder:
        raise ConfigError("drafter.init_from is not set: give the folder of the drafter, drafter.init_from=DIR.")
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise InputRefused(f"drafter.init_from={folder!r} has no config.json. Give the folder of a drafter.")


def _loop(config: Config) -> None:
    loop, run = config.loop, paths.run_dir(config)
    if loop.records is None and loop.requests is None:
        raise ConfigError("Neither loop.records nor loop.requests is set: give what the engine recorded "
                          "(loop.records=FILE), what was asked of it (loop.requests=FILE), or both.")
    needed = {"recalibrate": "records", "train": "requests"}.get(loop.action)
    if needed is not None and getattr(loop, needed) is None:
        raise ConfigError(f"loop.action={loop.action} needs loop.{needed}=FILE.")
    for key in ("records", "requests"):
        value = getattr(loop, key)
        path = None if value is None else Path(value).expanduser()
        if path is not None and not path.exists() and not (key == "records" and record_files(path)):
            raise InputRefused(f"loop.{key}={value!r} does not exist. Give a file or a folder.")
    if not (run / "export" / "config.json").is_file():
        raise ConfigError(f"run.dir={config.run.dir!r} has no export: it is no run whose drafter is in service. "
                          f"Export it with: python launch/export_drafter.py run.dir={config.run.dir}")
    if loop.endpoint is not None and loop.serve is None:
        check_endpoint("loop.endpoint", loop.endpoint)


_CHECKS: dict[str, Callable[[Config], None]] = {"doctor": _doctor, "import_drafter": _import, "loop": _loop}


def check_job(config: Config, job: str) -> None:
    """Everything ``job`` needs. Raises ConfigError (values) or InputRefused (files, servers)."""
    _CHECKS[job](config)
