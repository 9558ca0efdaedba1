"""Completions of one prompt: a group. What is computed from a group's rewards, all groups of a step at once.

Shape suffixes: B trajectories, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_ABSOLUTE = 1e-8
EQUAL_RELATIVE = 1e-6
"""Rewards nearer than this are one reward: sums in fp32 differ by as much, and dividing such differences by their own
deviation would make advantages of size 1 out of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Which trajectory is of which group, and of how many.

    Attributes:
        numbers_B: int64, 0 to G - 1.
        sizes_G: int64, trajectories of each.
    """

    numbers_B: Tensor
    sizes_G: Tensor

    @staticmethod
    def of(groups_B: Tensor) -> Groups:
        """Of any numbers that tell groups apart; groups need not be of one size, nor lie together."""
        _, numbers_B, sizes_G = torch.unique(groups_B, return_inverse=True, return_counts=True)
        return Groups(numbers_B=numbers_B, sizes_G=sizes_G)

    @property
    def num_singletons(self) -> int:
        """Groups of one trajectory: there is nothing to compare its reward to."""
        return int((self.sizes_G == 1).sum())

    @property
    def is_single_B(self) -> Tensor:
        """Bool: the trajectory is alone in its group."""
        return (self.sizes_G == 1)[self.numbers_B]

    @property
    def sizes_B(self) -> Tensor:
        """fp64: trajectories of each one's group."""
        return self.sizes_G.double()[self.numbers_B]

    def sums_B(self, values_B: Tensor) -> Tensor:
        """fp64: for each trajectory, the sum over its group."""
        values_B = values_B.double()
        sums_G = torch.zeros(len(self.sizes_G), dtype=torch.float64, device=values_B.device)
        return sums_G.index_add(0, self.numbers_B, values_B)[self.numbers_B]

    def means_B(self, values_B: Tensor) -> Tensor:
        """fp64: for each trajectory, the mean over its group."""
        return self.sums_B(values_B) / self.sizes_B

    def deviations_B(self, values_B: Tensor) -> Tensor:
        """fp64: for each trajectory, its group's standard deviation, of a sample (divided by size - 1); 0 if alone."""
        squares_B = (values_B.double() - self.means_B(values_B)).square()
        return (self.sums_B(squares_B) / (self.sizes_B - 1).clamp(min=1)).sqrt()

    def are_equal_B(self, values_B: Tensor) -> Tensor:
        """Bool: all values of the trajectory's group are the same, but for rounding; so are those of a group of one."""
        values_B = values_B.double()
        highest_B, lowest_B, largest_B = (
            torch.zeros(len(self.sizes_G), dtype=torch.float64, device=values_B.device).scatter_reduce(
                0, self.numbers_B, each_B, reduce=reduce, include_self=False
            )[self.numbers_B]
            for each_B, reduce in ((values_B, "amax"), (values_B, "amin"), (values_B.abs(), "amax"))
        )
        return highest_B - lowest_B <= EQUAL_ABSOLUTE + EQUAL_RELATIVE * largest_B


def filter_groups(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] bool: which trajectories to keep so that every group left has rewards that differ (DAPO, 2503.14476).

    Groups are kept or left out as a whole. Rewards that differ by rounding alone (1e-6 of the largest) are equal, and a
    group of one trajectory is left out: neither has a reward above its group's mean.

    Args:
        rewards_B: one per trajectory, before any KL is taken from them.
        groups_B: numbers that tell groups apart.
    """
    return ~Groups.of(groups_B).are_equal_B(rewards_B)
