"""Scores of a step that ranks share: in order, and each call with whole groups."""

from __future__ import annotations

from collections import Counter

import pytest

from moesaic.rl.rewards import Reward, RewardFunctions
from moesaic.rl.scoring import Scorer
from moesaic.rl.types import Prompt, Trajectory
from tests.pool import RunRanks
from tests.unit.data_tokenizers import build_tokenizer


def trajectories(num_groups: int, n: int) -> list[Trajectory]:
    """The i-th of a group has i + 1 tokens."""
    return [
        Trajectory(
            prompt=Prompt(number=group, tokens=(1,), text="", row={"prompt": "", "number": group}),
            group=group,
            index=index,
            tokens=(50,) * (index + 1),
            is_model=(True,) * (index + 1),
            logprobs=(0.0,) * (index + 1),
            versions=(0,) * (index + 1),
            finish_reason="stop",
        )
        for group in range(num_groups)
        for index in range(n)
    ]


def score_groups(rank: int, num_groups: int, n: int) -> tuple[list[Reward], int]:
    num_scored = 0

    def share_of_group(completion_ids, number):
        """A completion's part in its group's tokens: another number where some of the group is missing."""
        nonlocal num_scored
        num_scored += len(number)
        totals: Counter[int] = Counter()
        for group, tokens in zip(number, completion_ids, strict=True):
            totals[group] += len(tokens)
        return [group + len(tokens) / totals[group] for group, tokens in zip(number, completion_ids, strict=True)]

    functions = RewardFunctions([share_of_group])
    scorer = Scorer(functions, build_tokenizer())
    rewards = scorer(trajectories(num_groups, n))
    assert not functions.take_failures()
    assert scorer([]) == []
    return rewards, num_scored


@pytest.mark.parametrize(("num_groups", "sizes"), [(5, [6, 6, 3]), (2, [3, 3, 0])])
def test_a_call_has_whole_groups(run_ranks: RunRanks, num_groups: int, sizes: list[int]) -> None:
    results = run_ranks(score_groups, 3, num_groups, 3)
    for rewards, _ in results:
        totals = [group + share / 6 for group in range(num_groups) for share in (1, 2, 3)]
        assert [reward.total for reward in rewards] == pytest.approx(totals, rel=1e-12)
    assert [num_scored for _, num_scored in results] == sizes
