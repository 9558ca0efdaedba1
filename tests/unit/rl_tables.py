"""Drawn [B, T] tables for the tests of the formulas of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """A step: groups of two to four, trajectories of uneven lengths, with gaps between turns, and some without a token.

    ``logprobs`` are within 0.7 of ``old_logprobs``.
    """

    mask_BT: Tensor
    groups_B: Tensor
    old_logprobs_BT: Tensor
    logprobs_BT: Tensor
    advantages_BT: Tensor
    generator: torch.Generator

    def normal_BT(self) -> Tensor:
        return torch.randn(self.mask_BT.shape, generator=self.generator)

    def outcomes_BT(self, rewards_B: Tensor) -> Tensor:
        """Each trajectory's reward, on its last token."""
        places_T = torch.arange(self.mask_BT.size(1))
        last_B = torch.where(self.mask_BT, places_T, 0).amax(dim=-1)
        return torch.zeros(self.mask_BT.shape).scatter(1, last_B[:, None], rewards_B[:, None])


def draw_tables(seed: int, *, num_tokens: int = 9, empty: bool = True) -> Tables:
    """The tables of a seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 5, (3,), generator=generator)
    groups_B = torch.arange(3).repeat_interleave(sizes) * 7
    num_rows = len(groups_B)
    lengths_B = torch.randint(1, num_tokens + 1, (num_rows,), generator=generator)
    mask_BT = torch.arange(num_tokens) < lengths_B[:, None]
    mask_BT[1, 2:4] = False
    if empty:
        mask_BT[2] = False
    shape = (num_rows, num_tokens)
    old_BT = -3 * torch.rand(shape, generator=generator)
    return Tables(
        mask_BT=mask_BT,
        groups_B=groups_B,
        old_logprobs_BT=old_BT,
        logprobs_BT=old_BT + 1.4 * (torch.rand(shape, generator=generator) - 0.5),
        advantages_BT=torch.randn(shape, generator=generator),
        generator=generator,
    )


seeds = st.integers(0, 2**31)


def spoil(table_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The same under the mask, NaN, infinities and huge numbers elsewhere."""
    garbage_BT = torch.tensor(GARBAGE)[torch.arange(table_BT.numel()) % len(GARBAGE)].view(table_BT.shape)
    return torch.where(mask_BT, table_BT, garbage_BT)
