"""A plan and its text: what ``plan=true`` prints."""

from deepspec.planning import memory, peak, work
from deepspec.planning.estimate import Plan, make_plan
from deepspec.planning.samples import LOSSLESS_SHARE

__all__ = ["Plan", "duration", "make_plan", "render", "size"]


def size(value: float) -> str:
    """Bytes with a decimal unit: 38.0 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(hours: float) -> str:
    """Hours as the unit people would use."""
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:.1f} h" if hours < 1000 else f"{hours / 24:,.0f} d"


def _parameters(plan: Plan) -> list[str]:
    counts = plan.parameters
    parts = ", ".join(
        f"{name} {getattr(counts, name):,}" for name in ("fc", "layers", "norms", "head", "confidence"))
    lines = [
        "Parameters",
        f"  trainable       {counts.trainable:>15,}  ({parts})",
        f"  frozen copies   {counts.frozen:>15,}  (embedding and LM head of the target)",
        f"  target          {counts.target:>15,}  (frozen, from its sizes)",
    ]
    if counts.target_active != counts.target:
        lines.append(f"  of it active    {counts.target_active:>15,}  (per token: the experts it goes through)")
    return lines


def _memory(plan: Plan) -> list[str]:
    lines = ["Memory per rank: model state (parameters + gradients + optimizer)"]
    lines.append("  ZeRO  " + "".join(f"{f'{ranks} rank' + 's' * (ranks > 1):>44}" for ranks in memory.RANK_COUNTS))
    for stage in memory.ZERO_STAGES:
        cells = [state for state in plan.states if state.zero_stage == stage]
        texts = [f"{size(c.parameters)} + {size(c.gradients)} + {size(c.optimizer)} = {size(c.total)}" for c in cells]
        lines.append(f"  {stage}     " + "".join(f"{text:>44}" for text in texts))
    step, rank = plan.step, plan.rank
    fixed = f"frozen weights {size(step.frozen)}" if step.frozen else f"whole target {size(step.target)}"
    lines.append(f"  besides: {fixed}, batch {size(step.batch)}, activations {size(step.activations)}"
                 + (f", gathered parameters {size(rank.gathered)}" if rank.gathered else "") + " and either "
                 f"objective {size(step.objective)} or collectives {size(rank.collectives)}; at the update "
                 f"{size(rank.update)}")
    return lines + _fits(plan)


def _fits(plan: Plan) -> list[str]:
    """Peaks by ZeRO stage, and what fits where."""
    names = list(plan.fits[0].largest)
    host = any(fit.host for fit in plan.fits)
    several = f"{plan.ranks} rank" + "s" * (plan.ranks > 1)
    lines = [f"Peak per rank on {several}, and the most {plan.batch_unit} that fit",
             f"  ZeRO{'peak':>12}" + f"{'in main memory':>18}" * host + "".join(f"{_head(one):>20}" for one in names)]
    for fit in plan.fits:
        mark = "  *" if fit.zero_stage == plan.zero_stage else ""
        cells = "".join(f"{'too large' if most is None else f'{most:,}':>20}" for most in fit.largest.values())
        lines.append(f"  {fit.zero_stage}   {size(fit.peak):>12}" + f"{size(fit.host):>18}" * host + cells + mark)
    lines.append(f"  (* engine.zero_stage as it is; {peak.USABLE:.0%} of an accelerator's memory counted as usable)")
    if plan.target_ranks:
        lines.append(f"  each of the {plan.target_ranks} target ranks: {size(plan.target_rank_bytes)}")
    return lines


def _head(name: str) -> str:
    return f"{name} {peak.ACCELERATOR_GB[name]} GB" if name in peak.ACCELERATOR_GB else name


def _work(plan: Plan) -> list[str]:
    load = plan.workload
    prompts = "unknown" if load.prompts is None else f"{load.prompts:,}"
    lines = [
        "Work",
        f"  prompts {prompts} ({load.prompts_from}); {load.length.tokens:,.0f} tokens per sample, "
        f"{load.length.answer:,.0f} of them generated ({load.length.source}); "
        f"{load.samples_per_epoch:,} training samples; {load.steps:,} optimizer steps",
        f"  {load.packs.text}",
    ]
    if load.cache_bytes or load.prompts is None:
        total = size(load.cache_bytes) if load.prompts is not None else "times the prompts"
        per_token = f"{load.cache_bytes_per_token:,} B per token whose next token is a label"
        assumed = f" (assumed: {LOSSLESS_SHARE:.0%} of bf16)" if load.cache_codec == "lossless" else ""
        codec = f"as {load.cache_codec}{assumed}"
        lines.append(f"  feature cache {codec}, {per_token}, {total} in {load.cache_files:,} shards")
    if plan.texts.prompts or plan.texts.responses:
        lines.append(f"  prompts {size(plan.texts.prompts)} and {size(plan.texts.pool)} of temporary files while they "
                     f"are collected, answers {size(plan.texts.responses)}")
    lines.append(f"  checkpoints {size(load.checkpoint_bytes)} ({size(load.one_checkpoint_bytes)} each, and as much "
                 f"host memory of rank 0 while one is written), export {size(load.export_bytes)}")
    lines.append("  " + ", ".join(f"{stage} {amount:.3g} FLOP" for stage, amount in plan.flops.items()))
    return lines


def _time(plan: Plan) -> list[str]:
    shares = ", ".join(f"{stage} {work.UTILISATION[stage]:.0%}" for stage in plan.flops)
    lines = [f"Device time (assumed share of peak: {shares}; divide by the number of devices)"]
    for name, stages in plan.hours.items():
        note = f"{work.CPU_TFLOPS_PER_CORE * 1000:.0f} GFLOP/s fp32 per core assumed"
        if name in work.PEAK_TFLOPS:
            note = f"{work.PEAK_TFLOPS[name]:.0f} TFLOP/s bf16"
        lines.append(f"  {name:<22} " + ", ".join(f"{stage} {duration(value)}" for stage, value in stages.items())
                     + f"  [{note}]")
    return lines


def _disk(plan: Plan) -> list[str]:
    lines = ["Disk"]
    lines += [f"  {disk.path}: needs {size(disk.need)}, free {size(disk.free)}{_too_little(disk.need, disk.free)}"
              for disk in plan.disks]
    if any(stage.missing and stage.name == "features" for stage in plan.stages) and plan.workload.cache_bytes:
        need, free = plan.workload.cache_bytes, plan.disks[0].free
        lines.append(f"  {plan.disks[0].path}, once the features are made: needs {size(need)}, free "
                     f"{size(free)}{_too_little(need, free)}")
    return lines


def _too_little(need: int, free: int) -> str:
    return "" if free >= need else "  TOO LITTLE"


def render(plan: Plan) -> str:
    """Text of ``plan``, ending in a newline."""
    blocks = [
        [f"Plan of run {plan.run} (target {plan.target}): nothing is started.",
         f"ranks {plan.ranks}, ZeRO stage {plan.zero_stage}"],
        ["Stages"] + [f"  {s.name:<11} {s.verdict:<29} {s.directory}" for s in plan.stages],
        _parameters(plan), _memory(plan), _work(plan), _time(plan),
        _disk(plan),
    ]
    if plan.warnings:
        blocks.append(list(plan.warnings))
    missing = [stage.name for stage in plan.stages if stage.missing]
    if missing:
        blocks.append([f"This job would be refused: {' and '.join(missing)} are not there, and stages leaves them out. "
                       "Make them first, with the scripts in data_prep/ or by adding them to stages."])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"
