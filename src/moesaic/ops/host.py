"""The one place where a device value becomes a Python number: every call is a host synchronisation."""

from __future__ import annotations

import torch

# An operator of its own, so that dispatch modes see the read: recomputation hands out what was read the first time.
torch.library.define("moesaic::copy_to_host", "(Tensor values) -> Tensor")


@torch.library.impl("moesaic::copy_to_host", "CompositeExplicitAutograd")
def copy_to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` in host memory; blocks until the device has computed them."""
    return values.to("cpu", copy=True)


def read_ints(values: torch.Tensor) -> list[list[int]]:
    """Read a 2-D integer tensor to the host; blocks until the device has computed it.

    Callers go through the module (``host.read_ints``), so that a test can count the reads by wrapping this function.
    """
    rows: list[list[int]] = torch.ops.moesaic.copy_to_host(values).tolist()
    return rows


def read_float(value: torch.Tensor) -> float:
    """Read a 0-D tensor to the host; blocks until the device has computed it."""
    return float(value.item())
