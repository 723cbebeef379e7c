"""A feature store under kill -9, a full disk and a limit on the size of files."""

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch

from deepspec import artifacts
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.feature_format import StoreHeader
from deepspec.data.feature_shards import FeatureWriter, clean_shards, finished_samples, join_index, shard_names
from deepspec.data.feature_store import FeatureStore
from deepspec.data.features.check import find_damage, read_catalog
from deepspec.errors import UserError

pytestmark = pytest.mark.slow

COUNT, KILLS, SMALL_SHARDS = 400, 20, 60_000  # two samples a shard
CONTEXT: Any = multiprocessing.get_context("fork")  # a child has everything imported and is killed in mid-work


def header(codec: str) -> StoreHeader:
    return StoreHeader("target", "renderer", "responses", (1, 3), 256, codec, "float32")


def make(index: int, tokens: int = 40) -> FeatureSample:
    generator = torch.Generator().manual_seed(index)
    mask = torch.tensor([0] * 8 + [1] * (tokens - 8), dtype=torch.bool)
    sample = Sample(f"s{index:04d}", "chat", torch.arange(tokens), mask)
    return FeatureSample(sample, torch.randn(tokens, 512, generator=generator),
                         torch.randn(tokens, 256, generator=generator))


def extract(folder: Path, codec: str, shard_bytes: int = 200_000) -> None:
    """What a rank of the extraction does when it is started, for the first time or again."""
    clean_shards(folder, header(codec))
    done = finished_samples(folder)
    writer = FeatureWriter(folder, header(codec), shard_bytes=shard_bytes)
    for index in range(COUNT):
        if f"s{index:04d}" not in done:
            item = make(index)
            writer.write(item.sample, "train", item.features, item.last_hidden)
    writer.close()


def finish(folder: Path, codec: str) -> FeatureStore:
    manifest = artifacts.begin(folder, "features", "f", facts={"header": header(codec).to_json()})
    shards = join_index(folder, [f"s{index:04d}" for index in range(COUNT)], set())
    artifacts.complete(folder, manifest, ["index.jsonl"], {"shards": shards})
    return FeatureStore(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def written(folder: Path, pattern: str = "shard-*.bin") -> int:
    """Bytes of the files of that name; some may vanish meanwhile."""
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def in_child(work: Callable[[], None]) -> Any:
    child = CONTEXT.Process(target=work)
    child.start()
    return child


@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_kills_change_no_byte(tmp_path: Path, codec: str) -> None:
    torch.set_num_threads(1)  # a forked child has no other threads
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    extract(whole, codec, SMALL_SHARDS)
    finish(whole, codec)
    chance, step = random.Random(0), written(whole) / (2 * KILLS)
    for _ in range(KILLS):
        before, child = written(torn), in_child(lambda: extract(torn, codec, SMALL_SHARDS))
        enough = before + chance.random() * 2 * step
        while written(torn, ".*") + written(torn) < enough:
            assert child.is_alive(), "it ended before it could be killed"
            time.sleep(0.001)
        time.sleep(chance.random() * 0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert 0 < len(finished_samples(torn)) < COUNT
    extract(torn, codec, SMALL_SHARDS)
    found = finish(torn, codec)
    assert content(torn) == content(whole)
    assert list(find_damage(read_catalog(torn))) == [] and len(found) == COUNT


def test_a_limit_on_files_is_reported_and_finished_shards_stay(tmp_path: Path) -> None:
    def limited(result: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        writer = FeatureWriter(tmp_path, header("int8"), shard_bytes=200_000)
        try:
            for index in range(10):
                item = make(index)
                writer.write(item.sample, "train", item.features, item.last_hidden)
            large = make(10, tokens=600)
            writer.write(large.sample, "train", large.features, large.last_hidden)
            writer.close()
        except UserError as error:
            result.send(str(error))

    receive, send = CONTEXT.Pipe(duplex=False)
    child = in_child(lambda: limited(send))
    assert receive.poll(60), "the limit was not noticed"
    message = receive.recv()
    child.join()
    assert "larger than a file may be here" in message and "after 7 samples" in message and "ulimit -f" in message
    assert finished_samples(tmp_path) == {f"s{index:04d}" for index in range(7)}
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_next_run_continues(small_disk: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the disk is full after [1-9][0-9]* samples.*continues from there"):
        extract(small_disk, "int8")
    assert not list(small_disk.glob(".*"))
    names, done = shard_names(small_disk), finished_samples(small_disk)
    assert names and 0 < len(done) < COUNT
    assert clean_shards(small_disk, header("int8")) == 0  # every finished shard is whole
    # More room, as a user would make it.
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    extract(small_disk, "int8")
    assert len(finish(small_disk, "int8")) == COUNT
    whole = tmp_path / "whole"
    whole.mkdir()
    extract(whole, "int8")
    finish(whole, "int8")
    assert content(small_disk) == content(whole)
