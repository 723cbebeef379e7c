"""Pure checks of option values and their combinations. Every message names the key, the value and what is allowed."""

import difflib
import math
import os
import re
from pathlib import PurePath
from typing import Any, Iterable, Sequence

from deepspec.config.owned import refuse_owned
from deepspec.config.schema import MISSING, STAGES, Config, draft_length
from deepspec.errors import ConfigError
from deepspec.export.layout import FORMATS

DTYPES = ("bfloat16", "float32")
SOURCES = ("hf", "gguf_package", "micro")
SOURCE_KINDS = ("embedded", "jsonl", "parquet", "hf")
MODES = ("none", "fixed", "scheduled")


def _require(condition: bool, key: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r} is not possible: it must be {allowed}.")


def _choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value in allowed:
        return
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{key}={value!r} is unknown: it must be one of {', '.join(allowed)}.{hint}")


def _whole(key: str, value: Any, least: int) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= least, key, value,
             f"a whole number of at least {least}")


def _within(key: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    inside = number and (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    if math.isfinite(high):
        bounds += f" and {'below' if open_high else 'at most'} {high:g}"
    _require(bool(inside), key, value, f"a finite number {bounds}")


def _wholes(prefix: str, group: Any, names: Iterable[str], least: int) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None:
            _whole(f"{prefix}.{name}", value, least)


def _known(value: Any) -> bool:
    return value is not None and value != MISSING


def _stages(config: Config) -> None:
    _require(bool(config.stages), "stages", list(config.stages), f"some of {', '.join(STAGES)}")
    for name in config.stages:
        _choice("stages", name, STAGES)
    _require(len(set(config.stages)) == len(config.stages), "stages", list(config.stages), "without repetition")
    order = [STAGES.index(name) for name in config.stages]
    _require(order == sorted(order), "stages", list(config.stages), f"in the order {', '.join(STAGES)}")


def _run(config: Config) -> None:
    name = str(config.run.name)
    bad = set(name) & set(':;,#?\'"\\*<>| ')
    _require(".." not in PurePath(name).parts and name != ".", "run.name", name, "the name of a folder of its own")
    for key in ("dir", "data_root"):
        _require(bool(getattr(config.run, key)), f"run.{key}", getattr(config.run, key), "a folder")
        _require(not getattr(config.run, key).startswith("~"), f"run.{key}", getattr(config.run, key),
                 "written out: nothing expands ~ here")
    _require(bool(name) and not bad, "run.name", config.run.name,
             "non-empty and without blanks, quotes or any of : ; , # ? * < > | (it is a folder and a W&B id)")
    _whole("run.seed", config.run.seed, 0)
    _whole("run.threads", config.run.threads, 0)


def _target(config: Config) -> None:
    target = config.target
    _choice("target.source", target.source, SOURCES)
    _choice("target.dtype", target.dtype, DTYPES)
    _require(target.source == "micro" or bool(target.path), "target.path", target.path,
             "given (hub id, folder or package)")
    if target.revision is not None and target.source == "hf" and os.path.isdir(target.path):
        raise ConfigError(f"target.revision={target.revision!r} pins a commit of a hub repository, but target.path="
                          f"{target.path!r} is a folder. Remove target.revision, or give the hub id.")
    if target.revision is not None and target.source != "hf":
        raise ConfigError(f"target.revision={target.revision!r} pins a commit of a hub repository, but target.source="
                          f"{target.source} has none. Remove target.revision.")
    _feature_layers(config)
    mask, vocab = target.mask_token_id, target.shape.vocab_size
    if _known(mask):
        _whole("target.mask_token_id", mask, 0)
        if _known(vocab):
            _require(mask < vocab, "target.mask_token_id", mask,
                     f"below target.shape.vocab_size={vocab} (a row of the embedding)")
    shape = target.shape
    for name, value in vars(shape).items():
        if name != "model_type" and _known(value):
            _whole(f"target.shape.{name}", value, 1)
    if _known(shape.num_heads) and _known(shape.num_kv_heads):
        _require(shape.num_heads % shape.num_kv_heads == 0, "target.shape.num_kv_heads", shape.num_kv_heads,
                 f"a divisor of target.shape.num_heads={shape.num_heads}")


def _feature_layers(config: Config) -> None:
    key, layers, total = "target.feature_layers", config.target.feature_layers, config.target.shape.num_layers
    if not _known(layers):
        return
    layers = list(layers)
    _require(bool(layers), key, layers, "a list of at least one layer id")
    for layer in layers:
        _require(isinstance(layer, int) and layer >= 0, key, layers, "made of ids from 0 (the first layer)")
    _require(all(a < b for a, b in zip(layers, layers[1:])), key, layers,
             "strictly ascending (engines sort and de-duplicate the ids, the drafter's columns would no longer match)")
    if not _known(total):
        return
    _require(layers[-1] < total, key, layers, f"made of ids below target.shape.num_layers={total}")
    _require(layers[-1] != total - 1 or str(config.target.shape.model_type).startswith("deepseek_v4"), key, layers,
             f"without the last layer {total - 1}, which serving engines cannot capture")


def _drafter(config: Config) -> None:
    drafter = config.drafter
    _choice("drafter.algorithm", drafter.algorithm, ("dspark", "dflash"))
    _choice("drafter.head", drafter.head, ("none", "vanilla", "gated", "rnn"))
    _whole("drafter.num_layers", drafter.num_layers, 1)
    _require(isinstance(drafter.block_size, int) and drafter.block_size >= 2, "drafter.block_size", drafter.block_size,
             "a whole number of at least 2")
    if drafter.head != "none":
        _whole("drafter.markov_rank", drafter.markov_rank, 1)
    else:
        _whole("drafter.markov_rank", drafter.markov_rank, 0)
    if drafter.algorithm == "dflash" and (drafter.head != "none" or drafter.confidence_head):
        raise ConfigError(f"drafter.algorithm=dflash has no heads, but drafter.head={drafter.head} and "
                          f"drafter.confidence_head={drafter.confidence_head}. Set drafter.head=none and "
                          "drafter.confidence_head=false, or drafter.algorithm=dspark.")
    if drafter.intermediate_size is not None:
        _whole("drafter.intermediate_size", drafter.intermediate_size, 1)
    if drafter.warm_start and drafter.init_from:
        raise ConfigError("drafter.warm_start=True and drafter.init_from both say where the first weights come from. "
                          "Keep one.")
    total = config.target.shape.num_layers
    if drafter.warm_start and _known(total):
        _require(drafter.num_layers <= total, "drafter.num_layers", drafter.num_layers,
                 f"at most target.shape.num_layers={total} with drafter.warm_start=true")


def _objective(config: Config) -> None:
    objective = config.objective
    for name in ("ce_weight", "tv_weight", "confidence_weight"):
        _within(f"objective.{name}", getattr(objective, name), 0.0, math.inf)
    _require(objective.ce_weight + objective.tv_weight > 0, "objective.ce_weight + objective.tv_weight", 0, "above 0")
    if objective.decay is not None:
        _within("objective.decay", objective.decay, 0.0, math.inf, open_low=True)
    _choice("objective.implementation", objective.implementation, ("auto", "eager", "chunked"))
    _whole("objective.chunk_megabytes", objective.chunk_megabytes, 1)


def _data(config: Config) -> None:
    data, responses, features = config.data, config.responses, config.features
    for index, source in enumerate(data.sources):
        _choice(f"data.sources[{index}].kind", source.kind, SOURCE_KINDS)
        _within(f"data.sources[{index}].weight", source.weight, 0.0, math.inf, open_low=True)
        if source.kind == "embedded":
            _choice(f"data.sources[{index}].path", source.path, ("math", "code", "chat"))
        elif not source.path:
            raise ConfigError(f"Source {source.name!r} of kind {source.kind} has no path. Give a file, a folder or a "
                              f"hub id: data.sources.{index}.path=PATH")
        if source.cap is not None:
            _whole(f"data.sources[{index}].cap", source.cap, 1)
    names = [source.name for source in data.sources]
    _require(len(set(names)) == len(names), "data.sources[].name", names, "without repetition")
    _wholes("data", data, ("max_prompts",), 1)
    _within("data.held_out_fraction", data.held_out_fraction, 0.0, 1.0, open_high=True)
    _whole("data.min_held_out", data.min_held_out, 0)
    if {"prompts", "confidence"} <= set(config.stages) and config.drafter.confidence_head:
        _require(data.min_held_out > 0 or data.held_out_fraction > 0, "data.min_held_out", data.min_held_out,
                 "at least 1 with data.held_out_fraction=0: stage confidence reads held-out prompts")
    _whole("data.max_length", data.max_length, 2)
    _whole("data.num_workers", data.num_workers, 0)
    _choice("responses.backend", responses.backend, ("in_process", "server"))
    if responses.backend == "server" and "responses" in config.stages:
        _require(bool(responses.servers), "responses.servers", list(responses.servers),
                 "a list of base URLs ending in /v1 when responses.backend=server")
    for url in responses.servers:
        _require(str(url).startswith(("http://", "https://")), "responses.servers", url, "made of URLs ending in /v1")
    _within("responses.temperature", responses.temperature, 0.0, math.inf)
    _within("responses.top_p", responses.top_p, 0.0, 1.0, open_low=True)
    _wholes("responses", responses, ("max_tokens", "batch_size", "concurrency"), 1)
    _wholes("responses", responses, ("top_k", "retries"), 0)
    _within("responses.seconds_per_token", responses.seconds_per_token, 0.0, math.inf, open_low=True)
    _within("responses.error_limit", responses.error_limit, 0.0, 1.0)
    _choice("responses.truncated", responses.truncated, ("keep", "drop"))
    _choice("features.mode", features.mode, ("cached", "online"))
    _choice("features.codec", features.codec, ("bf16", "int8", "fp32"))
    _wholes("features", features, ("token_budget", "shard_megabytes"), 1)


def _trainer(config: Config) -> None:
    trainer, optimizer = config.trainer, config.optimizer
    _wholes("trainer", trainer, ("epochs", "max_steps", "global_batch_size", "micro_batch_size", "num_anchors",
                                 "log_every", "save_every", "keep_last", "max_bad_steps"), 1)
    _wholes("trainer", trainer, ("validate_every", "validation_samples"), 0)
    _choice("trainer.precision", trainer.precision, ("bf16", "fp32"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    unit = trainer.micro_batch_size * world
    if trainer.global_batch_size % unit:
        raise ConfigError(f"trainer.global_batch_size={trainer.global_batch_size} must be a multiple of "
                          f"trainer.micro_batch_size={trainer.micro_batch_size} x {world} ranks = {unit}. Nearest: "
                          f"{max(1, round(trainer.global_batch_size / unit)) * unit}.")
    _within("optimizer.lr", optimizer.lr, 0.0, math.inf, open_low=True)
    _require(len(optimizer.betas) == 2, "optimizer.betas", list(optimizer.betas), "a list of two numbers")
    for beta in optimizer.betas:
        _within("optimizer.betas", beta, 0.0, 1.0, open_high=True)
    _within("optimizer.eps", optimizer.eps, 0.0, math.inf, open_low=True)
    for name in ("weight_decay", "head_lr_multiplier", "confidence_lr_multiplier"):
        _within(f"optimizer.{name}", getattr(optimizer, name), 0.0, math.inf)
    for name in ("warmup_ratio", "min_lr_ratio"):
        _within(f"optimizer.{name}", getattr(optimizer, name), 0.0, 1.0)
    _within("optimizer.max_grad_norm", optimizer.max_grad_norm, 0.0, math.inf, open_low=True)
    _require(config.engine.zero_stage in (0, 1, 2, 3), "engine.zero_stage", config.engine.zero_stage, "0, 1, 2 or 3")
    refuse_owned(config.engine.deepspeed)
    _within("tracking.timeout_seconds", config.tracking.timeout_seconds, 0.0, math.inf, open_low=True)
    _choice("tracking.mode", config.tracking.mode, ("auto", "online", "offline", "disabled"))


def _later_stages(config: Config) -> None:
    confidence, calibration, profile, evaluate = config.confidence, config.calibration, config.profile, config.evaluate
    _within("confidence.temperature", confidence.temperature, 0.0, math.inf)
    _wholes("confidence", confidence, ("max_new_tokens", "max_prompts", "max_blocks", "batch_size", "epochs"), 1)
    _within("confidence.refit_fraction", confidence.refit_fraction, 0.0, 1.0, open_high=True)
    _within("confidence.lr", confidence.lr, 0.0, math.inf, open_low=True)
    _wholes("calibration", calibration, ("num_bins", "grid_points"), 2)
    _whole("calibration.bootstrap", calibration.bootstrap, 0)
    _within("calibration.grid_min", calibration.grid_min, 0.0, math.inf, open_low=True)
    _within("calibration.grid_max", calibration.grid_max, calibration.grid_min, math.inf, open_low=True)
    _within("calibration.fit_fraction", calibration.fit_fraction, 0.0, 1.0, open_low=True, open_high=True)
    for name, least in (("num_reqs", 1), ("verify_lengths", 0), ("kv_lengths", 1)):
        values = list(getattr(profile, name))
        _require(bool(values), f"profile.{name}", values, "a non-empty list")
        for value in values:
            _whole(f"profile.{name}", value, least)
    _wholes("profile", profile, ("samples_per_cell", "max_batch_tokens"), 1)
    lengths = {1 + min(length, draft_length(config.drafter)) for length in profile.verify_lengths}
    fitting = {(requests, length) for requests in profile.num_reqs for length in lengths
               if requests * length <= profile.max_batch_tokens}
    if "profile" in config.stages:
        _require(len(fitting) * len(set(profile.kv_lengths)) > 1, "profile.max_batch_tokens", profile.max_batch_tokens,
                 "large enough for two cells of profile.num_reqs x profile.verify_lengths")
    _whole("profile.warmup", profile.warmup, 0)
    _within("profile.seconds_limit", profile.seconds_limit, 0.0, math.inf)
    if "evaluate" in config.stages:
        for name in ("benchmarks", "temperatures", "modes"):
            values = list(getattr(evaluate, name))
            _require(bool(values), f"evaluate.{name}", values, "a non-empty list, or stages without evaluate")
    names = [benchmark.name for benchmark in evaluate.benchmarks]
    for key, values in (("benchmarks[].name", names), ("temperatures", list(evaluate.temperatures)),
                        ("modes", list(evaluate.modes))):
        _require(len(set(values)) == len(values), f"evaluate.{key}", values, "without repetition")
    for index, benchmark in enumerate(evaluate.benchmarks):
        if benchmark.limit is not None:
            _whole(f"evaluate.benchmarks[{index}].limit", benchmark.limit, 1)
    for value in evaluate.temperatures:
        _within("evaluate.temperatures", value, 0.0, math.inf)
    for mode in evaluate.modes:
        _choice("evaluate.modes", mode, MODES)
    _wholes("evaluate", evaluate, ("max_new_tokens", "batch_size"), 1)
    _wholes("evaluate", evaluate, ("bootstrap", "check_greedy"), 0)


def _export(config: Config) -> None:
    formats = list(config.export.formats)
    _require(bool(formats), "export.formats", formats, f"some of {', '.join(FORMATS)}")
    for name in formats:
        _choice("export.formats", name, FORMATS)
    _choice("export.dtype", config.export.dtype, DTYPES)
    _require(bool(re.fullmatch(r"latest|step-\d+", config.export.checkpoint)), "export.checkpoint",
             config.export.checkpoint, "latest or step-N")
    if "zlab_dflash" in formats and (config.drafter.algorithm != "dflash" or config.drafter.sample_from_anchor):
        raise ConfigError("export.formats has zlab_dflash, which can only hold a 1+N DFlash drafter "
                          "(drafter.algorithm=dflash drafter.sample_from_anchor=false). Remove it from export.formats.")


def validate(config: Config) -> None:
    """Check every value and combination that can be judged without touching a file. Raises ConfigError."""
    for check in (_stages, _run, _target, _drafter, _objective, _data, _trainer, _later_stages, _export):
        check(config)
