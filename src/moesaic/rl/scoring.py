"""Rewards of a step's trajectories: each rank scores its share, which is of whole groups, and every rank gets all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from moesaic.rl.requests import share_of, split_groups
from moesaic.rl.rewards import Reward, RewardFunctions
from moesaic.rl.types import Trajectory
from moesaic.runtime import PeerFailed


class Scorer:
    """Every rank makes one, and calls it with the same trajectories.

    Args:
        functions: of a run; none of them where nothing but an environment, a model or a teacher rewards.
        tokenizer: turns completions into the text that functions read; end-of-text tokens are left out of it.
    """

    def __init__(self, functions: RewardFunctions, tokenizer: PreTrainedTokenizerBase) -> None:
        self._functions = functions
        self._tokenizer = tokenizer

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """In order; completions of one group must follow each other. The functions run on one rank for each group, as
        their answers may differ (time-outs, noise), and some compare a group's completions.

        Raises:
            what the functions' own code raises outside of what they are asked (that is counted, never raised); on the
            other ranks RuntimeError.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        groups = split_groups(trajectories)
        own = [each for number in share_of(len(groups), world_size, rank) for each in groups[number]]
        error: Exception | None = None
        rewards: list[Reward] = []
        try:
            texts = [self._tokenizer.decode(each.tokens, skip_special_tokens=True) for each in own]
            rewards = self._functions.score(own, texts)
        except Exception as problem:  # raised below, when the other ranks know of it
            error = problem
        gathered: list[Any] = [None] * world_size  # of each rank; in the order of ranks they are in that of groups
        dist.all_gather_object(gathered, (rewards, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        failed = [f"rank {number}: {text}" for number, (_, text) in enumerate(gathered) if text is not None]
        if failed:
            raise PeerFailed(f"scoring failed on {'; '.join(failed)}")
        return [reward for rewards, _ in gathered for reward in rewards]
