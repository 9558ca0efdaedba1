"""What the quickstart says of its rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickstart.rewards import gain_of, read_accuracies, read_rewards


def test_rewards_and_accuracies_of_a_run(tmp_path: Path) -> None:
    lines = [
        {"kind": "val", "step": 0, "metrics": {"val-core/a/reward/mean@1": 0.25, "val-core/a/acc/mean@1": 9.0}},
        {"kind": "rl", "step": 1, "metrics": {"critic/score/mean": 0.5}},
        {"kind": "rl", "step": 2, "metrics": {"critic/score/mean": 0.75}},
        {"kind": "rl", "step": 3, "metrics": {"rollout/groups": 0.0}},  # dynamic sampling found nothing to learn from
        {"kind": "val", "step": 2, "metrics": {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 1.0}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_rewards(path) == [0.5, 0.75]
    assert read_accuracies(path) == {0: 0.25, 2: 0.75}


def test_the_first_updates_and_the_last() -> None:
    assert gain_of([0, 0.2, 0.5, 0.8, 1.0], 2) == (0.1, 0.9)
    with pytest.raises(ValueError, match="3 updates; 4 are needed"):
        gain_of([0, 1, 1], 2)
