"""The rewards of a run of reinforcement learning; fails unless its last updates are worth more than its first.

python -m quickstart.rewards build/tiny_rl/grpo/metrics.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

MIN_GAIN = 0.15
# Means are over so many updates, at the beginning and at the end.
NUM_UPDATES = 5
REWARD = "critic/score/mean"


def read_rewards(metrics: Path) -> list[float]:
    """The mean reward of each update's completions; a step without an update has none."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line["metrics"][REWARD] for line in lines if line["kind"] == "rl" and REWARD in line["metrics"]]


def read_accuracies(metrics: Path) -> dict[int, float]:
    """By step: the mean score of held-out prompts, whatever their data sources."""
    found = {}
    for line in map(json.loads, metrics.read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "val":
            means = [value for name, value in line["metrics"].items() if "/reward/mean@" in name]
            found[line["step"]] = sum(means) / len(means)
    return found


def gain_of(rewards: Sequence[float], num_updates: int = NUM_UPDATES) -> tuple[float, float]:
    """The mean of the first updates and of the last. Example: ``gain_of([0, 0, 1, 1], 2)`` is (0.0, 1.0).

    Raises:
        ValueError: fewer updates than the two need.
    """
    if len(rewards) < 2 * num_updates:
        raise ValueError(f"{len(rewards)} updates; {2 * num_updates} are needed to compare the first with the last.")
    return sum(rewards[:num_updates]) / num_updates, sum(rewards[-num_updates:]) / num_updates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    arguments = parser.parse_args()
    rewards, accuracies = read_rewards(arguments.metrics), read_accuracies(arguments.metrics)
    first, last = gain_of(rewards)
    print(f"{len(rewards)} updates: mean reward {first:.3f} in the first {NUM_UPDATES}, {last:.3f} in the last")
    steps = "  ".join(f"{step}: {accuracy:.3f}" for step, accuracy in accuracies.items())
    print(f"held-out accuracy after so many updates  {steps}")
    if last - first < MIN_GAIN:
        print(f"a gain of {last - first:.3f}, less than {MIN_GAIN}: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
