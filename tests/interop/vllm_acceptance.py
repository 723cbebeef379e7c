"""Serves a target with exported drafters in real vLLM on the CPU and prints what the engine counted as one JSON line.

Runs under the Python of an environment that holds vLLM's CPU build; it imports nothing of this project. The jobs are a
JSON list on stdin, run one after another in this process; the line is the list of their reports. All must be for the
same runner (``needs_second``). One job:

    {"target": DIR, "speculative_config": {..} | null, "prompts": [[ids], ..], "max_tokens": 32, "temperature": 0.0,
     "dtype": "float32", "max_model_len": 256, "hf_overrides": {}, "seed": 0, "alone": false, "record": false,
     "confidence": false}

With ``record`` prompts are answered one by one, and the report has the draft tokens of every round by prompt, with
``confidence`` beside it (DSpark) also what the confidence head said, which the engine evaluates only where it schedules
by it. With ``alone`` the target is also run without a drafter, and ``greedy_equal`` says whether the outputs are the
same.
"""

import contextlib
import gc
import json
import os
import sys
import types
from typing import Any, Iterator, Optional, Sequence


def prepare(second: bool) -> None:
    """Environment of the engine. DSpark needs Model Runner V2, whose kernels need Triton's interpreter on a CPU."""
    os.environ.update({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if second else "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    })
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not second:
        os.environ.pop("TRITON_INTERPRET", None)
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    # The runner asks which Triton backend is active before it launches a kernel; interpreted kernels need none.
    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    mend_masks()


def mend_masks() -> None:
    """Triton 3.9's interpreter keeps ``mask & scalar`` as int32, which its own loads and stores then refuse."""
    from triton.runtime import interpreter

    def as_bool(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(self, ptrs, value, as_bool(mask), *rest)


def mend_log1p() -> None:
    """Device library calls return nothing under the interpreter; residual sampling at temperature > 0 needs log1p."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as utils

    utils.tldevice.log1p = lambda value: utils.tl.log(1.0 + value)


def mend_key_norm() -> None:
    """Per-layer norm of the context keys: vLLM's CPU kernel applies layer 0's weight to every draft layer."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self: Any, keys: Any) -> Any:  # [layers, tokens, kv_heads, head_dim]
        exact = keys.float()
        scale = (exact.square().mean(dim=-1, keepdim=True) + self._rms_norm_eps).rsqrt()
        weights = self._k_norm_weights.float()[:, None, None, :]
        return (exact * scale * weights).to(keys.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normalize


@contextlib.contextmanager
def record_drafts() -> Iterator[list[Any]]:
    """The draft tokens [K] of every round of a single request, filled while the engine runs."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator  # DSpark's inherits it

    rounds: list[Any] = []
    propose = DFlashSpeculator.propose

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        rounds.append(drafts[0].tolist())
        return drafts

    DFlashSpeculator.propose = recorded
    yield rounds
    DFlashSpeculator.propose = propose


@contextlib.contextmanager
def record_confidences() -> Iterator[list[Any]]:
    """Sigmoids [K] of the confidence head in every round of a single request, filled while the engine runs."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    rounds: list[Any] = []
    sample = DSparkSpeculator._sample_sequential

    def recorded(self: Any, requests: int, hidden: Any) -> None:
        self.use_confidence_head = True  # left off without adaptive verification, which no CPU can do
        sample(self, requests, hidden)
        rounds.append(self.draft_token_confidence_probs[0].tolist())

    DSparkSpeculator._sample_sequential = recorded
    yield rounds
    DSparkSpeculator._sample_sequential = sample


def generate(job: dict[str, Any], speculative: Optional[dict[str, Any]],
             recorded: Sequence[list[Any]] = ()) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids of every prompt, and the engine's counters of speculative decoding. ``recorded`` is cleared first."""
    from vllm import LLM, SamplingParams

    options = {"speculative_config": speculative} if speculative else {}
    if job.get("hf_overrides"):  # MTP's layer is built from the target's configuration
        options["hf_overrides"] = job["hf_overrides"]
    engine = LLM(
        job["target"], dtype=job.get("dtype", "float32"), max_model_len=job.get("max_model_len", 256),
        max_num_seqs=job.get("max_num_seqs", 4), seed=job.get("seed", 0), enforce_eager=True, disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(
        max_tokens=job.get("max_tokens", 32), temperature=job.get("temperature", 0.0), seed=job.get("seed", 0),
        ignore_eos=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    for rounds in recorded:
        rounds.clear()  # of the dummy runs at start-up
    outputs = []
    for part in [[prompt] for prompt in prompts] if recorded else [prompts]:
        outputs += engine.generate(part, sampling, use_tqdm=False)
        for rounds in recorded:
            rounds.append(None)  # the next prompt's begin here
    counters = {}
    for metric in engine.get_metrics():
        if "spec_decode" in metric.name:
            values = getattr(metric, "values", None)
            counters[metric.name.rsplit("spec_decode_num_", 1)[-1]] = metric.value if values is None else list(values)
    return [list(output.outputs[0].token_ids) for output in outputs], counters


def by_prompt(rounds: Optional[list[Any]]) -> Optional[list[list[Any]]]:
    """Recorded rounds of each prompt."""
    if rounds is None:
        return None
    found: list[list[Any]] = [[]]
    for entry in rounds:
        if entry is None:
            found.append([])
        else:
            found[-1].append(entry)
    return found[:-1]


def needs_second(job: dict[str, Any]) -> bool:
    """Whether this is for Model Runner V2: DSpark, hooks of its classes, and drafts that are sampled as ours are (V1
    drafts greedily at any temperature)."""
    speculative = job.get("speculative_config") or {}
    sampled = bool(speculative) and bool(job.get("temperature"))
    return speculative.get("method") == "dspark" or bool(job.get("record")) or sampled


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The report of one job."""
    speculative = job.get("speculative_config")
    if speculative and not job.get("temperature"):
        # Greedy output does not depend on how drafts are drawn, and greedy drafts need no sampling kernel.
        speculative["draft_sample_method"] = "greedy"
    with contextlib.ExitStack() as stack:
        drafts = stack.enter_context(record_drafts()) if job.get("record") else None
        confidences = stack.enter_context(record_confidences()) if job.get("confidence") else None
        recorded = [rounds for rounds in (drafts, confidences) if rounds is not None]
        tokens, counters = generate(job, speculative, recorded)
    rounds, accepted = counters.get("drafts", 0), counters.get("accepted_tokens", 0)
    report: dict[str, Any] = {
        "tokens": tokens, "rounds": rounds, "drafted": counters.get("draft_tokens", 0), "accepted": accepted,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "accepted_per_position": counters.get("accepted_tokens_per_pos"),
        "drafts": by_prompt(drafts), "confidences": by_prompt(confidences),
    }
    if job.get("alone"):
        report["alone"], _ = generate(job, None)
        report["greedy_equal"] = report["alone"] == tokens
    return report


def main() -> None:
    jobs = json.load(sys.stdin)
    second = needs_second(jobs[0])
    assert all(needs_second(job) == second for job in jobs)
    prepare(second)
    mend_key_norm()
    if second:
        mend_log1p()
    # The engine may write to stdout; the reports must stand alone there.
    report_to = os.dup(1)
    os.dup2(2, 1)
    reports = []
    for job in jobs:
        reports.append(run(job))
        gc.collect()  # the engine before
    os.write(report_to, (json.dumps(reports) + "\n").encode())


if __name__ == "__main__":
    main()
