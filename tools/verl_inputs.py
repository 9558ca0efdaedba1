"""The step that verl's formulas are asked about: trajectories of uneven lengths, some of several turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.vectors import Draw, ragged_mask

SEED = 20_251
LENGTHS = (7, 4, 6, 1, 7, 3, 5, 2)
NUM_TOKENS = 7
GROUPS = (4, 4, 4, 1, 1, 1, 9, 9)
# The sizes 3, 2, 2 and 1.
GROUPS_WITH_SINGLETON = (4, 4, 4, 1, 1, 7, 9, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Eight trajectories. All tables are [8, 7] fp32; mask and groups int64.

    Attributes:
        mask: the model's tokens. Rows 0 and 4 have an environment's answer in between.
        attention: every token after the prompt.
        token_rewards: a reward per trajectory, on its last token of the model.
        dense_rewards: a reward on each of the model's tokens.
    """

    mask: Tensor
    attention: Tensor
    groups: Tensor
    rewards: Tensor
    token_rewards: Tensor
    dense_rewards: Tensor
    values: Tensor
    baselines: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    sequence_advantages: Tensor
    weights: Tensor


def build_step(seed: int = SEED) -> Step:
    """The same one for the same seed."""
    draw = Draw(seed)
    attention = ragged_mask(LENGTHS, NUM_TOKENS)
    mask = attention.clone()
    mask[0, 2:4] = 0
    mask[4, 3] = 0
    num_rows = len(LENGTHS)
    rewards = draw.numbers(num_rows, low=-1, high=1)
    # One group's rewards are all equal.
    rewards[6:] = 0.5
    token_rewards = torch.zeros(num_rows, NUM_TOKENS)
    last = NUM_TOKENS - 1 - mask.flip(-1).argmax(dim=-1)
    token_rewards[torch.arange(num_rows), last] = rewards
    old_logprobs = draw.numbers(num_rows, NUM_TOKENS, low=-3, high=-0.5)

    def near(logprobs: Tensor, distance: float) -> Tensor:
        return (logprobs + draw.numbers(*logprobs.shape, low=-distance, high=distance)).clamp(max=0)

    advantages = draw.numbers(num_rows, NUM_TOKENS, low=-2, high=2)
    advantages[2, 1] = 0
    return Step(
        mask=mask,
        attention=attention,
        groups=torch.tensor(GROUPS),
        rewards=rewards,
        token_rewards=token_rewards,
        dense_rewards=draw.numbers(num_rows, NUM_TOKENS, low=-1, high=1) * mask,
        values=draw.numbers(num_rows, NUM_TOKENS, low=-1, high=1),
        baselines=draw.numbers(num_rows, low=-1, high=1),
        logprobs=near(old_logprobs, 0.5),
        old_logprobs=old_logprobs,
        ref_logprobs=near(old_logprobs, 1),
        rollout_logprobs=near(old_logprobs, 0.75),
        advantages=advantages,
        sequence_advantages=draw.numbers(num_rows, 1, low=-1, high=2).expand(-1, NUM_TOKENS).contiguous(),
        weights=draw.numbers(num_rows, NUM_TOKENS, low=0, high=2),
    )
