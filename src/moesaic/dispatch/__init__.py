"""Bringing tokens to the ranks that hold their experts, and the results back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch.distributed as dist

from moesaic.dispatch.base import Dispatcher, Receipt
from moesaic.dispatch.eager import EagerDispatcher

__all__ = ["DISPATCHERS", "Dispatcher", "Receipt", "build_dispatcher"]

# By name: EP group, experts per rank -> dispatcher. Whatever is here is compared with one process by `make matrix`.
DISPATCHERS: Mapping[str, Callable[[dist.ProcessGroup, int], Dispatcher]] = MappingProxyType({"eager": EagerDispatcher})


def build_dispatcher(name: str, group: dist.ProcessGroup, chunk_size: int) -> Dispatcher:
    """The dispatcher called ``name``, for an EP group whose rank p holds experts ``[p*chunk_size, (p+1)*chunk_size)``.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in DISPATCHERS:
        raise ValueError(f"ep_dispatcher={name!r}: unknown; choose one of {sorted(DISPATCHERS)}.")
    return DISPATCHERS[name](group, chunk_size)
