"""Permutations of token rows, each with a backward that gathers: no scatter-add, so the same bits on every run.

Shape suffixes: T tokens, K experts per token, S = T*K rows that are sent, R rows received, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.top_k = top_k
        return x_TH.index_select(0, order_S // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_S,) = ctx.saved_tensors
        grad_SH = grads[0].index_select(0, inverse_S)
        return grad_SH.view(-1, ctx.top_k, grad_SH.size(-1)).sum(dim=1), None, None, None


class _ReorderRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse_R), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, weights_TK: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        num_tokens, top_k = weights_TK.shape
        rows_TKH = rows_SH.index_select(0, inverse_S).view(num_tokens, top_k, rows_SH.size(-1))
        ctx.save_for_backward(rows_TKH, weights_TK, order_S)
        dtype = torch.promote_types(rows_SH.dtype, weights_TK.dtype)
        # A tensor of its own, not a squeezed view: FSDP hangs its backward on the experts' output, and an in-place
        # operation on a view (a model's ``out += shared``) would silently drop that.
        out_TH = rows_SH.new_empty(num_tokens, rows_SH.size(-1), dtype=dtype)
        torch.bmm(weights_TK.to(dtype).unsqueeze(1), rows_TKH.to(dtype), out=out_TH.unsqueeze(1))
        return out_TH.to(rows_SH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_TKH, weights_TK, order_S = ctx.saved_tensors
        grad_TH, top_k = grads[0], weights_TK.size(1)
        dtype = torch.promote_types(rows_TKH.dtype, weights_TK.dtype)
        # dL/drow(t, k) = w(t, k) * g(t), written straight in the order in which the rows go back to their experts.
        weights_S1 = weights_TK.to(dtype).reshape(-1, 1).index_select(0, order_S)
        grad_rows_SH = grad_TH.to(dtype).index_select(0, order_S // top_k).mul_(weights_S1).to(rows_TKH.dtype)
        grad_weights_TK = torch.bmm(rows_TKH.to(dtype), grad_TH.to(dtype).unsqueeze(-1)).squeeze(-1)
        return grad_rows_SH, grad_weights_TK.to(weights_TK.dtype), None, None


def invert(order: Tensor) -> Tensor:
    """Inverse of a permutation: ``invert(order)[order[i]] == i``. Shape [N] int64 in and out."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def repeat_rows(x_TH: Tensor, order_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
    """Row ``order[i] // top_k`` of ``x`` at place i: each token once per expert that it chose, in sending order.

    Example, T=2, top_k=2, experts [[1, 0], [0, 2]] (flat: 1 0 0 2), order [1, 2, 0, 3] -> tokens 0 1 0 1.

    Args:
        x_TH: [T, H] floating.
        order_S, inverse_S: [T*K] int64, a permutation of the flat (token, choice) pairs, and its inverse.

    Returns:
        [T*K, H], same dtype.
    """
    out: Tensor = _RepeatRows.apply(x_TH, order_S, inverse_S, top_k)
    return out


def reorder_rows(x_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Row ``order[i]`` of ``x`` at place i; backward applies the inverse. [R, H] and [R] int64 -> [R, H]."""
    out: Tensor = _ReorderRows.apply(x_RH, order_R, inverse_R)
    return out


def weighted_sum(rows_SH: Tensor, weights_TK: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
    """Undo ``repeat_rows`` on the experts' outputs: for each token, the sum of its K rows times their weights.

    Args:
        rows_SH: [T*K, H], in the order that ``repeat_rows`` gave.
        weights_TK: [T, K] floating, differentiable: the router's gradient comes from here.

    Returns:
        [T, H] in the rows' dtype. Products and sums, here and of the gradients, are in the wider of both dtypes:
        weights in fp32 aren't rounded to bf16 rows.
    """
    out: Tensor = _WeightedSum.apply(rows_SH, weights_TK, order_S, inverse_S)
    return out
