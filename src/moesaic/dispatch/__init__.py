"""Bringing tokens to the ranks that hold their experts, and the results back."""

from __future__ import annotations

import torch.distributed as dist

from moesaic.dispatch.base import Dispatcher, Receipt
from moesaic.dispatch.eager import EagerDispatcher

__all__ = ["Dispatcher", "Receipt", "build_dispatcher"]


def build_dispatcher(name: str, group: dist.ProcessGroup, chunk_size: int) -> Dispatcher:
    """The dispatcher called ``name``, for an EP group whose rank p holds experts ``[p*chunk_size, (p+1)*chunk_size)``.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    dispatchers = {"eager": EagerDispatcher}
    if name not in dispatchers:
        raise ValueError(f"ep_dispatcher={name!r}: unknown; choose one of {sorted(dispatchers)}.")
    return dispatchers[name](group, chunk_size)
