"""FSDP's gather and reduce-scatter between CPU ranks: the same values as gloo's own collectives, in any interleaving."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.parallel.gloo_exchange import GlooAllGather, GlooReduceScatter
from tests.pool import RunRanks


def numbers(rank: int, size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank))


def gather(rank: int, dtype: torch.dtype) -> None:
    """Two under way at once, waited for in the other order; the input a slice of the output, and not."""
    comm, group, size = GlooAllGather(), dist.group.WORLD, dist.get_world_size()
    assert group is not None
    expected = [torch.cat([numbers(peer, 5, seed) for peer in range(size)]).to(dtype) for seed in (1, 2)]
    first, second = (comm.allocate((5 * size,), dtype=dtype, device=torch.device("cpu")).zero_() for _ in range(2))
    own = first.view(size, 5)[rank]
    own.copy_(numbers(rank, 5, 1))
    works = [comm(first, own, group), comm(second, numbers(rank, 5, 2).to(dtype), group)]
    for work in reversed(works):
        assert work.wait()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def reduce(rank: int, dtype: torch.dtype) -> None:
    comm, group, size = GlooReduceScatter(), dist.group.WORLD, dist.get_world_size()
    assert group is not None
    terms = [numbers(peer, 5 * size, 3).to(dtype) for peer in range(size)]
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total += term
    out = torch.empty(5, dtype=dtype)
    comm(out, terms[rank].clone(), group, dist.ReduceOp.SUM)
    assert torch.equal(out, total.view(size, 5)[rank])  # bit for bit: always in the order of ranks
    with pytest.raises(AssertionError, match="as a sum"):
        comm(out, terms[rank], group, dist.ReduceOp.AVG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gather(run_ranks: RunRanks, world_size: int, dtype: torch.dtype) -> None:
    run_ranks(gather, world_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduce_scatter(run_ranks: RunRanks, world_size: int, dtype: torch.dtype) -> None:
    run_ranks(reduce, world_size, dtype)
