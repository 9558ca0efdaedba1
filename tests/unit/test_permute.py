"""Permutations of rows: what the docstrings' examples say, and their gradients."""

from __future__ import annotations

import torch
from torch.autograd import gradcheck

from moesaic.ops.grouped_mm import grouped_linear
from moesaic.ops.permute import invert, reorder_rows, repeat_rows, weighted_sum


def test_repeat_rows_gives_the_documented_example() -> None:
    experts_TK = torch.tensor([[1, 0], [0, 2]])
    order = torch.argsort(experts_TK.flatten(), stable=True)
    assert order.tolist() == [1, 2, 0, 3]
    rows = repeat_rows(torch.tensor([[10.0], [20.0]]), order, invert(order), 2)
    assert rows.flatten().tolist() == [10, 20, 10, 20]


def test_weighted_sum_undoes_repeat_rows() -> None:
    x_TH, order = torch.randn(5, 3), torch.randperm(10)
    weights_TK = torch.rand(5, 2)
    rows = repeat_rows(x_TH, order, invert(order), 2)
    expected = x_TH * weights_TK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weighted_sum(rows, weights_TK, order, invert(order)), expected)


def test_the_output_is_no_view() -> None:
    """FSDP hangs its backward on the experts' output, which an in-place operation on a view would drop."""
    out = weighted_sum(torch.randn(4, 3, requires_grad=True), torch.rand(2, 2), torch.arange(4), torch.arange(4))
    assert not out._is_view()
    out += 1.0


def test_gradients() -> None:
    torch.manual_seed(0)
    order = torch.randperm(8)
    inverse = invert(order)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: repeat_rows(x, order, inverse, 2), (x,))
    assert gradcheck(lambda rows: reorder_rows(rows, order, inverse), (rows,))
    assert gradcheck(lambda rows, weights: weighted_sum(rows, weights, order, inverse), (rows, weights))


def test_no_tokens_at_all() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    x = torch.empty(0, 3, requires_grad=True)
    out = weighted_sum(repeat_rows(x, empty, empty, 2), torch.empty(0, 2), empty, empty)
    out.sum().backward()
    assert out.shape == (0, 3) and x.grad is not None and x.grad.shape == (0, 3)


def test_an_expert_without_rows_gets_a_zero_gradient() -> None:
    weight = torch.randn(3, 4, 8, requires_grad=True)
    rows = torch.randn(5, 8)
    out = grouped_linear(rows, weight, torch.tensor([2, 2, 5], dtype=torch.int32))
    torch.testing.assert_close(out, torch.cat([rows[:2] @ weight[0].T, rows[2:] @ weight[2].T]))
    out.square().sum().backward()
    assert weight.grad is not None and (weight.grad[1] == 0).all() and (weight.grad[0] != 0).any()
