"""Pure checks of option values and their combinations. Every message names the key, the value and what is allowed."""

import math
import os
import re
from pathlib import PurePath
from typing import Any

from deepspec.config.schema import (
    ALGORITHMS, AUTOREGRESSIVE, MISSING, ON_LAST_HIDDEN, STAGES, WITH_HEADS, Config, drafter_layers, is_autoregressive,
)
from deepspec.errors import ConfigError
from deepspec.export.layout import FORMATS
from deepspec.planning.require import choice, require, whole, wholes, within
from deepspec.planning.validate_data import check_cleaning
from deepspec.planning.validate_evaluation import check_evaluation
from deepspec.planning.validate_features import check_features
from deepspec.planning.validate_serving import check_doctor, check_loop
from deepspec.planning.validate_speed import check_speed
from deepspec.planning.validate_training import check_objective, check_trainer
from deepspec.planning.validate_v4 import check_v4

DTYPES = ("bfloat16", "float32")
SOURCES = ("hf", "gguf_package", "micro")
SOURCE_KINDS = ("embedded", "jsonl", "requests", "parquet", "hf")


def _known(value: Any) -> bool:
    return value is not None and value != MISSING


def _stages(config: Config) -> None:
    require(bool(config.stages), "stages", list(config.stages), f"some of {', '.join(STAGES)}")
    for name in config.stages:
        choice("stages", name, STAGES)
    require(len(set(config.stages)) == len(config.stages), "stages", list(config.stages), "without repetition")
    order = [STAGES.index(name) for name in config.stages]
    require(order == sorted(order), "stages", list(config.stages), f"in the order {', '.join(STAGES)}")


def _run(config: Config) -> None:
    name = str(config.run.name)
    bad = set(name) & set(':;,#?\'"\\*<>| ')
    require(".." not in PurePath(name).parts and name != ".", "run.name", name, "the name of a folder of its own")
    for key in ("dir", "data_root"):
        require(bool(getattr(config.run, key)), f"run.{key}", getattr(config.run, key), "a folder")
        require(not getattr(config.run, key).startswith("~"), f"run.{key}", getattr(config.run, key),
                "written out: nothing expands ~ here")
    require(bool(name) and not bad, "run.name", config.run.name,
            "non-empty and without blanks, quotes or any of : ; , # ? * < > | (it is a folder and a W&B id)")
    whole("run.seed", config.run.seed, 0)
    require(config.run.seed < 2**32, "run.seed", config.run.seed, "below 2**32, the range of all generators")
    whole("run.threads", config.run.threads, 0)


def _target(config: Config) -> None:
    target = config.target
    choice("target.source", target.source, SOURCES)
    choice("target.dtype", target.dtype, DTYPES)
    require(target.source == "micro" or bool(target.path), "target.path", target.path,
            "given (hub id, folder or package)")
    require(target.source != "micro" or not (target.path and _known(target.path)), "target.path", target.path,
            "left out with target.source=micro, which trains its own target; add target.source=hf for yours")
    if target.revision is not None and target.source == "hf" and os.path.isdir(target.path):
        raise ConfigError(f"target.revision={target.revision!r} pins a commit of a hub repository, but target.path="
                          f"{target.path!r} is a folder. Remove target.revision, or give the hub id.")
    if target.revision is not None and target.source != "hf":
        raise ConfigError(f"target.revision={target.revision!r} pins a commit of a hub repository, but target.source="
                          f"{target.source} has none. Remove target.revision.")
    _feature_layers(config)
    mask, vocab = target.mask_token_id, target.shape.vocab_size
    if _known(mask):
        whole("target.mask_token_id", mask, 0)
        if _known(vocab):
            require(mask < vocab, "target.mask_token_id", mask,
                    f"below target.shape.vocab_size={vocab} (a row of the embedding)")
    shape = target.shape
    for name, value in vars(shape).items():
        if name not in ("model_type", "keys_are_values") and _known(value):
            whole(f"target.shape.{name}", value, 1)
    if shape.active_parameters is not None:
        require(shape.active_parameters <= (shape.parameters or 0), "target.shape.active_parameters",
                shape.active_parameters, f"at most target.shape.parameters={shape.parameters}")
    if _known(shape.num_heads) and _known(shape.num_kv_heads):
        require(shape.num_heads % shape.num_kv_heads == 0, "target.shape.num_kv_heads", shape.num_kv_heads,
                f"a divisor of target.shape.num_heads={shape.num_heads}")


def _feature_layers(config: Config) -> None:
    key, layers, total = "target.feature_layers", config.target.feature_layers, config.target.shape.num_layers
    if not _known(layers):
        return
    layers = list(layers)
    require(bool(layers), key, layers, "a list of at least one layer id")
    for layer in layers:
        require(isinstance(layer, int) and layer >= 0, key, layers, "made of ids from 0 (the first layer)")
    require(all(a < b for a, b in zip(layers, layers[1:])), key, layers,
            "strictly ascending (engines sort and de-duplicate the ids, the drafter's columns would no longer match)")
    if not _known(total):
        return
    require(layers[-1] < total, key, layers, f"made of ids below target.shape.num_layers={total}")
    if config.drafter.algorithm in ON_LAST_HIDDEN:
        require(config.features.mode != "server", "features.mode", config.features.mode, "another one with "
                f"drafter.algorithm={config.drafter.algorithm}: servers give layer outputs, not the last hidden state "
                "of every token")
        require(layers == [total - 1], key, layers, f"[{total - 1}], the target's last hidden state, with "
                f"drafter.algorithm={config.drafter.algorithm} (drafter={config.drafter.algorithm} sets it: leave it "
                "out)")
        return
    require(layers[-1] != total - 1 or str(config.target.shape.model_type).startswith("deepseek_v4"), key, layers,
            f"without the last layer {total - 1}, which serving engines cannot capture")


def _block(config: Config) -> None:
    drafter = config.drafter
    choice("drafter.block", drafter.block, ("qwen3", "gemma4"))
    if drafter.block == "qwen3":
        return
    require(drafter.algorithm in ("dspark", "dflash") and drafter.sliding_window is None, "drafter.block",
            drafter.block, f"qwen3 with drafter.algorithm={drafter.algorithm} or with drafter.sliding_window: dspark "
            "and dflash without a window have other blocks")
    kind = str(config.target.shape.model_type)
    require(kind == MISSING or kind.startswith("gemma4"), "drafter.block", drafter.block,
            f"qwen3 for a target of model_type {kind}: gemma4 copies the layers of Gemma 4 targets")
    require(list(config.export.formats) == ["deepspec"], "export.formats", list(config.export.formats),
            "[deepspec] with drafter.block=gemma4: other layouts hold Qwen3-shaped drafters only")


def _drafter(config: Config) -> None:
    drafter = config.drafter
    choice("drafter.algorithm", drafter.algorithm, ALGORITHMS)
    recurrent = is_autoregressive(drafter.algorithm)
    _block(config)
    check_v4(config)
    choice("drafter.head", drafter.head, ("none", "vanilla", "gated", "rnn"))
    whole("drafter.num_layers", drafter.num_layers, 1)
    least = 1 if recurrent else 2
    require(isinstance(drafter.block_size, int) and drafter.block_size >= least, "drafter.block_size",
            drafter.block_size, f"a whole number of at least {least}")
    if drafter.unroll is not None:
        whole("drafter.unroll", drafter.unroll, 1)
        require(recurrent, "drafter.unroll", drafter.unroll, "null, unless drafter.algorithm is one of "
                f"{', '.join(AUTOREGRESSIVE)}: {drafter.algorithm} drafts a block in one pass")
    if recurrent or drafter.algorithm == "medusa":
        require(drafter.sample_from_anchor, "drafter.sample_from_anchor", drafter.sample_from_anchor,
                f"true with drafter.algorithm={drafter.algorithm}, whose first draft token follows the anchor")
        require(drafter.sliding_window is None, "drafter.sliding_window", drafter.sliding_window,
                f"null with drafter.algorithm={drafter.algorithm}, which chooses its context itself")
        require(not (drafter.warm_start and drafter.algorithm == "medusa"), "drafter.warm_start", True,
                "false with drafter.algorithm=medusa, which has no decoder layer; it starts as the target's LM head")
    if drafter.head != "none":
        whole("drafter.markov_rank", drafter.markov_rank, 1)
    else:
        whole("drafter.markov_rank", drafter.markov_rank, 0)
    if drafter.algorithm not in WITH_HEADS and (drafter.head != "none" or drafter.confidence_head):
        raise ConfigError(f"drafter.algorithm={drafter.algorithm} has no heads, but drafter.head={drafter.head} and "
                          f"drafter.confidence_head={drafter.confidence_head}. Set drafter.head=none and "
                          "drafter.confidence_head=false, or drafter.algorithm=dspark.")
    if drafter.draft_vocab_size is not None:
        whole("drafter.draft_vocab_size", drafter.draft_vocab_size, 1)
        require(drafter.algorithm in ("dspark", "dflash", "eagle3") and drafter.block == "qwen3",
                "drafter.draft_vocab_size", drafter.draft_vocab_size, "null with drafter.algorithm=mtp, dspark_v4 or "
                "medusa and with drafter.block=gemma4: no engine takes a reduced vocabulary there")
        require(set(config.export.formats) <= {"deepspec", "speculators"}, "export.formats",
                list(config.export.formats), "made of deepspec and speculators with drafter.draft_vocab_size")
    if drafter.intermediate_size is not None:
        whole("drafter.intermediate_size", drafter.intermediate_size, 1)
    if drafter.sliding_window is not None:
        whole("drafter.sliding_window", drafter.sliding_window, 1)
    if drafter.warm_start and drafter.init_from:
        raise ConfigError("drafter.warm_start=True and drafter.init_from both say where the first weights come from. "
                          "Keep one.")
    total = config.target.shape.num_layers
    if drafter.warm_start and _known(total):
        require(drafter_layers(drafter) <= total, "drafter.num_layers", drafter.num_layers,
                f"at most target.shape.num_layers={total} with drafter.warm_start=true")


def _data(config: Config) -> None:
    data, responses = config.data, config.responses
    for index, source in enumerate(data.sources):
        choice(f"data.sources[{index}].kind", source.kind, SOURCE_KINDS)
        within(f"data.sources[{index}].weight", source.weight, 0.0, math.inf, open_low=True)
        if source.kind == "embedded":
            choice(f"data.sources[{index}].path", source.path, ("math", "code", "chat"))
        elif not source.path:
            raise ConfigError(f"Source {source.name!r} of kind {source.kind} has no path. Give a file, a folder or a "
                              f"hub id: data.sources.{index}.path=PATH")
        if source.cap is not None:
            whole(f"data.sources[{index}].cap", source.cap, 1)
    names = [source.name for source in data.sources]
    require(len(set(names)) == len(names), "data.sources[].name", names, "without repetition")
    wholes("data", data, ("max_prompts",), 1)
    within("data.held_out_fraction", data.held_out_fraction, 0.0, 1.0, open_high=True)
    whole("data.min_held_out", data.min_held_out, 0)
    check_cleaning(data)
    if {"prompts", "confidence"} <= set(config.stages) and config.drafter.confidence_head:
        require(data.min_held_out > 0 or data.held_out_fraction > 0, "data.min_held_out", data.min_held_out,
                "at least 1 with data.held_out_fraction=0: stage confidence reads held-out prompts")
    whole("data.max_length", data.max_length, 2)
    whole("data.num_workers", data.num_workers, 0)
    choice("responses.backend", responses.backend, ("in_process", "server"))
    if responses.backend == "server" and "responses" in config.stages:
        require(bool(responses.servers), "responses.servers", list(responses.servers),
                "a list of base URLs ending in /v1 when responses.backend=server")
    for url in responses.servers:
        require(str(url).startswith(("http://", "https://")), "responses.servers", url, "made of URLs ending in /v1")
    within("responses.temperature", responses.temperature, 0.0, math.inf)
    within("responses.top_p", responses.top_p, 0.0, 1.0, open_low=True)
    wholes("responses", responses, ("max_tokens", "batch_size", "concurrency", "breaker_failures"), 1)
    wholes("responses", responses, ("top_k", "retries"), 0)
    within("responses.seconds_per_token", responses.seconds_per_token, 0.0, math.inf, open_low=True)
    within("responses.patience_seconds", responses.patience_seconds, 0.0, math.inf)
    if responses.thinking_share is not None:
        within("responses.thinking_share", responses.thinking_share, 0.0, 1.0)
    within("responses.error_limit", responses.error_limit, 0.0, 1.0)
    choice("responses.truncated", responses.truncated, ("keep", "drop"))
    check_features(config)


def _later_stages(config: Config) -> None:
    confidence, calibration = config.confidence, config.calibration
    within("confidence.temperature", confidence.temperature, 0.0, math.inf)
    wholes("confidence", confidence, ("max_new_tokens", "max_prompts", "max_blocks", "batch_size", "epochs"), 1)
    within("confidence.refit_fraction", confidence.refit_fraction, 0.0, 1.0, open_high=True)
    within("confidence.lr", confidence.lr, 0.0, math.inf, open_low=True)
    wholes("calibration", calibration, ("num_bins", "grid_points"), 2)
    whole("calibration.bootstrap", calibration.bootstrap, 0)
    whole("calibration.min_samples", calibration.min_samples, 1)
    for key, names in (("method", [calibration.method]), ("compare", list(calibration.compare))):
        for value in names:
            choice(f"calibration.{key}", value, ("sts", "platt", "beta", "isotonic"))
    require(calibration.recalibrate or calibration.records is not None, "calibration.recalibrate", False,
            "true without calibration.records: there would be nothing to do")
    within("calibration.grid_min", calibration.grid_min, 0.0, math.inf, open_low=True)
    within("calibration.grid_max", calibration.grid_max, calibration.grid_min, math.inf, open_low=True)
    within("calibration.fit_fraction", calibration.fit_fraction, 0.0, 1.0, open_low=True, open_high=True)


def _export(config: Config) -> None:
    formats = list(config.export.formats)
    require(bool(formats), "export.formats", formats, f"some of {', '.join(FORMATS)}")
    for name in formats:
        choice("export.formats", name, FORMATS)
    choice("export.dtype", config.export.dtype, DTYPES)
    require(bool(re.fullmatch(r"latest|best|step-\d+", config.export.checkpoint)), "export.checkpoint",
            config.export.checkpoint, "latest, best or step-N")
    choice("export.weights", config.export.weights, ("trained", "ema"))
    if config.export.weights == "ema" and config.trainer.ema_decay is None:
        raise ConfigError("export.weights=ema needs averaged weights, but trainer.ema_decay is null. Set it (0.999, "
                          "say) and train, or use export.weights=trained.")
    if config.export.fold_calibration and not config.drafter.confidence_head:
        raise ConfigError("export.fold_calibration=true changes the confidence head, but with "
                          "drafter.confidence_head=false there is none. Leave export.fold_calibration out.")
    held = {"eagle3": ("deepspec", "speculators"), "mtp": ("deepspec",), "medusa": ("deepspec",)}.get(
        config.drafter.algorithm, FORMATS)
    for name in formats:
        require(name in held, "export.formats", formats,
                f"made of {', '.join(held)} with drafter.algorithm={config.drafter.algorithm}")
    if config.export.push_to_hub is not None:
        require(bool(re.fullmatch(r"[\w.-]+/[\w.-]+", config.export.push_to_hub)), "export.push_to_hub",
                config.export.push_to_hub, "owner/name, a repository of the hub")
    if "zlab_dflash" in formats and (config.drafter.algorithm != "dflash" or config.drafter.sample_from_anchor):
        raise ConfigError("export.formats has zlab_dflash, which can only hold a 1+N DFlash drafter "
                          "(drafter.algorithm=dflash drafter.sample_from_anchor=false). Remove it from export.formats.")


def validate(config: Config) -> None:
    """Check every value and combination that can be judged without touching a file. Raises ConfigError."""
    for check in (_stages, _run, _target, _drafter, check_objective, _data, check_trainer, _later_stages,
                  check_evaluation, check_speed, _export, check_doctor, check_loop):
        check(config)
