"""What a confidence threshold would do (Fig. 5), from records of full drafts alone. n blocks, K positions."""

from typing import Any, Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration.metrics import survival_probability
from deepspec.calibration.records import ConfidenceRecords

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))  # 0 .. 0.95


def threshold_sweep(records: ConfidenceRecords, confidence: ArrayLike,
                    thresholds: Sequence[float] = THRESHOLDS) -> list[dict[str, Optional[float]]]:
    """Acceptance against a threshold on the predicted survival of a prefix (Fig. 5).

    A block sends the draft tokens whose survival probability ``a_k`` is at least the threshold. Every outcome was
    recorded with the full draft verified, so what a shorter one would have had is known: a prefix accepts the same
    tokens. Only blocks whose outcome is known at every position count, or short drafts would look like rejections.

    Returns one row per threshold: ``threshold``, ``verified`` draft tokens per block, ``accepted`` per block,
    ``acceptance_rate`` (accepted / verified; None if nothing is sent), and ``tokens`` per round, the bonus included.
    """
    whole = records.drafted >= records.origin.block_length
    survival = survival_probability(np.asarray(confidence, dtype=np.float64)[whole])
    accepted = records.accepted[whole]
    rows: list[dict[str, Optional[float]]] = []
    for threshold in thresholds if whole.any() else ():
        sent = (survival >= threshold).sum(axis=1)  # survival falls along a block, so these are prefixes
        kept = np.minimum(accepted, sent)
        rows.append({"threshold": float(threshold), "verified": float(sent.mean()), "accepted": float(kept.mean()),
                     "acceptance_rate": float(kept.sum() / sent.sum()) if sent.sum() else None,
                     "tokens": float(1.0 + kept.mean())})
    return rows


def best_threshold(rows: Sequence[dict[str, Any]], seconds: Any) -> Optional[dict[str, Any]]:
    """The row of most tokens per second where a round that verifies v draft tokens costs ``seconds(v)``; None of none.

    ``seconds`` takes the mean number of verified draft tokens; it interpolates a measured cost, drafting included.
    """
    rated = [dict(row, tokens_per_second=row["tokens"] / float(seconds(row["verified"]))) for row in rows]
    return max(rated, key=lambda row: row["tokens_per_second"], default=None)
