"""Times of a step's phases."""

from __future__ import annotations

import pytest

from moesaic.rl.phases import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; the first number."""
    now = [0.0]
    monkeypatch.setattr("moesaic.rl.phases.time.perf_counter", lambda: now[0])
    return now


def test_a_phase_within_another_counts_once(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.measure("gen"):
        clock[0] += 3
        for _ in range(2):
            with timer.measure("reward"):
                clock[0] += 1
        clock[0] += 4
    clock[0] += 0.5  # between phases
    with timer.measure("ref"):
        clock[0] += 8
    assert timer.take() == {"timing_s/gen": 7, "timing_s/reward": 2, "timing_s/ref": 8, "timing_s/step": 17.5}
    clock[0] += 1
    assert timer.take() == {"timing_s/step": 1}
