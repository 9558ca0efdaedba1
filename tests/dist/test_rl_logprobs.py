"""What is read off logits whose vocabulary ranks share, beside whole computations in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moesaic.parallel.tensor import VocabularyShard
from moesaic.rl.logprobs import topk_logprobs
from tests.pool import RunRanks
from tests.unit.test_rl_logprobs import QUANTITIES, TOLERANCE, draw, errors


def errors_on_ranks(rank: int, num_columns: int) -> list[tuple[float, float]]:
    size = dist.get_world_size()
    return [errors(quantity, rank, size, t, num_columns) for quantity in QUANTITIES for t in (1.0, 0.7)]


@pytest.mark.parametrize(("world_size", "num_columns"), [(2, 50), (4, 13)])
def test_columns_on_several_ranks(run_ranks: RunRanks, world_size: int, num_columns: int) -> None:
    """13 columns on 4 ranks: the last has one."""
    for found in run_ranks(errors_on_ranks, world_size, num_columns):
        assert all(value < 4 * TOLERANCE and grad < TOLERANCE for value, grad in found), found


def likeliest_on_ranks(rank: int, num_columns: int, k: int) -> bool:
    logits, *_ = draw(num_columns)
    chunk = -(-num_columns // dist.get_world_size())
    assert dist.group.WORLD is not None
    shard = VocabularyShard(group=dist.group.WORLD, first=rank * chunk, size=num_columns)
    found, ids = topk_logprobs(logits[..., rank * chunk : (rank + 1) * chunk], k, shard)
    expected, expected_ids = torch.log_softmax(logits.double(), dim=-1).topk(k)
    return torch.equal(ids, expected_ids) and bool((found - expected).abs().max() < 4 * TOLERANCE)


@pytest.mark.parametrize(("num_columns", "k"), [(50, 4), (13, 13)])
def test_the_likeliest_tokens_of_several_ranks(run_ranks: RunRanks, num_columns: int, k: int) -> None:
    """13 of 13: more than any rank has."""
    assert all(run_ranks(likeliest_on_ranks, 4, num_columns, k))
