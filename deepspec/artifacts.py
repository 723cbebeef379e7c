"""Manifests, hashes and atomic writes: how every directory says what it is, what made it, and whether it is whole."""

import hashlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterable, Optional

from deepspec.errors import InputRefused

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "hydra-core", "wandb")


def canonical_hash(value: Any, length: int = 64) -> str:
    """SHA-256 (first ``length`` hex digits) of a JSON-able value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def sha256_file(path: os.PathLike | str) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def atomic_write_bytes(path: os.PathLike | str, payload: bytes) -> None:
    """Write under a temporary name, fsync, rename: a reader sees the old file or the new one, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(payload)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def atomic_write_json(path: os.PathLike | str, value: Any) -> None:
    """JSON with sorted keys, two-space indent and a newline at the end, written atomically; NaN is refused."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    atomic_write_bytes(path, text.encode())


def write_readable(path: os.PathLike | str, write: Callable[[Path], None]) -> None:
    """Call ``write(path)`` and leave the file with the permissions that open() gives a new one.

    Some libraries write under a temporary name that only its owner may read, which a server under another user then
    cannot load.
    """
    path = Path(path)
    with open(path, "wb") as handle:
        mode = os.fstat(handle.fileno()).st_mode & 0o777
    write(path)
    os.chmod(path, mode)


def fsync_directory(path: os.PathLike | str) -> None:
    """Make a rename in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Manifest:
    """What a directory holds and how it came to be.

    ``fingerprint`` is the hash of everything that decides the content; ``inputs`` maps a name to the fingerprint of
    an artifact that was read; ``files`` maps a relative path to its SHA-256 once the status is ``complete``.
    """

    producer: str
    status: str  # incomplete | complete
    fingerprint: str
    inputs: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    git_revision: Optional[str] = None
    packages: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def environment() -> dict[str, Any]:
    """Git revision (with ``+dirty``) and versions of the packages that decide results."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"git_revision": _git_revision(), "packages": packages}


def _git_revision() -> Optional[str]:
    root = Path(__file__).resolve().parent.parent
    try:
        revision, dirty = (
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=5)
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if revision.returncode:
        return None
    return revision.stdout.strip() + ("+dirty" if dirty.stdout.strip() else "")


def begin(directory: os.PathLike | str, producer: str, fingerprint: str, *, inputs: Optional[dict[str, str]] = None,
          config: Optional[dict[str, Any]] = None, seed: int = 0, facts: Optional[dict[str, Any]] = None) -> Manifest:
    """Create ``directory`` and write its manifest as ``incomplete``."""
    manifest = Manifest(
        producer=producer, status="incomplete", fingerprint=fingerprint, inputs=inputs or {}, config=config or {},
        seed=seed, facts=facts or {}, **environment(),
    )
    atomic_write_json(Path(directory) / MANIFEST, asdict(manifest))
    return manifest


def complete(directory: os.PathLike | str, manifest: Manifest, files: Iterable[str],
             facts: Optional[dict[str, Any]] = None) -> Manifest:
    """Hash ``files`` (relative paths) and write the manifest as ``complete``: the last byte of an artifact."""
    hashes = {name: sha256_file(Path(directory) / name) for name in sorted(files)}
    values = asdict(manifest) | {"status": "complete", "files": hashes, "facts": manifest.facts | (facts or {})}
    atomic_write_json(Path(directory) / MANIFEST, values)
    return Manifest(**values)


def read_manifest(directory: os.PathLike | str) -> Optional[Manifest]:
    """The manifest of ``directory``, or None if there is none. Raises InputRefused for one that cannot be read."""
    path = Path(directory) / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:  # a file where a folder should be, no permission
        raise InputRefused(f"{path} cannot be read ({error.strerror}). Is {directory} the right folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). Delete the folder and make it again.") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise InputRefused(f"{path} has schema_version {version!r}, this code reads {SCHEMA_VERSION}. Make it again.")
    missing = [key for key in ("producer", "status", "fingerprint") if key not in values]
    if missing:
        raise InputRefused(f"{path} is not the manifest of an artifact: it has no {', '.join(missing)}. Is "
                           f"{directory} the right folder?")
    tables = ("inputs", "files", "facts", "config", "packages")
    wrong = [key for key in tables if not isinstance(values.get(key, {}), dict)]
    if wrong:
        raise InputRefused(f"{path} is damaged: {wrong[0]}={values[wrong[0]]!r} is no table of names and values. "
                           "Delete the folder and make it again.")
    return Manifest(**{key: values[key] for key in Manifest.__dataclass_fields__ if key in values})


def is_complete(directory: os.PathLike | str, fingerprint: Optional[str] = None) -> bool:
    """Whether ``directory`` holds a finished artifact, all files there (with this fingerprint, if one is given)."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.status != "complete":
        return False
    if not all((Path(directory) / name).is_file() for name in manifest.files):
        return False
    return fingerprint is None or manifest.fingerprint == fingerprint


def require_complete(directory: os.PathLike | str, what: str, command: str) -> Manifest:
    """The manifest of a finished artifact. Raises InputRefused naming ``command`` when it is missing or unfinished."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise InputRefused(f"{what} not found: {directory} has no {MANIFEST}. Make it with: {command}")
    if manifest.status != "complete":
        raise InputRefused(f"{what} in {directory} are unfinished ({manifest.status}). Continue with: {command}")
    return manifest
