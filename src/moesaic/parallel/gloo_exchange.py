"""FSDP's gather and reduce-scatter between CPU ranks, sent straight from owner to user.

ProcessGroupGloo gathers into a buffer of its own and copies that out, and it reduces and scatters by all-reducing a
clone of everything (torch 2.13): up to twice the bytes, and three times the CPU time on the ranks of one machine. Sent
point to point, each rank gives and takes just what it must: (W-1)/W of the unit, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

GATHER_TAG, REDUCE_TAG = 1, 2


class Transfers(dist.Work):
    """Sends and receives under way, waited for together; keeps the tensors they read."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Until all have ended, each within its group's own time-out."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return True


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
        peers = _peers(group)
        works = [group.recv([parts_WN[peer]], peer, GATHER_TAG) for peer in peers]
        works += [group.send([parts_WN[rank]], peer, GATHER_TAG) for peer in peers]
        return Transfers(works)


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
        rank, parts_WN = group.rank(), input_tensor.view(group.size(), -1)
        arrived_WN = torch.empty_like(parts_WN)
        peers = _peers(group)
        works = [group.recv([arrived_WN[peer]], peer, REDUCE_TAG) for peer in peers]
        works += [group.send([parts_WN[peer]], peer, REDUCE_TAG) for peer in peers]
        Transfers(works).wait()
        first, second, *others = [parts_WN[rank] if peer == rank else arrived_WN[peer] for peer in range(group.size())]
        torch.add(first, second, out=output_tensor)
        for other in others:
            output_tensor.add_(other)


def use_gloo_exchange(unit: FSDPModule) -> None:
    """Make a unit on CPU ranks gather and reduce as above; its gradients must be reduced as a sum."""
    unit.set_custom_all_gather(GlooAllGather())
    unit.set_custom_reduce_scatter(GlooReduceScatter())


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group, nearest first, so that ranks don't all send to one."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]
