"""Permutations of rows: what the docstrings' examples say, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from moesaic.ops.grouped_mm import add_group_bias, grouped_linear
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


def test_weights_in_fp32_are_not_rounded_to_bf16_rows() -> None:
    """As in transformers' own experts: 256 * (1 + 2^-10) - 256 * 1 is 0.25; in bf16, both weights would be 1."""
    rows = torch.tensor([[256.0], [-256.0]], dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([[1 + 2**-10, 1.0]], requires_grad=True)
    out = weighted_sum(rows, weights, torch.arange(2), torch.arange(2))
    assert out.dtype == torch.bfloat16 and out.item() == 0.25
    (3 * out).sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.float32
    assert weights.grad.tolist() == [[768.0, -768.0]]
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16 and rows.grad.tolist() == [[3.0], [3.0]]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_group_gets_its_own_bias(dtype: torch.dtype, is_transposed: bool) -> None:
    x, weight, bias = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((5, 8), (3, 16, 8), (3, 16)))
    given = weight.transpose(1, 2).contiguous() if is_transposed else weight
    out = grouped_linear(x, given, torch.tensor([2, 2, 5], dtype=torch.int32), bias, is_transposed)
    expected = torch.cat([x[:2] @ weight[0].T + bias[0], x[2:] @ weight[2].T + bias[2]])
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, weight, bias), upstream)
    for ours_one, theirs in zip(ours, torch.autograd.grad(expected, (x, weight, bias), upstream), strict=True):
        torch.testing.assert_close(ours_one, theirs)
    assert (ours[2][1] == 0).all()


def test_biases_without_any_rows_get_zero_gradients() -> None:
    bias = torch.randn(3, 16, requires_grad=True)
    x = torch.empty(0, 16, requires_grad=True)
    add_group_bias(x, bias, torch.zeros(3, dtype=torch.int32)).sum().backward()
    assert bias.grad is not None and (bias.grad == 0).all() and bias.grad.shape == (3, 16)
