"""What the doctor found, in words. A fault explains the gap or will make one; a note does not change the verdict."""

from dataclasses import asdict, dataclass
from typing import Any, Optional

FAULT, NOTE = "fault", "note"


@dataclass(frozen=True)
class Finding:
    """One cause, how it was found, and what to do about it."""

    cause: str
    says: str  # what is wrong, with the values
    fix: str
    kind: str = FAULT  # fault | note
    found_by: str = "files"  # files | server | text | acceptance
    probability: Optional[float] = None  # of causes found by comparing acceptance
    explains: Optional[float] = None  # share of the missing acceptance length that it accounts for

    def to_json(self) -> dict[str, Any]:
        """Without what is not known."""
        return {key: value for key, value in asdict(self).items() if value is not None}
