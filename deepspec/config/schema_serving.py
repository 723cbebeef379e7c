"""Options about drafters that are being served. See schema.py. (Written anew after a file of this name was lost:
the owner of the doctor checks names, defaults and comments.)"""

from dataclasses import dataclass
from typing import Optional


@dataclass
class DoctorConfig:
    """Why a served drafter accepts less than the offline evaluation says (launch/doctor.py)."""

    endpoint: Optional[str] = None  # base URL of the server, http://host:port
    engine: str = "auto"  # auto | vllm | sglang
    drafter: Optional[str] = None  # folder the server serves; null: the run's export
    model: Optional[str] = None  # name at the server; null: the first one it lists
    prompts: str = "held_out"  # held_out, or a JSONL file of prompts
    max_prompts: int = 32
    max_new_tokens: int = 64
    tolerance: float = 0.05  # share of the acceptance length by which server and evaluation may differ
    certainty: float = 0.95  # of an interval that tells a cause from chance
    timeout_seconds: float = 120.0  # of one request
    api_key_variable: Optional[str] = None  # environment variable with the server's key
