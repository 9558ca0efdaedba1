"""Optimizers on DTensors of several meshes, against one process: what we use is equal, what we refuse isn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moesaic.config import OptimConfig
from moesaic.train.optim import build_optimizer
from tests.oracle.cells import TOLERANCES, rel_error


def adamw_on_rank(rank: int, implementation: str) -> bool:
    expert_mesh, dense_mesh = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    wholes = [torch.randn(4, 6, 2), torch.randn(8, 3)]
    layouts = [(expert_mesh, [Shard(1), Shard(0)]), (dense_mesh, [Shard(0)])]
    grads = [torch.randn_like(whole) for whole in wholes]
    alone = [nn.Parameter(whole.clone()) for whole in wholes]
    sharded = [nn.Parameter(distribute_tensor(w.clone(), *at)) for w, at in zip(wholes, layouts, strict=True)]
    for one, other, grad, at in zip(alone, sharded, grads, layouts, strict=True):
        one.grad, other.grad = grad.clone(), distribute_tensor(grad.clone(), *at)
    config = OptimConfig(implementation=implementation, weight_decay=0.1)
    for params in (alone, sharded):
        build_optimizer(nn.ParameterList(params), config, 0.1).step()
    pairs = zip(alone, sharded, strict=True)
    return all(torch.equal(one.detach(), other.detach().full_tensor()) for one, other in pairs)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_adamw_on_two_meshes_is_bit_equal_to_one_process(run_ranks, implementation: str) -> None:
    assert run_ranks(adamw_on_rank, 4, implementation) == [True] * 4


def muon_on_rank(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole, grad = torch.randn(8, 6), torch.randn(8, 6)
    alone, sharded = nn.Parameter(whole.clone()), nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    alone.grad, sharded.grad = grad.clone(), distribute_tensor(grad.clone(), mesh, [Shard(0)])
    for param in (alone, sharded):
        torch.optim.Muon([param], lr=0.1, weight_decay=0.0).step()
    return rel_error(sharded.detach().full_tensor() - whole, alone.detach() - whole)


def test_torchs_muon_on_shards_is_not_what_one_process_computes(run_ranks) -> None:
    """The second reason why the recipe refuses it; the first is in tests/unit/test_optim.py."""
    assert run_ranks(muon_on_rank, 2)[0] > 100 * TOLERANCES["adamw"]
