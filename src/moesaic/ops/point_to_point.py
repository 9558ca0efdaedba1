"""Gathers and sums between CPU ranks, sent straight from owner to user.

ProcessGroupGloo gathers into a buffer of its own and copies that out, and it reduces and scatters by all-reducing a
clone of everything (torch 2.13): up to twice the bytes, and three times the CPU time on the ranks of one machine. Sent
point to point, each rank gives and takes just what it must: (W-1)/W of the whole, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


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


def start_gather(parts_WN: Tensor, group: dist.ProcessGroup, tag: int) -> Transfers:
    """Every rank of ``group`` must call it. Row r of ``parts`` [W, N] comes from rank r, which has its own in place."""
    rank, peers = group.rank(), _peers(group)
    works = [group.recv([parts_WN[peer]], peer, tag) for peer in peers]
    works += [group.send([parts_WN[rank]], peer, tag) for peer in peers]
    return Transfers(works)


def reduce_scatter(out_N: Tensor, parts_WN: Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """Every rank of ``group`` must call it. ``out`` [N] becomes the sum over ranks of their rows for this rank.

    Summed in the order of ranks, so that results repeat exactly.
    """
    rank, peers = group.rank(), _peers(group)
    arrived_WN = torch.empty_like(parts_WN)
    works = [group.recv([arrived_WN[peer]], peer, tag) for peer in peers]
    works += [group.send([parts_WN[peer]], peer, tag) for peer in peers]
    Transfers(works).wait()
    first, second, *others = [parts_WN[rank] if peer == rank else arrived_WN[peer] for peer in range(group.size())]
    torch.add(first, second, out=out_N)
    for other in others:
        out_N.add_(other)


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of the group, nearest first, so that ranks don't all send to one."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]
