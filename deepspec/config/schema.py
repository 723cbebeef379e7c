"""Every option there is, with its type, unit and default. Hydra checks YAML and command line against these classes.

Library code takes these dataclasses (or a part of one), never an OmegaConf object, so these files import nothing but
the standard library. ``MISSING`` ("???") marks what a target or experiment file must give.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from deepspec.config.schema_drafter import (  # noqa: F401
    ALGORITHMS, AUTOREGRESSIVE, ON_LAST_HIDDEN, WITH_HEADS, DrafterConfig, draft_length, drafter_layers,
    is_autoregressive,
)
from deepspec.config.schema_evaluation import BenchmarkConfig, EvaluateConfig  # noqa: F401
from deepspec.config.schema_features import FeatureServerConfig
from deepspec.config.schema_serving import DoctorConfig, LoopConfig
from deepspec.config.schema_simulation import ProfileConfig, SchedulerConfig, SimulateConfig
from deepspec.config.schema_sweep import SweepConfig
from deepspec.config.schema_training import EngineConfig, ObjectiveConfig, OptimizerConfig, TrainerConfig

MISSING: Any = "???"

STAGES = tuple("prompts responses features train confidence calibrate profile evaluate simulate export report".split())
OWN_SCRIPT_ONLY = ("simulate",)  # not part of the main job unless ``stages`` says so


@dataclass
class RunConfig:
    """Where a run lives. ``dir`` follows from the name, never from the clock, so that all ranks and a resume agree."""

    name: str = MISSING  # of the run; its folder and W&B group are named by it
    dir: str = "runs/${run.name}"  # folder of the run; with an existing one a script takes that run's options
    data_root: str = "data"  # prompts, responses and features, shared by all runs
    seed: int = 0
    threads: int = 0  # CPU threads per rank; 0 = cores divided by local ranks


@dataclass
class TargetShape:
    """Sizes that a plan needs before any weight is at hand; checked against the real model when it loads."""

    model_type: str = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    vocab_size: int = MISSING  # rows of the embedding, not len(tokenizer)
    parameters: Optional[int] = None  # of the text model; null: from the sizes above, as if all layers were dense
    active_parameters: Optional[int] = None  # of these, what one token is multiplied with; null: all of them
    full_head_dim: Optional[int] = None  # drafter.block=gemma4: of the full-attention layers; null: head_dim
    full_kv_heads: Optional[int] = None  # drafter.block=gemma4: of the full-attention layers; null: num_kv_heads
    keys_are_values: Optional[bool] = None  # drafter.block=gemma4: those layers make values of the keys' projection


@dataclass
class TargetConfig:
    """The frozen model that is to be served faster."""

    name: str = MISSING  # used in paths
    source: str = "hf"  # hf: hub id or folder; gguf_package: a GGUF file inside a Python package; micro: trained here
    path: str = MISSING  # hub id, folder or Python package name; "" for micro
    revision: Optional[str] = None  # commit of a hub repository; refused for folders
    trust_remote_code: bool = False  # true runs code that comes with the model
    dtype: str = "bfloat16"  # bfloat16 | float32
    feature_layers: list[int] = MISSING  # ids of decoder layer outputs, ascending; the last layer is refused
    mask_token_id: int = MISSING  # filler of the block slots; a row of the embedding that text never contains
    chat_template: Optional[str] = None  # file with a Jinja template, where the tokenizer has none
    thinking: Optional[bool] = False  # passed to the template as enable_thinking; null passes nothing
    ranks: int = 0  # features.mode=disaggregated: the last so many ranks of the launch run the target, the others train
    shape: TargetShape = field(default_factory=TargetShape)


@dataclass
class SourceConfig:
    """One source of prompts."""

    name: str = MISSING
    # embedded | jsonl | parquet | hf (hub id or folder) | requests (JSONL log of OpenAI chat-completions requests)
    kind: str = MISSING
    path: str = ""  # embedded: math | code | chat; file, folder or hub id otherwise
    split: str = "train"  # hf only
    config_name: Optional[str] = None  # hf only
    revision: Optional[str] = None  # hf only
    prompt_column: Optional[str] = None  # field with the prompt (text, or messages); null: see data/prompt_rows.py
    domain: str = "chat"
    weight: float = 1.0  # share of max_prompts relative to the other sources
    cap: Optional[int] = None  # at most so many prompts


@dataclass
class DataConfig:
    """Prompts and how samples are cut."""

    sources: list[SourceConfig] = field(default_factory=list)
    max_prompts: Optional[int] = None  # over all sources, held-out ones included; null: all
    # by hash of the prompt's content id: adding data never moves a row across the split
    held_out_fraction: float = 0.05
    min_held_out: int = 8  # per domain; smallest hashes are taken first
    # builtin (e-mail addresses, telephone numbers, keys) | module:function, text -> text; runs on every text of a
    # prompt before it is hashed or written
    redaction: Optional[str] = None
    near_duplicate_threshold: Optional[float] = 0.8  # Jaccard similarity of word 3-grams; null keeps near duplicates
    near_duplicate_num_perm: int = 128  # MinHash permutations: 4 bytes of disk per prompt each
    decontaminate_benchmarks: bool = True  # leave out prompts that hold text of the files of evaluate.benchmarks
    decontaminate: list[str] = field(default_factory=list)  # more files (JSONL) whose texts no prompt may hold
    decontaminate_ngram: int = 13  # words in a row that make an overlap; shorter texts: data/decontaminate.py
    max_length: int = 4096  # tokens of a sample, prompt included
    num_workers: int = 1  # packs a thread of its own keeps ready; 0 makes them in the training thread, when needed


@dataclass
class ResponsesConfig:
    """Who answers the prompts and with which sampling."""

    backend: str = "in_process"  # in_process | server (any OpenAI-compatible endpoint)
    servers: list[str] = field(default_factory=list)  # base URLs ending in /v1
    model: Optional[str] = None  # name at the server; null: the first one it lists
    max_tokens: int = 4096  # of one answer
    temperature: float = 0.7  # of sampling; 0 is greedy
    top_p: float = 0.8  # share of probability that may be drawn from; 1 = all
    top_k: int = 20  # 0 = off
    batch_size: int = 32  # rows decoded together in process
    concurrency: int = 64  # requests in flight over all servers
    seconds_per_token: float = 0.2  # request timeout = 30 s + max_tokens * this
    retries: int = 4  # of one request, with growing pauses
    breaker_failures: int = 5  # in a row, of different rows, before a server gets no requests until it recovers
    patience_seconds: float = 60.0  # without any server that works, before the stage stops
    thinking_share: Optional[float] = None  # of the rows, chosen by their ids; null: all as target.thinking says
    error_limit: float = 0.02  # share of failed rows above which the stage exits non-zero
    truncated: str = "keep"  # keep | drop answers that hit max_tokens; a kept one is never taught a stop


@dataclass
class FeaturesConfig:
    """Hidden states: cached on disk, computed while training, or taken from a serving engine."""

    # cached | online | hybrid (online in the first epoch, which fills the cache) | disaggregated (online, on target
    # ranks of their own: target.ranks) | server
    mode: str = "cached"
    codec: str = "int8"  # int8, fp8-e4m3 (half of bf16) | bf16 | lossless (bf16 entropy-coded, about 69 %) | fp32
    token_budget: int = 8192  # tokens per forward
    shard_megabytes: int = 512  # size of one file of the store
    queue_depth: int = 4  # disaggregated: packs that are under way to each trainer rank while it works on another
    queue_timeout: float = 600.0  # disaggregated: seconds without the pack a trainer waits for, before it gives up
    path: Optional[str] = None  # folder of a store that is there already (imported, say); null: where this run makes it
    held_out_fraction: float = 0.02  # of the samples, by the hash of their ids, where the store in path holds out none
    # With path: what may differ from this run with a warning only: target_fingerprint | renderer_hash |
    # responses_fingerprint
    allow: list[str] = field(default_factory=list)
    server: FeatureServerConfig = field(default_factory=FeatureServerConfig)


@dataclass
class TrackingConfig:
    """Weights & Biases. metrics.jsonl is written whatever this says."""

    mode: str = "auto"  # auto: online if a key is configured, else offline | online | offline | disabled
    project: str = "deepspec"
    entity: Optional[str] = None
    group: Optional[str] = None  # null: the run name
    tags: list[str] = field(default_factory=list)
    timeout_seconds: float = 30.0
    upload_drafter: bool = False  # true: the exported weights are stored there; false: referenced where they lie


@dataclass
class ConfidenceConfig:
    """Refit of the confidence head on blocks the drafter drafted itself, and the records that calibration uses."""

    refit: bool = True
    temperature: float = 1.0  # of drafting and verification
    max_new_tokens: int = 128
    max_prompts: Optional[int] = None  # held-out prompts; null: all
    # JSONL of more prompts ("prompt", "turns" or "messages"; "id", "domain"), instead of the run's held-out ones; no
    # answers are needed, and rows of "split": "train" or that were trained on are left out
    prompts: Optional[str] = None
    max_blocks: int = 20000
    batch_size: int = 32
    refit_fraction: float = 0.34  # share of held-out conversations the refit sees; never used for fit or report
    epochs: int = 20
    lr: float = 1e-2


@dataclass
class CalibrationConfig:
    """Sequential Temperature Scaling (Sec. 3.2.1), always fitted since engines read it, and what else is wanted."""

    # sts | platt | beta | isotonic (per position, scikit-learn): what our own scheduler uses
    method: str = "sts"
    compare: list[str] = field(default_factory=list)  # more of them, fitted and reported only
    per_domain: bool = False  # also fit temperatures per domain and report whether they are better than the pooled ones
    # of the fit split that must have reached a position; below, its temperature stays 1
    min_samples: int = 200
    # keep a temperature at 1 where the error is what a right confidence shows on as many blocks; false: as published
    noise_guard: bool = True
    records: Optional[str] = None  # recorded by an engine in service, instead of the run's own: docs/calibration.md
    recalibrate: bool = True  # with records: fit on them and replace calibration.json; false only writes drift.json
    num_bins: int = 20  # equal-width bins of the ECE
    grid_min: float = 0.1  # least temperature that is tried
    grid_max: float = 10.0  # greatest
    grid_points: int = 41  # temperatures, equally far apart in logarithm
    fit_fraction: float = 0.5  # of the conversations that remain after the refit
    bootstrap: int = 200  # draws of conversations behind the intervals


@dataclass
class ExportConfig:
    """What leaves the run."""

    formats: list[str] = field(default_factory=lambda: ["deepspec"])
    dtype: str = "bfloat16"  # bfloat16 | float32
    verify: bool = True
    checkpoint: str = "latest"  # latest | best | step-N; also what the stages after training read
    weights: str = "trained"  # trained | ema (needs trainer.ema_decay)
    # put one temperature and shift of calibration.json into the confidence head (w / T, b / T + s): for engines that
    # read no temperatures; the table for those that do is then the one on top of it
    fold_calibration: bool = False
    push_to_hub: Optional[str] = None  # owner/name: also upload the finished export to that repository of the hub
    hub_private: bool = True  # of a repository that the upload makes


@dataclass
class Config:
    """The whole configuration; one per run."""

    stages: list[str] = field(default_factory=lambda: [name for name in STAGES if name not in OWN_SCRIPT_ONLY])
    plan: bool = False  # print memory, disk and time, and stop
    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    confidence: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    runs: list[str] = field(default_factory=list)  # report.py, simulate_serving.py: other runs to compare


def training_seed(config: Config) -> int:
    """Seed of initial weights, order and anchors: trainings that differ in it alone share prompts and features."""
    return config.run.seed if config.trainer.seed is None else config.trainer.seed
