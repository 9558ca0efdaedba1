"""Gradients of bf16 parameters are added up in fp32."""

from __future__ import annotations

import torch
from torch import nn

from moesaic.train.wide_sums import WideSums


def test_a_long_sum_goes_on_growing() -> None:
    """In bf16, 256 + 1 is 256."""
    stored, wide = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))
    unused = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = WideSums([stored, wide, unused])
    for _ in range(512):
        (stored.float().sum() + wide.sum()).backward()
        sums.add()
        assert stored.grad is None
    sums.give_back()
    assert stored.grad is not None and stored.grad.dtype == torch.bfloat16 and stored.grad.tolist() == [512.0] * 3
    assert wide.grad is not None and wide.grad.tolist() == [512.0] * 3 and unused.grad is None
