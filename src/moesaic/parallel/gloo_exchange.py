"""FSDP's gather and reduce-scatter between CPU ranks, sent straight from owner to user (``ops/point_to_point.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from moesaic.ops.point_to_point import reduce_scatter, start_gather

GATHER_TAG, REDUCE_TAG = 1, 2


class GlooAllGather(AllGather):
    """A gather that returns work: what is gathered ahead arrives during computation."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The gathered unit's buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Every rank of ``group`` must call it. [W*n] from each rank's [n], which may be a slice of the output."""
        rank, parts_WN = group.rank(), output_tensor.view(group.size(), -1)
        if parts_WN[rank].data_ptr() != input_tensor.data_ptr():
            parts_WN[rank].copy_(input_tensor)
        return start_gather(parts_WN, group, GATHER_TAG)


class GlooReduceScatter(ReduceScatter):
    """A reduction that sums in the order of ranks, so that results repeat exactly."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a unit's gradients, or of their reduced shard."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Every rank of ``group`` must call it. This rank's [n] of the sum over ranks of [W*n]."""
        assert op == dist.ReduceOp.SUM, f"{op}: units that use this reduce as a sum"
        reduce_scatter(output_tensor, input_tensor.view(group.size(), -1), group, REDUCE_TAG)


def use_gloo_exchange(unit: FSDPModule) -> None:
    """Make a unit on CPU ranks gather and reduce as above; its gradients must be reduced as a sum."""
    unit.set_custom_all_gather(GlooAllGather())
    unit.set_custom_reduce_scatter(GlooReduceScatter())
