"""Pure checks of the options about served drafters."""

import math
from urllib.parse import urlsplit

from deepspec.config.schema import Config
from deepspec.planning.require import choice, require, wholes, within

ENGINES = ("auto", "vllm", "sglang")
ACTIONS = ("auto", "recalibrate", "train")


def check_doctor(config: Config) -> None:
    """Values of the ``doctor`` group. Raises ConfigError."""
    doctor = config.doctor
    choice("doctor.engine", doctor.engine, ENGINES)
    if doctor.endpoint is not None:
        parts = urlsplit(doctor.endpoint)
        require(parts.scheme in ("http", "https") and bool(parts.hostname), "doctor.endpoint", doctor.endpoint,
                "the base URL of a server, http://host:port")
    wholes("doctor", doctor, ("max_prompts", "max_new_tokens"), 1)
    within("doctor.tolerance", doctor.tolerance, 0.0, 1.0, open_high=True)
    within("doctor.certainty", doctor.certainty, 0.5, 1.0)
    within("doctor.timeout_seconds", doctor.timeout_seconds, 0.0, math.inf, open_low=True)


def check_loop(config: Config) -> None:
    """Values of the ``loop`` group. Raises ConfigError."""
    loop = config.loop
    choice("loop.action", loop.action, ACTIONS)
    wholes("loop", loop, ("steps",), 1)
    within("loop.start_seconds", loop.start_seconds, 0.0, math.inf, open_low=True)
    if loop.serve is not None:
        require("{drafter}" in loop.serve and loop.endpoint is not None, "loop.serve", loop.serve,
                "a command with {drafter} in it, and loop.endpoint the address where its server answers")
    if loop.name is not None:
        require(loop.name not in ("", ".", "..") and "/" not in loop.name and loop.name != config.run.name, "loop.name",
                loop.name, "the name of a run of its own")
