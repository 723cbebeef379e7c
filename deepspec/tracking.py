"""Weights & Biases, kept out of the way: one run from global rank 0, and no failure or stall of it stops a job.

Every call to W&B is made by a daemon thread in order. The job waits for it only at the start and at the end, at most
``timeout_seconds`` (plus a little), and after the first failure or time-out it carries on without it, with one
warning. metrics.jsonl is complete whatever happens here. No prompt or response text is ever sent.
"""

import hashlib
import logging
import math
import netrc
import os
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence
from urllib.parse import urlparse

from deepspec import distributed
from deepspec.config.schema import TrackingConfig
from deepspec.errors import ConfigError

logger = logging.getLogger(__name__)
MODES = ("auto", "online", "offline", "disabled")
_QUEUE = 1000  # rows kept for a slow server; later ones are dropped here, never from metrics.jsonl
_SECRET = ("key", "token", "secret", "password")


def run_id(run_dir: Path, job_type: str) -> str:
    """Stable id of one stage of one run: a restart continues the same W&B run."""
    return hashlib.sha256(f"{Path(run_dir).resolve()}|{job_type}".encode()).hexdigest()[:16]


def resolve_mode(mode: str, environ: Mapping[str, str]) -> str:
    """online, offline or disabled. ``auto`` is online only where a key is configured, so nobody is asked to log in."""
    if mode not in MODES:
        raise ConfigError(f"tracking.mode={mode!r} must be one of {', '.join(MODES)}.")
    if mode != "auto":
        return mode
    if environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return environ["WANDB_MODE"]
    return "online" if _has_key(environ) else "offline"


def _has_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def without_secrets(value: Any) -> Any:
    """``value`` with entries whose key looks like a credential removed, at any depth."""
    if isinstance(value, Mapping):
        return {k: without_secrets(v) for k, v in value.items() if not str(k).lower().endswith(_SECRET)}
    return [without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class ArtifactFiles:
    """One artifact: ``files`` are stored, ``references`` only pointed to, as large things are."""

    name: str
    type: str
    files: tuple[Path, ...] = ()
    references: tuple[Path, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


class Tracker:
    """Same calls on every rank and in every mode; only global rank 0 with tracking on does anything."""

    def __init__(self) -> None:
        self.id: Optional[str] = None
        self._run: Any = None
        self._tasks: queue.Queue[Optional[Callable[[], None]]] = queue.Queue(maxsize=_QUEUE)
        self._thread: Optional[threading.Thread] = None
        self._warned = False
        self._timeout = 0.0
        self._offline = True

    @staticmethod
    def start(config: Mapping[str, Any], tracking: TrackingConfig, run_name: str, run_dir: Path, job_type: str,
              *, id: Optional[str] = None) -> "Tracker":
        """Begin (or continue) the W&B run of ``job_type``; a failure is one warning and a tracker that does nothing.

        ``config`` is the resolved configuration plus derived facts. Call ``finish`` in a ``finally``.
        """
        tracker = Tracker()
        mode = resolve_mode(tracking.mode, os.environ)
        tracker.id = id or run_id(run_dir, job_type)
        if mode == "disabled" or distributed.rank() != 0:
            return tracker
        tracker._timeout = tracking.timeout_seconds
        tracker._offline = mode == "offline"
        options = {
            "project": tracking.project, "entity": tracking.entity, "group": tracking.group or run_name,
            "job_type": job_type, "name": f"{run_name}-{job_type}", "tags": list(tracking.tags) or None,
            "dir": str(run_dir), "mode": mode, "id": tracker.id, "resume": "allow",
            "config": without_secrets(dict(config)),
        }
        started = threading.Event()
        tracker._thread = threading.Thread(target=tracker._work, args=(options, started), daemon=True, name="wandb")
        tracker._thread.start()
        if not started.wait(tracking.timeout_seconds + 5.0):
            tracker._give_up(f"no answer within {tracking.timeout_seconds:.0f} s")
        return tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row against ``global_step``. Never blocks and never passes ``step=``, which drops rows after a resume."""
        row = {key: value for key, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}
        self._submit(lambda: self._run.log(row | {"global_step": step}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final figures of the run."""
        self._submit(lambda: self._run.summary.update(dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A long-form table, one row a value, so that runs can be joined in the browser."""
        def send() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._submit(send)

    def artifact(self, item: "ArtifactFiles", inputs: Sequence[str] = ()) -> None:
        """Log ``item`` as made from the artifacts named by ``inputs``.

        What is used can be looked up online only; ``config.inputs`` has the names always.
        """
        def send() -> None:
            self._run.config.update({"inputs": list(inputs)}, allow_val_change=True)
            if not self._offline:
                for name in inputs:
                    self._use(name)
            self._run.log_artifact(_wandb_artifact(item), aliases=["latest", *item.aliases])

        self._submit(send)

    def _use(self, name: str) -> None:
        import wandb

        try:
            self._run.use_artifact(f"{name}:latest")
        except (wandb.errors.CommError, ValueError):  # made elsewhere, or before tracking was on
            logger.debug("W&B has no artifact %s", name)

    def finish(self, failed: bool = False) -> None:
        """Close the run; the wait for the upload is bounded. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._put(lambda: self._run.finish(exit_code=int(failed)))
        self._put(None)
        thread.join(self._timeout + 5.0)
        if thread.is_alive():
            self._warn(f"the upload did not end within {self._timeout:.0f} s")

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is not None:
            self._put(task)

    def _put(self, task: Optional[Callable[[], None]]) -> None:
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._warn("it is too slow, rows are being dropped")

    def _work(self, options: dict[str, Any], started: threading.Event) -> None:
        try:
            self._run = _init(options, self._timeout)
            started.set()
            while (task := self._tasks.get()) is not None:
                task()
        except (Exception, SystemExit) as error:  # W&B's own errors, the server's, the file system's, and its exits
            self._give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
            started.set()

    def _give_up(self, reason: str) -> None:
        self._thread = None
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("W&B tracking is off (%s). Training goes on; metrics.jsonl has every row.", reason)


def _wandb_artifact(item: ArtifactFiles) -> Any:
    import wandb

    made = wandb.Artifact(item.name, type=item.type, metadata=dict(item.metadata))
    for path in item.files:
        made.add_file(str(path), name=path.name)
    for path in item.references:
        made.add_reference(path.resolve().as_uri(), name=path.name, checksum=False)
    return made


def _init(options: dict[str, Any], timeout: float) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    # An earlier stage's run left open would be returned by init instead of a new one.
    if wandb.run is not None:
        wandb.run.finish()
    Path(options["dir"]).mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(init_timeout=timeout, silent=True, console="off", disable_git=True)
    run = wandb.init(settings=settings, **options)
    run.define_metric("global_step")
    for prefix in ("train", "perf", "eval", "calibration", "profile"):
        run.define_metric(f"{prefix}/*", step_metric="global_step")
    run.define_metric("eval/acceptance_length", step_metric="global_step", summary="max")
    run.define_metric("calibration/ece_mean", step_metric="global_step", summary="min")
    return run
