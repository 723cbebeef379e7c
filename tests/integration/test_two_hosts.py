"""Two hosts, each with a launcher of its own and no ssh: the losses of one host, also when one of them is lost."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "unit" / "targets")]

from tiny_targets import random_ids, save_tiny  # noqa: E402

from deepspec.artifacts import begin, complete  # noqa: E402
from deepspec.config.compose import compose_config  # noqa: E402
from deepspec.config.paths import responses_dir  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.integration.test_training import SCRIPT, model, outcome, rows  # noqa: E402
from tests.integration.two_hosts import TwoHosts, kill_tree  # noqa: E402

pytestmark = pytest.mark.slow
SLOW = "sleep=0.25"  # per read of the source, so that a host can be lost in the middle of the run
OPTIONS = "micro_batch_size=1,save_every=2"
MAIN = (
    "+experiment=tiny", "stages=[train]", "features=online", "target.source=hf", "target.feature_layers=[0,2]",
    "target.shape={model_type: qwen3, hidden_size: 64, intermediate_size: 96, num_layers: 4, num_heads: 4, "
    "num_kv_heads: 2, head_dim: 16, vocab_size: 320}",
    "data.max_length=64", "drafter.markov_rank=8", "trainer.global_batch_size=4", "trainer.micro_batch_size=2",
    "trainer.num_anchors=8", "trainer.max_steps=4", "trainer.decode_every=2", "trainer.decode_prompts=3",
    "trainer.decode_tokens=8", "engine.zero_stage=3", "run.seed=11", "run.threads=1", "tracking.mode=disabled",
)


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
    with hosts.silent():
        codes = hosts.finish(*both, timeout=240)
    assert all(code != 0 for code in codes)
    latest = (run / "checkpoints/latest").read_text().strip()
    kept = json.loads((run / "checkpoints" / latest / "state.json").read_text())
    assert 2 <= kept["step"] < 10 and kept["world_size"] == 2
    shutil.rmtree(run)


def responses_for(overrides: list[str]) -> None:
    """Random answers of a random target, where the main job with these options looks for them."""
    config = compose_config(overrides)
    save_tiny(Path(config.target.path))
    directory = responses_dir(config)
    manifest = begin(directory, "responses", "fingerprint")
    with open(directory / "responses.jsonl", "w", encoding="utf-8") as handle:
        for index in range(14):
            ids = random_ids(30, seed=index).tolist()
            turn = {"prompt_ids": ids[:8], "response_ids": ids[8:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": ("math", "chat")[index % 2], "messages": [],
                                     "split": "held_out" if index >= 8 else "train", "turns": [turn]}) + "\n")
    complete(directory, manifest, ["responses.jsonl"])


def test_the_main_job_on_two_hosts(hosts: TwoHosts) -> None:
    main, folder = str(ROOT / "launch" / "train_drafter.py"), hosts.folder
    options = [*MAIN, f"target.path={folder}/target", f"run.data_root={folder}/data"]
    responses_for([*options, f"run.dir={folder}/main-both"])
    both = hosts.launch(main, *options, f"run.dir={folder}/main-both", port=29514)
    assert hosts.finish(*both) == [0, 0], hosts.output(0).read_text()[-4000:]
    alone = hosts.launch_alone(main, *options, f"run.dir={folder}/main-alone")
    assert hosts.finish(alone) == [0], hosts.output(0).read_text()[-4000:]
    assert losses(folder / "main-both") == pytest.approx(losses(folder / "main-alone"), abs=1e-4)
    assert len(losses(folder / "main-both")) == 4
    together, single = (rows(folder / f"main-{name}", "validation.jsonl") for name in ("both", "alone"))
    assert [row["step"] for row in together] == [2, 4]
    assert [row["decoded"]["num_prompts"] for row in together] == [3, 3]
    assert together[0]["decoded"] == single[0]["decoded"]
    assert together[-1]["acceptance_length_proxy"] == pytest.approx(single[-1]["acceptance_length_proxy"], rel=1e-3)
