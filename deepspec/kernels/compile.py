"""Compile every kernel ahead of time and report what it takes of a multiprocessor. Needs no GPU.

    python -m deepspec.kernels.compile [compute capability ...]

Writes one JSON line per kernel, variant and architecture. Triton must not be interpreting (TRITON_INTERPRET unset).
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any, Iterator, Sequence

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from deepspec.errors import ConfigError
from deepspec.kernels import markov_step, slot_loss

# Shared memory one block may ask for, bytes (CUDA C++ programming guide, technical specifications).
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 65536  # of one multiprocessor, 32 bit each, on all three


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes."""

    kernel: str
    variant: str
    capability: int
    threads: int
    registers: int  # per thread
    spill_bytes: int  # stored and loaded per thread
    shared_bytes: int  # per block
    blocks: int  # that fit a multiprocessor side by side, by registers and shared memory


@dataclass(frozen=True)
class _Variant:
    name: str
    kernel: Any
    types: dict[str, str]  # of arguments that are not what their name says, see _signature
    constants: dict[str, Any]
    warps: int
    aligned: bool = True  # whether V is a multiple of 16, so that loads are vectors


def _loss_variants() -> Iterator[_Variant]:
    """As training launches them; "unaligned" has a vocabulary that is no multiple of 16."""
    common, names = {"EXACT": tl.float32}, ("draft_ptr", "bias_ptr", "target_ptr", "logits_ptr", "slope_ptr")
    single = dict.fromkeys(names, "fp32")
    block = {"BLOCK": slot_loss.BLOCK, **common}
    yield _Variant("fp32", slot_loss.statistics_kernel, single, block, slot_loss.WARPS)
    yield _Variant("fp32", slot_loss.softcap_kernel, single, {"SOFTCAP": 30.0, "BLOCK": 1024, **common}, 4)
    for logits, bias, gradient, aligned in (
        ("fp32", False, False, True), ("fp32", False, True, True), ("fp32", True, False, True),
        ("fp32", True, True, True), ("fp32", True, True, False), ("bf16", True, True, True),
    ):
        name = f"{logits}{', bias' * bias}{', gradient' * gradient}{', unaligned' * (not aligned)}"
        yield _Variant(name, slot_loss.slot_loss_kernel, dict.fromkeys(names, logits),
                       {"HAS_BIAS": bias, "DIFFERENTIATE": gradient, **block}, slot_loss.WARPS, aligned)


def _drafting_variants() -> Iterator[_Variant]:
    """As drafting launches them for 151,936 tokens, few or many requests."""
    sizes = {"BLOCK": markov_step.BLOCK, "RANK_STEP": markov_step.RANK_STEP}
    blocks = {"BLOCKS": triton.next_power_of_2(triton.cdiv(151936, markov_step.BLOCK))}
    yield _Variant("any", markov_step.greedy_kernel, {"id_ptr": "i32"}, blocks, markov_step.WARPS)
    for weights in ("fp32", "bf16"):
        types = {"table_ptr": weights, "factor_ptr": weights}
        for sample, rows in ((False, 64), (True, 64)) if weights == "fp32" else ((False, 16), (False, 64), (True, 64)):
            name = f"{weights}, {'sample' if sample else 'greedy'}, {rows} requests"
            yield _Variant(name, markov_step.block_kernel, {**types, "other_ptr": "fp32" if sample else "i32"},
                           {"SAMPLE": sample, "WIDEN": False, "ROWS": rows, **sizes}, markov_step.WARPS)
        yield _Variant(weights, markov_step.sample_kernel, types, {**blocks, **sizes}, markov_step.WARPS)


_TYPES = {
    **dict.fromkeys(("label_ptr", "bias_of_ptr", "target_of_ptr", "row_ptr", "token_ptr"), "i64"),
    "uniform_ptr": "fp64", "temperature": "fp32",
}  # other pointers are to float32, other scalars int32


def _signature(variant: _Variant) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Types of the arguments, and which of them are multiples of 16."""
    types, aligned = {}, {}
    for place, name in enumerate(variant.kernel.arg_names):
        pointer = name.endswith("_ptr")
        kind = variant.types.get(name, _TYPES.get(name, "fp32" if pointer else "i32"))
        types[name] = "constexpr" if name in variant.constants else "*" * pointer + kind
        if pointer or variant.aligned and name in ("vocab", "logits_stride", "rank"):
            aligned[place,] = [["tt.divisibility", 16]]
    return types, aligned


def _usage(variant: _Variant, capability: int) -> Usage:
    types, aligned = _signature(variant)
    source = ASTSource(variant.kernel, types, constexprs=variant.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": variant.warps})
    ptx = compiled.asm["ptx"]
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/kernel.ptx", "w", encoding="utf-8") as file:
            file.write(ptx)
        report = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={architecture[1]}", f"{folder}/kernel.ptx", "-o",
             f"{folder}/kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers is not None and spills is not None, report
    threads, used = variant.warps * 32, int(registers[1])
    shared = compiled.metadata.shared
    fits = [REGISTERS // (threads * -(-used // 8) * 8), SHARED_LIMITS[capability] // max(1, shared), 2048 // threads]
    return Usage(
        variant.kernel.__name__, variant.name, capability, threads, used, int(spills[1]) + int(spills[2]), shared,
        min(fits),
    )


def compile_kernels(capabilities: Sequence[int] = tuple(SHARED_LIMITS)) -> list[Usage]:
    """Compile every kernel for sm_80, sm_90 and sm_100 (or some of them). Raises ConfigError while interpreting."""
    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET is set, so the kernels are Python. Unset it to compile them.")
    return [_usage(variant, capability) for capability in capabilities
            for variant in (*_loss_variants(), *_drafting_variants())]


if __name__ == "__main__":
    for usage in compile_kernels([int(argument) for argument in sys.argv[1:]] or tuple(SHARED_LIMITS)):
        sys.stdout.write(json.dumps(asdict(usage)) + "\n")
