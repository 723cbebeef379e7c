"""Two hosts, each with a launcher of its own and no ssh: the losses of one host, also when one of them is lost."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from test_training import SCRIPT, model, outcome, rows  # noqa: E402

from tests.integration.two_hosts import TwoHosts, kill_tree  # noqa: E402

pytestmark = pytest.mark.slow
SLOW = "sleep=0.25"  # per read of the source, so that a host can be lost in the middle of the run
OPTIONS = "micro_batch_size=1,save_every=2"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with TwoHosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def base(hosts: TwoHosts) -> Path:
    """Runs on two hosts at stages 0 and 3; one that loses a host and is finished by the other; the same on one host."""
    base = hosts.folder
    both = hosts.launch(str(SCRIPT), *(f"train:{stage}:{base}/two-{stage}:{OPTIONS}" for stage in (0, 3)))
    assert hosts.finish(*both) == [0, 0], hosts.output(0).read_text()[-4000:]
    lose_a_host(hosts, base / "lost")
    alone = hosts.launch_alone(str(SCRIPT), f"train:0:{base}/lost:{OPTIONS}", f"train:0:{base}/one:{OPTIONS}")
    assert hosts.finish(alone) == [0], hosts.output(0).read_text()[-4000:]
    return base


def lose_a_host(hosts: TwoHosts, run: Path) -> None:
    """Kill all processes of the second host in the middle of a run and see the first one end."""
    first, second = hosts.launch(str(SCRIPT), f"train:2:{run}:{OPTIONS},{SLOW}", port=29512)
    wait_for_step(run, 2)
    lost = time.monotonic()
    kill_tree(second)
    (code,) = hosts.finish(first, timeout=60)
    assert code != 0, "the host that is left must say that the job failed"
    assert time.monotonic() - lost < 30, "a closed connection is noticed at once, not after the time limit"
    assert not (run / "outcome.json").exists()


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir)]


@pytest.mark.parametrize("stage", (0, 3))
def test_two_hosts_train_as_one_does(base: Path, stage: int) -> None:
    assert outcome(base / f"two-{stage}") == {"step": 10, "stopped": False, "trained": True}
    assert losses(base / f"two-{stage}") == pytest.approx(losses(base / "one"), abs=1e-5)
    one, two = model(base / "one", 10), model(base / f"two-{stage}", 10)
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)


def wait_for_step(run_dir: Path, step: int, seconds: float = 120.0) -> None:
    """Until ``latest`` names a checkpoint of at least ``step``."""
    pointer, deadline = run_dir / "checkpoints/latest", time.monotonic() + seconds
    while not (pointer.is_file() and int(pointer.read_text().strip().removeprefix("step-")) >= step):
        assert time.monotonic() < deadline, f"no checkpoint of step {step} after {seconds:.0f} s"
        time.sleep(0.05)


def test_a_lost_host_ends_the_job_and_the_other_one_finishes_it_alone(base: Path) -> None:
    assert outcome(base / "lost")["step"] == 10
    assert [row["step"] for row in rows(base / "lost")] == list(range(1, 11))
    assert losses(base / "lost") == pytest.approx(losses(base / "one"), abs=1e-5)


def test_a_silent_network_ends_the_job_after_the_time_limit(hosts: TwoHosts, base: Path) -> None:
    run = base / "cut"
    both = hosts.start_ranks(str(SCRIPT), f"train:1:{run}:{OPTIONS},{SLOW}", port=29513,
                             DEEPSPEC_COLLECTIVE_TIMEOUT="15")
    wait_for_step(run, 2)
    hosts.cut()
    codes = hosts.finish(*both, timeout=120)
    assert all(code != 0 for code in codes)
    latest = (run / "checkpoints/latest").read_text().strip()
    kept = json.loads((run / "checkpoints" / latest / "state.json").read_text())
    assert 2 <= kept["step"] < 10 and kept["world_size"] == 2
    shutil.rmtree(run)
