"""Records that an engine in service made: our own files, SGLang's STS shards, or JSON lines. n blocks, K positions.

docs/calibration.md describes the three formats. Whatever would bias a fit is refused by the name of its field.
"""

import json
import logging
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any, Mapping, Optional

import numpy as np

from deepspec.calibration.fold import Fold
from deepspec.calibration.records import ConfidenceRecords, RecordsOrigin, origin_from, refuse_origin
from deepspec.calibration.shards import read_shards, shard_files
from deepspec.errors import InputRefused

logger = logging.getLogger(__name__)
FORMAT = "deepspec-confidence-records"
ORIGIN_FILE = "origin.json"  # beside SGLang's shards: fields of RecordsOrigin that the shards do not hold
MAX_SHORT = 0.25  # share of blocks drafted short above which lengths were chosen, not cut by the end of answers
_CHUNK = 64  # consecutive rows that stand for one conversation where the file names none
_AGAIN = ("Record again with every draft token verified, no temperature table and this drafter; docs/calibration.md "
          "says how.")
_GREEDY = ("SGLang's collector calls a draft token accepted when it is the target's most likely one, whatever the "
           "requests sampled with, so its shards fit a drafter that is served at temperature 0")


def load_records(path: str | PathLike[str], expected: Mapping[str, Any]) -> ConfidenceRecords:
    """Records of ``path``: an npz of ``ConfidenceRecords.save``, JSON lines, or SGLang's shards (folder, file or stem).

    Logits of a folded head are unfolded, so that what comes back is of the head as trained.

    Args:
        expected: fields of ``RecordsOrigin`` and the values they must have; where a format does not hold a field, the
            expected value is taken for it, and a warning says so.

    Raises:
        InputRefused: nothing readable there, or records that would bias the fit; the message names the field.
    """
    path = Path(path)
    if path.suffix == ".npz":
        records, given = ConfidenceRecords.load(path, unfold=True), None
    elif path.is_dir() or shard_files(path):
        records, given = _read_shards(path, expected)
    elif path.suffix == ".jsonl":
        records, given = _read_lines(path, expected)
    else:
        raise InputRefused(f"{path} is no file of confidence records: give an npz, a jsonl, or a folder of SGLang "
                           f"shards (*.pt). {_AGAIN}")
    origin = records.origin
    if given is not None and (missing := sorted(set(expected) - given)):
        logger.warning("%s does not say %s: taken to be as this run has it", path, ", ".join(missing))
    if origin.source == "sglang" and expected.get("sampling_temperature", 0.0) != origin.sampling_temperature:
        raise InputRefused(f"{path}: sampling_temperature is {origin.sampling_temperature!r}, needed is "
                           f"{expected['sampling_temperature']!r}: {_GREEDY}. Use records of our own formats, or "
                           "calibrate for greedy decoding: confidence.temperature=0.")
    refuse_origin(replace(origin, fold=(1.0, 0.0)), expected, str(path), _AGAIN)
    _refuse_short(records, path)
    if origin.fold != (1.0, 0.0):
        raw = Fold(*origin.fold).undo(records.logits).astype(np.float32)
        records = replace(records, logits=raw, origin=replace(origin, fold=(1.0, 0.0)))
    return records


def record_files(path: Path) -> list[Path]:
    """Every file that decides what ``load_records`` reads there; none where there are no records."""
    shards = shard_files(path)
    if not path.is_dir() and not shards:
        return [path] if path.is_file() else []
    origin = (path if path.is_dir() else path.parent) / ORIGIN_FILE
    return shards + ([origin] if shards and origin.is_file() else [])


def _refuse_short(records: ConfidenceRecords, path: Path) -> None:
    """A file may say "full" and still hold what a scheduler left over: short drafts give it away."""
    short = float((records.drafted < records.origin.block_length).mean()) if len(records) else 0.0
    if short > MAX_SHORT:
        raise InputRefused(f"{path}: drafted is below {records.origin.block_length} in {short:.0%} of the blocks (at "
                           f"most {MAX_SHORT:.0%} are cut by the end of an answer): a scheduler shortened them, and "
                           f"what it cut off is not known. {_AGAIN}")


def _origin(header: Mapping[str, Any], expected: Mapping[str, Any], where: Path) -> tuple[RecordsOrigin, set[str]]:
    """The origin ``header`` states, its gaps filled from ``expected``; and the fields it did state."""
    known = set(RecordsOrigin.__dataclass_fields__)
    stated = {name: value for name, value in header.items() if name in known}
    try:
        length = stated.get("block_length", expected.get("block_length", 0))
        width = length if isinstance(length, int) and 0 < length < 1000 else 1  # another one is refused below
        filled = {"temperatures": (1.0,) * width, "block_length": length, "drafter_sha256": "",
                  "sampling_temperature": 1.0} | {name: expected[name] for name in expected if name in known}
        return origin_from(filled | stated), set(stated)
    except (TypeError, ValueError) as error:
        raise InputRefused(f"{where}: its header is not that of confidence records ({error}). {_AGAIN}") from None


def _read_lines(path: Path, expected: Mapping[str, Any]) -> tuple[ConfidenceRecords, set[str]]:
    """JSON lines: a header with ``format``, then one block per line. A torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). {_AGAIN}") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            rows.append(row)
        except ValueError as error:
            if number == len(lines) and number > 1:
                logger.warning("%s:%d is torn and left out (%s)", path, number, error)
                break
            raise InputRefused(f"{path}:{number} is not JSON ({error}). {_AGAIN}") from None
    if not rows or rows[0].get("format") != FORMAT:
        raise InputRefused(f"{path}:1 must be a header with \"format\": \"{FORMAT}\". {_AGAIN}")
    origin, stated = _origin({"source": "import"} | rows[0], expected, path)
    if len(rows) == 1:
        raise InputRefused(f"{path} has a header and no block. {_AGAIN}")
    for number, row in enumerate(rows[1:], start=2):
        logits, accepted = row.get("logits"), row.get("accepted")
        if not isinstance(logits, list) or len(logits) != origin.block_length:
            raise InputRefused(f"{path}:{number}: logits must be {origin.block_length} numbers. {_AGAIN}")
        drafted = row.get("drafted", origin.block_length)
        if type(accepted) is not int or type(drafted) is not int or not 0 <= accepted <= drafted <= origin.block_length:
            raise InputRefused(f"{path}:{number}: accepted={accepted!r} and drafted={drafted!r} must be whole numbers, "
                               f"0 <= accepted <= drafted <= {origin.block_length}. {_AGAIN}")
    return _records(
        origin, [row["logits"] for row in rows[1:]], [row["accepted"] for row in rows[1:]],
        drafted=[row.get("drafted", origin.block_length) for row in rows[1:]],
        conversation=[str(row["conversation"]) if "conversation" in row else None for row in rows[1:]],
        domain=[str(row.get("domain", "production")) for row in rows[1:]], where=path), stated


def _read_shards(path: Path, expected: Mapping[str, Any]) -> tuple[ConfidenceRecords, set[str]]:
    """SGLang's shards ``{"logits": [n, K], "prefix_mask": [n, K]}``; they name no conversation and no drafter."""
    files = shard_files(path)
    if not files:
        raise InputRefused(f"{path} has no shard (*.pt). {_AGAIN}")
    blocks = read_shards(files)
    folder = path if path.is_dir() else path.parent
    stated: dict[str, Any] = {}
    if (folder / ORIGIN_FILE).is_file():
        try:
            stated = json.loads((folder / ORIGIN_FILE).read_text(encoding="utf-8"))
            if not isinstance(stated, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            raise InputRefused(f"{folder / ORIGIN_FILE} is not JSON ({error}). {_AGAIN}") from None
    own = {"block_length": blocks[0][0].shape[1], "sampling_temperature": 0.0, "source": "sglang",
           "verification": "full"}
    origin, known = _origin(stated | own, expected, path)
    count = sum(len(logits) for logits, _ in blocks)
    return _records(origin, np.concatenate([logits for logits, _ in blocks]),
                    np.concatenate([mask.sum(axis=1) for _, mask in blocks]), drafted=[origin.block_length] * count,
                    conversation=[None] * count, domain=["production"] * count, where=path), known


def _records(origin: RecordsOrigin, logits: Any, accepted: Any, *, drafted: Any, conversation: list[Optional[str]],
             domain: list[str], where: Path) -> ConfidenceRecords:
    """Records of an import. Rows without a conversation are grouped by ``_CHUNK`` consecutive ones: neighbours in time
    share requests, so a split between such groups leaks little."""
    if any(name is None for name in conversation):
        logger.warning("%s names no conversations: %d consecutive blocks count as one, so intervals are too narrow by "
                       "what longer conversations share", where, _CHUNK)
    names = [f"rows-{row // _CHUNK:06d}" if name is None else name for row, name in enumerate(conversation)]
    try:
        values = np.asarray(logits, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputRefused(f"{where}: logits must be numbers ({error}). {_AGAIN}") from None
    return ConfidenceRecords(
        origin=origin, logits=values, accepted=np.asarray(accepted, dtype=np.int64),
        drafted=np.asarray(drafted, dtype=np.int64), conversation=np.asarray(names), domain=np.asarray(domain),
        analytic_rate=np.full(values.shape, np.nan, dtype=np.float32))


def save_lines(path: str | PathLike[str], records: ConfidenceRecords) -> None:
    """Write ``records`` as JSON lines, the neutral format ``load_records`` reads."""
    from deepspec.artifacts import atomic_write_bytes

    lines = [json.dumps({"format": FORMAT, "version": 1} | asdict(records.origin))]
    for row in range(len(records)):
        lines.append(json.dumps({
            "conversation": str(records.conversation[row]), "domain": str(records.domain[row]),
            "logits": [float(value) for value in records.logits[row]], "accepted": int(records.accepted[row]),
            "drafted": int(records.drafted[row])}))
    atomic_write_bytes(path, ("\n".join(lines) + "\n").encode())
