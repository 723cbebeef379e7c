"""Pure checks of the options that decide and predict speed: profile, scheduler, serving simulation."""

import math
from urllib.parse import urlsplit

from deepspec.config.schema import Config, draft_length
from deepspec.decoding.modes import MODES
from deepspec.planning.require import choice, require, whole, wholes, within

SOURCES = ("in_process", "sglang", "vllm")


def check_profile(config: Config) -> None:
    """Values of the ``profile`` group. Raises ConfigError."""
    profile = config.profile
    choice("profile.source", profile.source, SOURCES)
    parts = urlsplit(profile.endpoint)
    given = parts.scheme in ("http", "https") and bool(parts.hostname)
    if profile.source == "in_process":
        require(not profile.endpoint, "profile.endpoint", profile.endpoint, "empty with profile.source=in_process")
        require(not profile.extend, "profile.extend", profile.extend, "false with profile.source=in_process")
    else:
        require(given, "profile.endpoint", profile.endpoint, f"the base URL of the {profile.source} server, "
                "http://host:port")
    for name, least in (("num_reqs", 1), ("verify_lengths", 0), ("kv_lengths", 1), ("prefill_tokens", 1)):
        values = list(getattr(profile, name))
        require(bool(values) or name == "prefill_tokens", f"profile.{name}", values, "a non-empty list")
        for value in values:
            whole(f"profile.{name}", value, least)
    wholes("profile", profile, ("samples_per_cell", "max_batch_tokens", "min_samples"), 1)
    lengths = {1 + min(length, draft_length(config.drafter)) for length in profile.verify_lengths}
    fitting = {(requests, length) for requests in profile.num_reqs for length in lengths
               if requests * length <= profile.max_batch_tokens}
    if "profile" in config.stages:
        require(len(fitting) * len(set(profile.kv_lengths)) > 1, "profile.max_batch_tokens", profile.max_batch_tokens,
                "large enough for two cells of profile.num_reqs x profile.verify_lengths")
    whole("profile.warmup", profile.warmup, 0)
    within("profile.seconds_limit", profile.seconds_limit, 0.0, math.inf)


def check_scheduler(config: Config) -> None:
    """Values of the ``scheduler`` group. Raises ConfigError."""
    scheduler = config.scheduler
    within("scheduler.min_gain", scheduler.min_gain, 0.0, math.inf)
    within("scheduler.min_tokens_per_second_per_user", scheduler.min_tokens_per_second_per_user, 0.0, math.inf)
    within("scheduler.probe_share", scheduler.probe_share, 0.0, 1.0)
    wholes("scheduler", scheduler, ("max_verify",), 1)


def check_simulate(config: Config) -> None:
    """Values of the ``simulate`` group. Raises ConfigError."""
    simulate = config.simulate
    require(bool(simulate.concurrency), "simulate.concurrency", list(simulate.concurrency), "a non-empty list")
    for value in simulate.concurrency:
        whole("simulate.concurrency", value, 1)
    for rate in simulate.arrival_rates:
        within("simulate.arrival_rates", rate, 0.0, math.inf, open_low=True)
    require(bool(simulate.policies), "simulate.policies", list(simulate.policies), f"some of {', '.join(MODES)}")
    for name in simulate.policies:
        choice("simulate.policies", name, MODES)
    for name, weight in simulate.domain_mix.items():
        within(f"simulate.domain_mix.{name}", weight, 0.0, math.inf)
    require(not simulate.domain_mix or sum(simulate.domain_mix.values()) > 0, "simulate.domain_mix",
            dict(simulate.domain_mix), "made of weights that are not all 0")
    wholes("simulate", simulate,
           ("requests", "prompt_tokens", "answer_tokens", "max_concurrent", "kv_tokens", "prefill_tokens"), 1)
    within("simulate.min_tokens_per_second_per_user", simulate.min_tokens_per_second_per_user, 0.0, math.inf)


def check_speed(config: Config) -> None:
    """All of the above."""
    for check in (check_profile, check_scheduler, check_simulate):
        check(config)
