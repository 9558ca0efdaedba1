"""Which transport weights travel by: what the devices of all its processes allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moesaic.reshard.device_transports import NcclTransport, SharedTransport, describe_place
from moesaic.reshard.transports import GlooTransport, PeerFailed, open_store
from moesaic.runtime import BACKENDS

logger = logging.getLogger(__name__)


def connect_transport(
    store: dist.Store | str,
    process: int,
    num_processes: int,
    device: torch.device,
    timeout_s: float = 60.0,
    *,
    name: str = "reshard",
) -> GlooTransport:
    """Meet the other processes, by the fastest way that all their devices have. Every one must call it.

    Args:
        store, num_processes, timeout_s, name: as ``GlooTransport.connect``.
        device: on which this process's weights lie (host memory where they are parked there for good).

    Raises:
        ValueError: ``process`` or ``name`` don't fit.
        PeerFailed: not all came in time.
    """
    if not 0 <= process < num_processes:
        raise ValueError(f"process={process}: must be 0 to num_processes - 1 = {num_processes - 1}.")
    if isinstance(store, str):
        store = open_store(store, process == 0, timeout_s)
    meeting = dist.PrefixStore(f"{name}/places", store)
    meeting.set(str(process), describe_place(device))
    everyone = [str(peer) for peer in range(num_processes)]
    try:
        meeting.wait(everyone, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # what torch raises after the time-out
        missing = [peer for peer in range(num_processes) if not meeting.check([str(peer)])]
        raise PeerFailed(
            f"process {process}: not all of {num_processes} processes came to {name!r} within {timeout_s:g} s; "
            f"missing: {missing}."
        ) from error
    kind = choose_transport(
        [place.decode() for place in meeting.multi_get(everyone)], has_nccl=dist.is_nccl_available()
    )
    logger.info("%s: weights travel between %d processes by %s", name, num_processes, kind.__name__)
    if issubclass(kind, SharedTransport):
        return kind.connect_device(store, process, num_processes, device, timeout_s, name=name)
    return kind.connect(store, process, num_processes, timeout_s, name=name)


def choose_transport(places: Sequence[str], *, has_nccl: bool) -> type[GlooTransport]:
    """The same on every process, from ``describe_place`` of all.

    Memory of the host anywhere, or devices without NCCL: through the host, by gloo. All on one device: they share its
    memory. Else NCCL, which shares memory between those on one device.
    """
    kinds = {place.partition("/")[0] for place in places}
    if "cpu" in kinds:
        return GlooTransport
    if len(set(places)) == 1:
        return SharedTransport
    return NcclTransport if has_nccl and {BACKENDS.get(kind) for kind in kinds} == {"nccl"} else GlooTransport
