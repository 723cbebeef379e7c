"""Runs all checks of an export and turns failures into one message."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Sequence

from torch import Tensor

from deepspec.drafters.base import Drafter
from deepspec.errors import InputRefused
from deepspec.export import checks, gates, layout, tensors
from deepspec.export.checks import CheckResult
from deepspec.export.load import read_config

logger = logging.getLogger(__name__)


def _files(folder: Path, values: dict[str, Any], target: Any,
           drafter: Drafter) -> tuple[list[CheckResult], dict[str, Any]]:
    """Checks 1-5, 11 and 12, which only read the folder and the target's two matrices."""
    shared_problems, digests = checks.check_shared(folder, drafter.shared, tensors.DTYPES[values["dtype"]],
                                                   layout.shared_names(values))
    mask_problems, norm = checks.check_mask_token(values, target.tokenizer, drafter.shared.embed)
    results = [
        CheckResult(2, "tensor names, shapes, dtype, finite values", tuple(checks.check_tensors(folder, values))),
        CheckResult(3, "embedding and LM head are the target's", tuple(shared_problems)),
        CheckResult(4, "mask token", tuple(mask_problems), f"norm of its embedding row {norm:.4g}"),
        CheckResult(5, "AutoConfig and RoPE round trip", tuple(checks.check_auto_config(folder, values))),
        CheckResult(11, "block size and number of draft tokens",
                    tuple(checks.check_speculative_tokens(folder, values, drafter.shape.draft_length))),
        CheckResult(12, "architecture, no remote code", tuple(checks.check_architecture(folder, values))),
    ]
    return results, {"shared_sha256": digests, "mask_token_norm": norm}


def verify_folder(folder: Path, target: Any, drafter: Drafter,
                  documents: Sequence[Tensor] = ()) -> tuple[list[CheckResult], dict[str, Any]]:
    """All checks of ``folder`` against the drafter it was made of. Returns results and facts for the manifest.

    Checks that run models (8, 9, 10) are left out once a cheaper one has failed: they would only fail less clearly.
    """
    values = read_config(folder)
    results = [CheckResult(1, "config.json keys and layer ids", tuple(checks.check_keys(values)))]
    if not results[0].passed:
        return results, {}
    more, found = _files(folder, values, target, drafter)
    results += more
    if not all(result.passed for result in results):
        return results, found
    parity = gates.reload_parity(folder, drafter, tensors.DTYPES[values["dtype"]])
    problems = [] if parity.difference <= parity.tolerance else [
        f"reloaded logits differ by {parity.difference:.3g} (tolerance {parity.tolerance:.3g})"]
    detail = f"difference {parity.difference:.3g}, rounding to {values['dtype']} {parity.rounding:.3g}"
    results.append(CheckResult(8, "reloaded logits are equal", tuple(problems), detail))
    results.append(CheckResult(9, "layer ids against an independent capture",
                               tuple(gates.layer_id_gate(target, values["target_layer_ids"]))))
    found |= {"reload": asdict(parity)}
    if documents:
        shift = gates.shift_gate(drafter, target, documents)
        wrong = [shift.note] if shift.verdict == "wrong" else []
        results.append(CheckResult(10, "acceptance under shifted layers and slots", tuple(wrong), shift.note))
        found["shift"] = {"verdict": shift.verdict, "blocks": shift.blocks,
                          "layers": {str(key): value for key, value in shift.layers.items()},
                          "slots": {str(key): value for key, value in shift.slots.items()}}
        if shift.verdict == "indistinct":
            logger.warning("acceptance under shifted layer ids or slots: %s", shift.note)
    return sorted(results, key=lambda result: result.number), found


def refuse_failures(results: Sequence[CheckResult], folder: Path) -> None:
    """Raise InputRefused naming every failed check."""
    failed = [f"check {result.number} ({result.name}): {'; '.join(result.problems[:4])}"
              for result in results if not result.passed]
    if failed:
        raise InputRefused(f"{folder} is refused: {' | '.join(failed)}. An engine would load it wrongly or not at all.")
