"""Grouped matmuls over rows sorted by expert, and a bias for each group.

Shape suffixes: R rows, sorted by local expert; C local experts; N output size; H input size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of ones in a grouped matmul that sums: CUDA's wants strides of 16 bytes, 8 values of 2.
_NUM_ONES = 8
_DENSE = torch.contiguous_format


def grouped_linear(
    x_RH: Tensor, weight: Tensor, offsets_C: Tensor, bias_CN: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """``x[start(e):offsets[e]] @ weight[e].T + bias[e]`` for each local expert e; a group may be empty, so may ``x``.

    Args:
        x_RH: [R, H], R = offsets[-1].
        weight: [C, N, H], same dtype; [C, H, N] if ``is_transposed``, and then ``x @ weight[e]``.
        offsets_C: [C] int32, end of each expert's rows.
        bias_CN: [C, N].

    Returns:
        [R, N]. An expert without rows gets zero gradients, not None. The bias's are sums without atomics: the same bits
        on every run.
    """
    out_RN = F.grouped_mm(x_RH, weight if is_transposed else weight.transpose(-2, -1), offs=offsets_C)
    return out_RN if bias_CN is None else add_group_bias(out_RN, bias_CN, offsets_C)


def add_group_bias(x_RN: Tensor, bias_CN: Tensor, offsets_C: Tensor) -> Tensor:
    """``x[r] + bias[e]`` for each row r of group e: [R, N], dtype of ``x``. Arguments as in ``grouped_linear``."""
    out: Tensor = _AddGroupBias.apply(x_RN, bias_CN, offsets_C)
    return out


class _AddGroupBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RN: Tensor, bias_CN: Tensor, offsets_C: Tensor) -> Tensor:
        ctx.save_for_backward(offsets_C)
        # Row r belongs to the first group that ends behind it.
        row_R = torch.arange(x_RN.size(0), dtype=offsets_C.dtype, device=offsets_C.device)
        group_R = torch.searchsorted(offsets_C, row_R, right=True)
        return x_RN + bias_CN.index_select(0, group_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (offsets_C,) = ctx.saved_tensors
        # Without rows, an expanded gradient counts as contiguous, but its strides are no matrix's.
        grad_RN = grads[0].contiguous() if grads[0].numel() else torch.zeros_like(grads[0], memory_format=_DENSE)
        ones_1R = grad_RN.new_ones(grad_RN.size(0), _NUM_ONES).t()
        grad_bias_CN = F.grouped_mm(ones_1R, grad_RN, offs=offsets_C)[:, 0]
        return grad_RN, grad_bias_CN, None
