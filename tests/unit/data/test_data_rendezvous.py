"""Ranks that meet through files: a rank that has died ends the wait of the others."""

import os
import subprocess
import sys

import pytest

from deepspec.data.rendezvous import Rendezvous
from deepspec.errors import InputRefused, UserError


def pair(directory) -> tuple[Rendezvous, Rendezvous]:
    """Two ranks of one process."""
    ranks = [Rendezvous(directory, "work") for _ in range(2)]
    for number, one in enumerate(ranks):
        one.rank, one.world_size = number, 2
        one._alive(number).touch()
    return ranks[0], ranks[1]


def test_results_of_all_ranks(tmp_path):
    first, second = pair(tmp_path)
    second.finish({"rows": 2})
    first.finish({"rows": 1})
    assert [row["rows"] for row in first.collect()] == [1, 2]


def test_a_silent_rank_ends_the_wait(tmp_path):
    first, second = pair(tmp_path)
    first.finish({"rows": 1})
    now = first._alive(0).stat().st_mtime
    os.utime(second._alive(1), (now - 100, now - 100))
    assert not first._complete()  # quiet, but not for long enough
    os.utime(second._alive(1), (now - 130, now - 130))
    with pytest.raises(UserError, match="rank 1 for 120 s"):
        first.collect()


def test_a_rank_that_finished_may_be_silent(tmp_path):
    first, second = pair(tmp_path)
    for one in (second, first):
        one.finish({})
    os.utime(second._alive(1), (1, 1))
    assert len(first.collect()) == 2


def test_signs_of_life_are_written_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("deepspec.data.rendezvous._BEAT_SECONDS", 0.01)
    monkeypatch.setattr("deepspec.data.rendezvous.distributed.init", lambda: None)
    monkeypatch.setattr("deepspec.data.rendezvous.distributed.barrier", lambda: None)
    one = Rendezvous(tmp_path, "work")
    one.world_size = 2
    one.start()
    os.utime(one._alive(0), (1, 1))
    for _ in range(500):
        if one._last_beat(0) > 1:
            break
        one._done.wait(0.01)
    assert one._last_beat(0) > 1
    one.end()
    assert not one._alive(0).exists() and not list(tmp_path.iterdir())


def test_another_job_in_the_same_folder_is_refused(tmp_path):
    code = ("import sys; from deepspec.data.rendezvous import Rendezvous; one = Rendezvous(sys.argv[1], 'work'); "
            "one.start(); print('in', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(InputRefused, match="another job is writing to"):
            Rendezvous(tmp_path, "work").start()
        Rendezvous(tmp_path, "other work").start()
        other.kill()
        other.wait()
    Rendezvous(tmp_path, "work").start()  # a killed job holds nothing
