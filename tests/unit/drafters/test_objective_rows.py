"""Row-wise work spread over threads."""

import pytest
import torch

from deepspec.objective.rows import over_rows


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_worked_through_once_by_any_number_of_threads(threads: int) -> None:
    """Every row once, workers within bounds, threads set back, and what a worker raises is raised."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = torch.zeros(11, dtype=torch.int64)
        workers: set[int] = set()

        def work(rows: slice, worker: int) -> None:
            seen[rows] += 1
            workers.add(worker)
            assert not torch.is_grad_enabled()

        over_rows(11, 2, torch.device("cpu"), work)
        over_rows(0, 2, torch.device("cpu"), work)
        assert seen.eq(1).all() and workers <= set(range(threads)) and torch.get_num_threads() == threads

        def fail(rows: slice, worker: int) -> None:
            raise ValueError(f"row {rows.start}")

        with pytest.raises(ValueError, match="row"):
            over_rows(11, 2, torch.device("cpu"), fail)
    finally:
        torch.set_num_threads(before)
