"""Options about drafters that are already served."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class DoctorConfig:
    """Why a served drafter accepts less than it should: the engine's own counts against our decoder's."""

    endpoint: Optional[str] = None  # base URL of the server, http://host:port
    drafter: Optional[str] = None  # the folder that is served; null: the run's export
    engine: str = "auto"  # auto | vllm | sglang
    model: Optional[str] = None  # name at the server; null: the first one it lists
    prompts: str = "held_out"  # the run's held-out prompts, or a file of prompts (rows as in evaluate.benchmarks)
    max_prompts: int = 16
    max_new_tokens: int = 64  # per prompt, greedy, end-of-turn tokens ignored
    tolerance: float = 0.05  # share of the offline acceptance length that may be missing
    certainty: float = 0.9  # probability from which a cause is named
    timeout_seconds: float = 300.0  # of one request
    api_key_variable: Optional[str] = None  # environment variable that holds the server's key


@dataclass
class LoopConfig:
    """Once round: records of service, drift, another calibration or training, export, doctor, comparison."""

    records: Optional[str] = None  # confidence records of the engine in service: docs/calibration.md
    requests: Optional[str] = None  # log of chat requests (file or folder, as data=requests reads it) to train on
    action: str = "auto"  # auto: what the drift report says | recalibrate | train
    name: Optional[str] = None  # of the successor's run; null: the run's name with -next
    steps: Optional[int] = None  # optimizer steps of the fine-tuning; null: as many as the run's options give
    serve: Optional[str] = None  # command that serves the successor; {drafter} is its folder, {tokens} its draft length
    endpoint: Optional[str] = None  # where that command's server answers, or one that already serves the successor
    start_seconds: float = 900.0  # for the server to come up
