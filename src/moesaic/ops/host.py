"""The one place where a device value becomes a Python number: every call is a host synchronisation."""

from __future__ import annotations

import torch


def read_ints(values: torch.Tensor) -> list[list[int]]:
    """Read a 2-D integer tensor to the host; blocks until the device has computed it.

    Callers go through the module (``host.read_ints``), so that a test can count the reads by wrapping this function.
    """
    rows: list[list[int]] = values.tolist()
    return rows


def read_float(value: torch.Tensor) -> float:
    """Read a 0-D tensor to the host; blocks until the device has computed it."""
    return float(value.item())
