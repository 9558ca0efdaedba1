"""Build every communicator before the first step, in one order on all ranks.

A communicator is made by the first collective on its group. Left to the first training step, that happens in the middle
of forward and backward, on overlapping groups, in an order that depends on which rank is ahead, under its time-out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from moesaic.meshes import Meshes
from moesaic.ops.all_to_all import all_to_all_counts
from moesaic.train.grad_norm import clip_grad_norm_


def warm_up_collectives(model: nn.Module, meshes: Meshes) -> None:
    """Run each kind of collective of a step once, on zeros; nothing is changed. Every rank must call it.

    One all-reduce on each axis of each view, one exchange over ep, and the norm of all-zero gradients, which takes its
    flattened meshes.
    """
    kind = meshes.dense.device_type
    for view in (meshes.data, meshes.dense, meshes.expert, meshes.tokens, meshes.sequence, meshes.unsplit):
        for axis in range(view.ndim):
            dist.all_reduce(torch.zeros(1, device=kind), group=view.get_group(axis))
    ep_group = meshes.expert.get_group("ep")
    all_to_all_counts(torch.zeros(ep_group.size(), 1, dtype=torch.int64, device=kind), ep_group)

    trained = [param for param in model.parameters() if param.requires_grad]
    assert all(param.grad is None for param in trained), "warm up before the first backward"
    for param in trained:
        param.grad = torch.zeros_like(param)
    clip_grad_norm_(trained, max_norm=None)
    for param in trained:
        param.grad = None
