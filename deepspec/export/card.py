"""The model card (README.md of an export)."""

from typing import Any, Iterable, Mapping, Optional

from deepspec.config.schema import Config, training_seed
from deepspec.export import engines, layout
from deepspec.export.acceptance import speculative_settings
from deepspec.export.evidence import Evidence
from deepspec.export.launch import Origin, launch_text
from deepspec.targets.quantization import same_quantization
from deepspec.targets.spec import TargetSpec


def _number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def _front_matter(config: Config, origin: Origin) -> list[str]:
    base = [f"base_model: {origin.target}"] if origin.on_hub else []
    tags = f"tags: [speculative-decoding, draft-model, {config.drafter.algorithm}]"
    return ["---", *base, "library_name: transformers", tags, "---", ""]


def _what(values: Mapping[str, Any], spec: TargetSpec, config: Config, origin: Origin) -> list[str]:
    revision = f", revision `{origin.revision}`" if origin.revision else ", no revision pinned"
    return [
        f"# {config.run.name}: a {config.drafter.algorithm} drafter", "",
        f"Draft model for speculative decoding with **{origin.shown}**{revision} (weights "
        f"`{origin.target_fingerprint[:16]}`, {origin.target_dtype}). It is useless with any other model.", "",
        *(_recurrent(values) if layout.is_recurrent(values) else _block(values, config)),
        f"* reads the outputs of target layers {values['target_layer_ids']} of {spec.num_layers} (0-based; "
        "`hidden_states[i + 1]` in Hugging Face's counting)",
        f"* stored as {values['dtype']}", "",
    ]


def _block(values: Mapping[str, Any], config: Config) -> list[str]:
    """What only a drafter of blocks has."""
    head = values.get("markov_head_type") if values["markov_rank"] else "none"
    if config.drafter.head == "none" and values["markov_rank"]:
        head = "none (stored as a zero Markov head of rank 1, which engines need)"
    return [
        f"* {values.get('n_mtp_layers', values['num_hidden_layers'])} layers, width {values['hidden_size']}, "
        f"{values['block_size']} slots, "
        f"**{layout.speculative_tokens(values)} draft tokens per round** "
        f"(`sample_from_anchor: {str(values['sample_from_anchor']).lower()}`)",
        f"* sequential head: {head}, rank {values['markov_rank']}; confidence head: "
        f"{'yes' if values['enable_confidence_head'] else 'no'}; mask token {values['mask_token_id']}",
    ]


def _recurrent(values: Mapping[str, Any]) -> list[str]:
    """What only an autoregressive drafter has."""
    return [
        f"* 1 layer, width {values['hidden_size']}, run once per draft token: "
        f"**{layout.speculative_tokens(values)} draft tokens per round**, more or fewer as the engine is told",
        f"* training unrolled {values['ttt_length']} steps of its own hidden states; no confidence head",
    ]


def _data(config: Config) -> list[str]:
    sources = ", ".join(f"{source.name} ({source.domain})" for source in config.data.sources) or "not recorded"
    thinking = {True: "on", False: "off", None: "as the template decides"}[config.target.thinking]
    sampling = config.responses
    if sampling.thinking_share is not None:
        thinking = f"on for {sampling.thinking_share:.0%} of the conversations"
    limit = "" if config.trainer.max_steps is None else f" (at most {config.trainer.max_steps} steps)"
    return [
        "## Training data", "",
        f"Prompts: {sources}. Answers: the target's own, temperature {sampling.temperature}, top-p {sampling.top_p}, "
        f"top-k {sampling.top_k}, at most {sampling.max_tokens} tokens, **thinking {thinking}**. Samples are cut at "
        f"{config.data.max_length} tokens; positions beyond that were never trained.", "",
        f"{config.trainer.epochs} epochs{limit}, {config.trainer.global_batch_size} samples per step, "
        f"{config.trainer.num_anchors} anchors per sample, learning rate {config.optimizer.lr}, seed "
        f"{training_seed(config)}.", "",
    ]


def _sets(setting: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Benchmarks, and after them the domains that pool several: one with a single benchmark would repeat it."""
    benchmarks = list((setting.get("benchmarks") or {}).items())
    held = [value.get("domain") for _, value in benchmarks]
    pooled = [(f"all of {name}", {**value, "domain": name}) for name, value in (setting.get("domains") or {}).items()
              if held.count(name) != 1]
    return benchmarks + pooled


def _row(name: str, value: Mapping[str, Any]) -> list[str]:
    low, high = value.get("acceptance_length_ci95") or (None, None)
    by_position = " ".join(_number(share) for share in value.get("conditional_acceptance") or ())
    return [name, str(value.get("domain", "")), str(value.get("num_prompts", "")),
            _number(value.get("acceptance_length")), f"{_number(low)} to {_number(high)}", by_position,
            _number(value.get("speedup"))]


def _vocabulary(values: Mapping[str, Any], evaluation: Optional[Mapping[str, Any]]) -> list[str]:
    """What a reduced draft vocabulary costs."""
    size = values.get("draft_vocab_size", values["vocab_size"])
    if size == values["vocab_size"]:
        return []
    shares = [setting["draft_vocab_coverage"] for setting in speculative_settings(evaluation).values()
              if setting.get("draft_vocab_coverage") is not None]
    measured = f"{shares[0]:.2%} of the tokens generated in the evaluation are among them" if shares else "not measured"
    return [f"Proposes {size} of the target's {values['vocab_size']} tokens (`d2t`): {measured}, which is a ceiling on "
            "the acceptance of one draft token.", ""]


def _told_apart(setting: Mapping[str, Any]) -> list[str]:
    """Acceptance by context length and by reasoning, where an evaluation has several of them."""
    lines = []
    for key, title in (("by_context_length", "context before the round, in tokens"), ("by_thinking", "reasoning")):
        values = setting.get(key) or {}
        if len(values) > 1:
            lines += _table((title, "rounds", "acceptance length", "95 %"), [
                [name, str(one.get("rounds")), _number(one.get("acceptance_length")),
                 " to ".join(_number(bound) for bound in one.get("acceptance_length_ci95") or (None, None))]
                for name, one in values.items()])
    return lines


def _acceptance(evaluation: Optional[Mapping[str, Any]], missing: Optional[str], gamma: int) -> list[str]:
    lines = ["## Acceptance", ""]
    settings = speculative_settings(evaluation)
    if not settings:
        return lines + [f"Not measured: {missing or 'no settings in evaluation.json'}.", ""]
    lines += ["Tokens per target step, the bonus token included, pooled over all rounds. Conditional acceptance at "
              f"position k: given that all before it were accepted. At most {gamma} draft tokens.", ""]
    for name, setting in settings.items():
        lines += [f"### Setting `{name}`: temperature {setting.get('temperature')}, thinking "
                  f"{setting.get('thinking')}, {setting.get('mode')}, {setting.get('decoding', 'fixed')} lengths, "
                  f"batch {setting.get('batch_size')}", ""]
        rows = [_row(key, value) for key, value in _sets(setting)]
        lines += _table(("set", "domain", "prompts", "acceptance length", "95 %", "conditional acceptance by position",
                         "speed-up"), rows)
        lines += _told_apart(setting)
    return lines


def _calibration(calibration: Optional[Mapping[str, Any]], missing: Optional[str]) -> list[str]:
    lines = ["## Confidence", ""]
    if calibration is None:
        return lines + [f"No calibration: {missing}. Confidences are raw.", ""]
    keys = ("temperatures", "ece_before", "ece_after", "ece_noise_floor", "auc")
    columns = [list(calibration.get(key) or ()) for key in keys]
    rows = [[str(k + 1), *(_number(column[k] if k < len(column) else None, 3) for column in columns)]
            for k in range(len(columns[0]))]
    count = calibration.get("num_samples")
    lines += _folded(calibration) + [f"Sequential Temperature Scaling, reported on {count} blocks the fit never saw. "
                                     "ECE is of the cumulative product.", ""]
    return lines + _table(
        ("position", "temperature", "ECE before", "ECE after", "noise floor", "AUC"), rows) + _forms(calibration)


def _folded(calibration: Mapping[str, Any]) -> list[str]:
    """What is inside the head's weights, where something is."""
    folded = calibration.get("folded")
    if folded is None:
        return []
    return [f"The confidence head of this export is calibrated in its weights: `w / T` and `b / T + s` with "
            f"T = {folded['temperature']:.4g} and s = {folded['shift']:+.4g}. An engine that reads no temperatures "
            "takes its sigmoid as it is; the temperatures below are those on top of it, for engines that read them. "
            "\"Before\" is this head without them.", ""]


def _forms(calibration: Mapping[str, Any]) -> list[str]:
    """Mean ECE of every form of the confidence, and which engines can use it."""
    rows = [[name, _number(values.get("ece_mean"), 4), str(values.get("engines"))]
            for name, values in (calibration.get("methods") or {}).items()]
    if not rows:
        return []
    return ["", "Mean ECE over positions of each form of the confidence, on the same blocks:", ""] + _table(
        ("form", "ECE", "usable by"), rows)


def _profile(sps: Optional[Mapping[str, Any]], missing: Optional[str]) -> list[str]:
    lines = ["## Throughput profile", ""]
    if sps is None:
        return lines + [f"None: {missing}.", ""]
    tokens, rates = sps["sample_batch_tokens"], sps["sample_steps_per_sec"]
    return lines + [
        f"Measured with {sps.get('engine')} on {sps.get('hardware')}, {sps.get('dtype')}, context {sps.get('kv_len')}: "
        f"{rates[0]:.3g} steps/s at {tokens[0]} tokens per step, {rates[-1]:.3g} at {tokens[-1]}. It does not hold for "
        "other hardware.", ""]


def _weights(origin: Origin) -> str:
    """Which weights of the target the drafter is for."""
    told = origin.features_quantization or "weights that are not quantised"
    line = f"* Learned from hidden states of {told}"
    if not same_quantization(origin.features_quantization, origin.target_quantization):
        line += (f"; the target named above has {origin.target_quantization or 'weights that are not quantised'}, and "
                 "the numbers here were measured with it: acceptance depends on the weights that serve")
    return line + "."


def _limits(values: Mapping[str, Any], config: Config, evidence: Evidence, origin: Origin) -> list[str]:
    lines = ["## Limits", "", _weights(origin),
             f"* Trained on samples of at most {config.data.max_length} tokens; config.json allows the target's "
             f"{values['max_position_embeddings']}, but acceptance beyond the trained length is not known.",
             "* Acceptance depends on the traffic: a thinking mode, language or domain that was not trained drafts "
             "worse. The output does not change, only its speed."]
    lines += [f"* {entry.engine} cannot load it: {'; '.join(entry.reasons)}" for entry in engines.verdicts(values)
              if not entry.loads]
    lines += [f"* Absent from this export: {name} ({reason})" for name, reason in sorted(evidence.absent.items())]
    return lines + [""]


def card(values: Mapping[str, Any], spec: TargetSpec, config: Config, origin: Origin, evidence: Evidence,
         written: list[str]) -> str:
    """README.md. ``values``: config.json of the export; ``written``: names of the files in serving/."""
    launch = "#" + launch_text(values, spec, origin, written).replace("\n## ", "\n### ")
    names = evidence.absent
    lines = [
        *_front_matter(config, origin), *_what(values, spec, config, origin), *_data(config),
        *_vocabulary(values, evidence.evaluation),
        *_acceptance(evidence.evaluation, names.get("evaluation"), layout.speculative_tokens(values)),
        *_calibration(evidence.calibration, names.get("calibration")), *_profile(evidence.sps, names.get("profile")),
        launch, *_limits(values, config, evidence, origin),
    ]
    return "\n".join(lines)
