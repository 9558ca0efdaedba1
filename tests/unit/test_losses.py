"""The loss of whole logits, beside torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.train.losses import token_loss_sum


def draw(dtype: torch.dtype, num_columns: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(2, 9, num_columns, generator=generator)).to(dtype)
    labels = torch.randint(0, num_columns, (2, 9), generator=generator)
    labels[0, 3:6] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype) -> None:
    logits, labels = draw(dtype)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = token_loss_sum(ours, labels)
    expected = F.cross_entropy(theirs.float().flatten(0, 1), labels.flatten(), reduction="sum")
    (loss / 7).backward()
    (expected / 7).backward()
    assert loss.dtype == torch.float32 and abs(loss.item() / expected.item() - 1) < 1e-6
    assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
    # Probabilities are rounded once in another place; in bf16 the gradient itself is rounded to 8 bits.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert (ours.grad.float() - theirs.grad.float()).abs().max() <= tolerance * theirs.grad.float().abs().max()
    assert bool((ours.grad[0, 3:6] == 0).all())


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e4, -3e4], [0.0, 3e4]]], requires_grad=True)
    loss = token_loss_sum(logits, torch.tensor([[0, 0]]))
    loss.backward()
    assert loss.item() == 3e4 and logits.grad is not None
    assert logits.grad.tolist() == [[[0.0, 0.0], [-1.0, 1.0]]]


def test_only_the_logits_are_kept() -> None:
    """In their own type: at a vocabulary of 150,000, log-probabilities in fp32 would be most of a step's memory."""
    logits, labels = draw(torch.bfloat16)
    logits.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_loss_sum(logits, labels)
    large = [tensor for tensor in kept if tensor.numel() == logits.numel()]
    assert [tensor.dtype for tensor in large] == [torch.bfloat16]
    assert large[0].untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_of_no_column_has_no_finite_loss(label: int) -> None:
    logits, labels = draw(torch.float32)
    labels[1, 1] = label
    assert token_loss_sum(logits, labels).isnan()


def test_no_labels_are_no_loss() -> None:
    logits, labels = draw(torch.float32)
    logits.requires_grad_()
    loss = token_loss_sum(logits, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and bool((logits.grad == 0).all())
