"""The order in which FSDP units are gathered ahead of their use, written out.

FSDP2 would find it by itself, but expert parallelism reads split sizes to the host in every layer, and the gather of
the next unit would only be issued after that.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule


def set_prefetch_order(root: FSDPModule, blocks: Sequence[Sequence[FSDPModule]]) -> None:
    """While one block computes, the next block and its experts are gathered: at most two blocks are whole at a time.

    Args:
        root: the root unit; it prefetches the first block.
        blocks: for each block, in forward order, its unit and those nested in it (experts), in order of use.
    """
    if not blocks:
        return
    root.set_modules_to_forward_prefetch(list(blocks[0]))
    for current, following in zip(blocks[:-1], blocks[1:], strict=True):
        current[0].set_modules_to_forward_prefetch(list(following))
        following[0].set_modules_to_backward_prefetch(list(current))
