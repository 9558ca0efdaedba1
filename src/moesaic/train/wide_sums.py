"""Gradients of parameters that are stored in bf16, added up over micro-batches in fp32.

FSDP reduces each micro-batch's gradients in fp32 and then adds them up in the parameters' own dtype. In bf16 a sum
stops growing where it is 256 times as large as what is added to it: with 64 micro-batches, gradients were five times as
far from the true ones as the rounding of each makes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WideSums:
    """Takes each micro-batch's gradients away (``add``), and gives back their sums (``give_back``). Not collective.

    Args:
        params: sharded or plain; those in fp32 are left alone.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = [param for param in params if param.dtype != torch.float32]
        self._sums: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # a gradient to give back, its sum so far

    def add(self) -> None:
        """After a micro-batch's backward."""
        for param in self._params:
            grad = param.grad
            if grad is None:
                continue
            if param in self._sums:
                self._sums[param][1].add_(_local(grad))
            else:
                self._sums[param] = (grad, _local(grad).float())
            param.grad = None

    def give_back(self) -> None:
        """After the last one."""
        for param, (grad, total) in self._sums.items():
            _local(grad).copy_(total)
            param.grad = grad


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
