"""What requests do when they are served: per conversation the blocks that were drafted and what became of them.

c conversations, n blocks of all of them end to end, K draft tokens of a block.
"""

import io
import zipfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from deepspec.artifacts import atomic_write_bytes
from deepspec.calibration import ConfidenceRecords
from deepspec.decoding.types import DecodeResult
from deepspec.errors import InputRefused

Ints = NDArray[np.int64]
_ARRAYS = ("accepted", "known", "starts", "domains", "prompt_tokens", "answer_tokens")
_AGAIN = "Make it again with launch/simulate_serving.py."


@dataclass(frozen=True)
class Traces:
    """Blocks in the order they were drafted, every draft token verified.

    ``known[i]`` counts the leading positions of block i whose outcome is known, ``accepted[i]`` those kept, without the
    target's own token. Block i of conversation j is one of ``starts[j] .. starts[j + 1] - 1``. ``answer_tokens``
    includes the token that the prompt's forward gives.
    """

    draft_length: int
    accepted: Ints  # [n]
    known: Ints  # [n]
    starts: Ints  # [c + 1]
    domains: NDArray[np.str_]  # [c]
    prompt_tokens: Ints  # [c]
    answer_tokens: Ints  # [c]
    logits: Optional[NDArray[np.float32]] = None  # [n, K] of Eq. 7 at temperature 1; None without a confidence head
    drafter_sha256: str = ""
    sampling_temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.domains)

    def _check(self) -> None:
        """Raises ValueError for arrays that do not belong together."""
        blocks, conversations = len(self.accepted), len(self.domains)
        shapes: dict[str, tuple[int, ...]] = {
            "accepted": (blocks,), "known": (blocks,), "starts": (conversations + 1,), "domains": (conversations,),
            "prompt_tokens": (conversations,), "answer_tokens": (conversations,)}
        if self.logits is not None:
            shapes["logits"] = (blocks, self.draft_length)
        for name, shape in shapes.items():
            if (found := getattr(self, name)).shape != shape:
                raise ValueError(f"{name} has shape {found.shape}, expected {shape}")
        if not blocks:
            raise ValueError("it holds no block")
        if self.starts[0] != 0 or self.starts[-1] != blocks or (np.diff(self.starts) < 1).any():
            raise ValueError("starts does not divide the blocks into conversations")
        if not ((0 <= self.accepted) & (self.accepted <= self.known) & (self.known <= self.draft_length)).all():
            raise ValueError(f"accepted and known are not counts of at most {self.draft_length} draft tokens")
        if self.logits is not None and not np.isfinite(self.logits).all():
            raise ValueError("logits are not finite")

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round with every draft token verified, the target's own included; pooled over blocks."""
        return 1.0 + float(self.accepted.mean())

    def of_domain(self, domain: str) -> Ints:
        """Indices of the conversations of ``domain``."""
        return np.flatnonzero(self.domains == domain)

    def select(self, conversations: Sequence[int] | Ints) -> "Traces":
        """Those conversations, in that order."""
        chosen = np.asarray(conversations, dtype=np.int64)
        blocks = [np.arange(self.starts[index], self.starts[index + 1]) for index in chosen]
        counts = [len(part) for part in blocks]
        order = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
        return Traces(
            self.draft_length, self.accepted[order], self.known[order],
            np.concatenate(([0], np.cumsum(counts))).astype(np.int64), self.domains[chosen],
            self.prompt_tokens[chosen], self.answer_tokens[chosen],
            None if self.logits is None else self.logits[order], self.drafter_sha256, self.sampling_temperature)

    def same_blocks(self, other: "Traces") -> bool:
        """Whether both are of the same rounds, with the same confidences, at one sampling temperature."""
        if self.sampling_temperature != other.sampling_temperature or (self.logits is None) != (other.logits is None):
            return False
        return all(np.array_equal(getattr(self, name), getattr(other, name))
                   for name in ("accepted", "known", "starts", "logits"))

    def save(self, path: str | PathLike[str]) -> None:
        """One npz, atomically."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        if self.logits is not None:
            arrays["logits"] = self.logits
        buffer = io.BytesIO()
        np.savez_compressed(buffer, draft_length=self.draft_length, drafter_sha256=np.array(self.drafter_sha256),
                            sampling_temperature=self.sampling_temperature, **arrays)
        atomic_write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | PathLike[str], *, drafter_sha256: Optional[str] = None) -> "Traces":
        """Read ``save``'s file. Raises InputRefused if it is missing, damaged, or of another drafter."""
        try:
            with np.load(Path(path), allow_pickle=False) as stored:
                values = {name: stored[name] for name in _ARRAYS}
                loaded = cls(int(stored["draft_length"]), logits=stored["logits"] if "logits" in stored else None,
                             drafter_sha256=str(stored["drafter_sha256"]),
                             sampling_temperature=float(stored["sampling_temperature"]), **values)
            loaded._check()
        except FileNotFoundError:
            raise InputRefused(f"acceptance traces not found: {path}. {_AGAIN}") from None
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputRefused(f"{path} is not a file of acceptance traces ({error}). Delete it. {_AGAIN}") from None
        if drafter_sha256 is not None and loaded.drafter_sha256 != drafter_sha256:
            raise InputRefused(f"{path}: made with drafter {loaded.drafter_sha256[:12]}, this run's is "
                               f"{drafter_sha256[:12]}. Delete it. {_AGAIN}")
        return loaded


def _whole(lengths: Sequence[int] | Ints) -> Ints:
    return np.asarray(lengths, dtype=np.int64)


def traces_of(results: Sequence[DecodeResult], draft_length: int, *, drafter_sha256: str = "",
              sampling_temperature: float = 1.0) -> Traces:
    """Traces of answers that were decoded with every draft token verified; answers without a round are left out.

    Raises InputRefused if no answer has one.
    """
    kept = [(result, [item for item in result.rounds if item.drafted]) for result in results]
    kept = [(result, rounds) for result, rounds in kept if rounds]
    if not kept:
        raise InputRefused(f"none of {len(results)} answers has a drafted block: every answer ended with its first "
                           "token. Look at the responses, or allow longer answers.")
    blocks = [item for _, rounds in kept for item in rounds]
    logits = None
    if all(item.confidence_logits is not None for item in blocks):
        logits = np.stack([np.asarray(item.confidence_logits, dtype=np.float32) for item in blocks])
    return Traces(
        draft_length, _whole([item.accepted for item in blocks]), _whole([item.known for item in blocks]),
        np.concatenate(([0], np.cumsum([len(rounds) for _, rounds in kept]))).astype(np.int64),
        np.array([result.domain for result, _ in kept]), _whole([result.prompt_tokens for result, _ in kept]),
        _whole([len(result.token_ids) for result, _ in kept]), logits, drafter_sha256, sampling_temperature)


def traces_from_records(records: ConfidenceRecords, prompt_tokens: Mapping[str, int]) -> Traces:
    """Traces from confidence records, whose blocks are stored conversation by conversation in their order.

    ``prompt_tokens`` gives the length of each conversation's prompt; one that is unknown counts as their median.
    """
    names = records.conversation
    first = np.flatnonzero(np.concatenate(([True], names[1:] != names[:-1])))
    starts = np.concatenate((first, [len(names)])).astype(np.int64)
    typical = int(np.median(list(prompt_tokens.values()))) if prompt_tokens else 1
    gained = np.concatenate(([0], np.cumsum(records.accepted + 1)))
    return Traces(
        records.origin.block_length, records.accepted, records.drafted, starts, records.domain[first],
        _whole([prompt_tokens.get(str(names[index]), typical) for index in first]),
        _whole(1 + gained[starts[1:]] - gained[starts[:-1]]), records.logits, records.origin.drafter_sha256,
        records.origin.sampling_temperature)
