"""What a run of reinforcement learning has learned, from its metrics; fails where it gained less than it was asked to.

    python -m quickstart.learned build/tiny_rl/grpo --min-reward-gain 0.15 --min-accuracy-gain 0.2

Reward: the mean of the last 5 steps less that of the first 5, of completions as they are sampled in training. Accuracy:
of the likeliest answers to the held-out prompts, after the last step less before the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"
REWARD = "critic/score/mean"
VALIDATION, ACCURACY = "val-core/", "/acc/mean@1"
NUM_AVERAGED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How a run went.

    Attributes:
        rewards: of each step, in order.
        accuracies: by step, 0 among them: before the first.
    """

    rewards: tuple[float, ...]
    accuracies: dict[int, float]

    @property
    def first_reward(self) -> float:
        """Mean over the first steps."""
        return sum(self.rewards[:NUM_AVERAGED]) / NUM_AVERAGED

    @property
    def last_reward(self) -> float:
        """Mean over the last steps."""
        return sum(self.rewards[-NUM_AVERAGED:]) / NUM_AVERAGED

    @property
    def accuracy_gain(self) -> float:
        """From before the first step to after the last."""
        return self.accuracies[max(self.accuracies)] - self.accuracies[0]


def read_curve(folder: Path) -> Curve:
    """From a run's folder.

    Raises:
        ValueError: the run has fewer steps than are averaged at both ends, or wasn't validated before and after.
    """
    rewards: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    for line in (folder / METRICS).read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "rl":
            rewards[row["step"]] = row["metrics"][REWARD]
        elif row["kind"] == "val":
            scores = [
                value
                for name, value in row["metrics"].items()
                if name.startswith(VALIDATION) and name.endswith(ACCURACY)
            ]
            accuracies[row["step"]] = sum(scores) / len(scores)
    if len(rewards) < 2 * NUM_AVERAGED:
        raise ValueError(
            f"{folder}: {len(rewards)} steps; at least {2 * NUM_AVERAGED} are needed to compare both ends."
        )
    if 0 not in accuracies or max(rewards) not in accuracies:
        raise ValueError(f"{folder}: accuracies are of steps {sorted(accuracies)}; give the recipe an eval_dataset.")
    return Curve(rewards=tuple(rewards[step] for step in sorted(rewards)), accuracies=accuracies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--min-reward-gain", type=float, default=0.0)
    parser.add_argument("--min-accuracy-gain", type=float, default=0.0)
    arguments = parser.parse_args()
    curve = read_curve(arguments.run)
    reward_gain = curve.last_reward - curve.first_reward
    steps = ", ".join(f"{step}: {curve.accuracies[step]:.3f}" for step in sorted(curve.accuracies))
    print(f"held-out accuracy by step: {steps}; gained {curve.accuracy_gain:+.3f}")
    print(f"mean reward: {curve.first_reward:.3f} -> {curve.last_reward:.3f}; gained {reward_gain:+.3f}")
    asked = (
        ("reward", reward_gain, arguments.min_reward_gain),
        ("accuracy", curve.accuracy_gain, arguments.min_accuracy_gain),
    )
    missed = [f"{name}: a gain of {gain:.3f}, less than {least}" for name, gain, least in asked if gain < least]
    for text in missed:
        print(f"{text}: something is wrong", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
