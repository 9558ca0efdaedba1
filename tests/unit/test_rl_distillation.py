"""What a student learns from its teacher: both forms by hand, beside whole distributions, and under garbage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from moesaic.config.rl_sections import AlgorithmConfig
from moesaic.rl.advantages import compute_advantages
from moesaic.rl.aggregation import masked_sequence_mean
from moesaic.rl.distillation import forward_kl_topk, reverse_kl_advantages
from moesaic.rl.losses import PolicyTerms, policy_loss
from tests.unit.rl_tables import draw_tables, seeds, spoil


def test_advantages_are_teacher_less_student():
    student_BT, teacher_BT = torch.tensor([[-1.0, -2.0, -5.0, 0.0]]), torch.tensor([[-0.5, -4.0, -1.0, float("nan")]])
    mask_BT = torch.tensor([[1, 1, 1, 0]])
    assert reverse_kl_advantages(student_BT, teacher_BT, mask_BT).tolist() == [[0.5, -2.0, 4.0, 0.0]]
    found = reverse_kl_advantages(student_BT, teacher_BT, mask_BT, clamp=1.0, coef=2.0)
    assert found.tolist() == [[1.0, -2.0, 2.0, 0.0]]


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_the_mean_gradient_is_that_of_the_reverse_divergence(seed):
    """Over everything a student may write, each as often as it does, by any policy loss (here PPO's)."""
    generator = torch.Generator().manual_seed(seed)
    teacher_V, logits_V = (torch.randn(5, generator=generator) for _ in range(2))
    teacher_V = teacher_V.log_softmax(-1)
    exact_V, estimated_V = (logits_V.clone().requires_grad_() for _ in range(2))
    logprobs_V = exact_V.log_softmax(-1)
    (logprobs_V.exp() * (logprobs_V - teacher_V)).sum().backward()

    mask_BT = torch.ones(5, 1, dtype=torch.bool)  # five trajectories of one token, each token once
    student_BT = estimated_V.log_softmax(-1)[:, None]
    rewards_BT = reverse_kl_advantages(student_BT, teacher_V[:, None], mask_BT)
    found = compute_advantages(
        "on_policy_distillation", token_rewards_BT=rewards_BT, mask_BT=mask_BT, groups_B=torch.arange(5)
    )
    terms = PolicyTerms(
        logprobs=student_BT, old_logprobs=student_BT.detach(), advantages=found.advantages_BT, mask=mask_BT,
        sequence_mean=masked_sequence_mean(mask_BT),
    )  # fmt: skip
    (policy_loss("vanilla", terms, AlgorithmConfig()).losses * student_BT.detach().exp()).sum().backward()
    assert torch.allclose(exact_V.grad, estimated_V.grad, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_over_the_whole_vocabulary_it_is_the_divergence_with_its_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    teacher_NV = torch.randn(4, 6, generator=generator).log_softmax(-1)
    logits_NV = torch.randn(4, 6, generator=generator).requires_grad_()
    found = forward_kl_topk(logits_NV.log_softmax(-1), teacher_NV, torch.ones(4))
    found.losses.sum().backward()
    expected = (teacher_NV.exp() * (teacher_NV - logits_NV.log_softmax(-1))).sum(dim=-1)
    assert torch.allclose(found.losses, expected, atol=1e-6)
    assert torch.allclose(logits_NV.grad, logits_NV.softmax(-1).detach() - teacher_NV.exp(), atol=1e-6)
    assert torch.allclose(found.metrics["distillation/teacher_mass"], torch.ones(4))


def test_over_k_tokens_by_hand_cut_at_zero_and_at_the_clamp():
    teacher_NK = torch.tensor([[0.5, 0.3], [0.5, 0.3], [0.6, 0.3]]).log()
    student_NK = torch.tensor([[0.25, 0.3], [0.6, 0.35], [0.001, 0.1]]).log().requires_grad_()
    found = forward_kl_topk(student_NK, teacher_NK, torch.ones(3), clamp=2.0)
    found.losses.sum().backward()
    # The second student has more mass on both than the teacher: cut, without a gradient. The third is over the clamp.
    assert found.losses.tolist() == pytest.approx([0.5 * 0.693147, 0.0, 2.0], rel=1e-5)
    assert torch.allclose(student_NK.grad, torch.tensor([[-0.5, -0.3], [0.0, 0.0], [0.0, 0.0]]))
    assert found.metrics["distillation/student_mass"].tolist() == pytest.approx([0.55, 0.95, 0.101])


def test_garbage_outside_of_the_mask_never_leaks_and_a_ruled_out_token_adds_nothing():
    tables = draw_tables(2)
    mask_BTK = tables.mask_BT[..., None].expand(-1, -1, 3)
    teacher_BTK = torch.randn(mask_BTK.shape, generator=tables.generator).log_softmax(-1)
    student_BTK = torch.randn(mask_BTK.shape, generator=tables.generator).log_softmax(-1)
    clean_BTK, spoilt_BTK = student_BTK.clone().requires_grad_(), spoil(student_BTK, mask_BTK).requires_grad_()
    clean = forward_kl_topk(clean_BTK, teacher_BTK, tables.mask_BT)
    spoilt = forward_kl_topk(spoilt_BTK, spoil(teacher_BTK, mask_BTK), tables.mask_BT)
    clean.losses.sum().backward(), spoilt.losses.sum().backward()
    assert torch.equal(clean.losses, spoilt.losses) and torch.equal(clean_BTK.grad, spoilt_BTK.grad)
    assert clean_BTK.grad[tables.mask_BT].any() and not clean_BTK.grad[~tables.mask_BT].any()
    for name, metric in clean.metrics.items():
        assert torch.equal(metric, spoilt.metrics[name]) and not metric[~tables.mask_BT].any()
    student = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    one = forward_kl_topk(student, torch.tensor([[0.0, float("-inf")]]), torch.ones(1))
    one.losses.sum().backward()
    assert one.losses.tolist() == [1.0] and student.grad.tolist() == [[-1.0, 0.0]]
