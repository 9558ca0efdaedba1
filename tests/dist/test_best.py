"""The lowest held-out loss is remembered with the sets it is the loss of."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.train.best import FILE, Best, load_best, save_best


def remember(rank: int, folder: Path) -> tuple[Best | None, ...]:
    """Read with the same sets, in either order, with others, and as a file without any."""
    save_best(folder, Best(step=3, loss=1.5, sets=("a", "b")))
    found = tuple(load_best(folder, sets) for sets in (("b", "a"), ("a",), ("a", "c")))
    (folder / FILE).write_text('{"step": 3, "loss": 1.5}')
    return (*found, load_best(folder, ("a", "b")))


@pytest.mark.slow
def test_the_loss_of_other_sets_is_not_compared(run_ranks, tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / ".metadata").touch()
    best = Best(step=3, loss=1.5, sets=("a", "b"))
    assert run_ranks(remember, 1, tmp_path) == [(best, None, None, None)]
