"""Optimizer groups and learning rates against their written formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moesaic.config import Recipe, check_recipe
from moesaic.config.recipe import LrSchedulerConfig, OptimConfig
from moesaic.train.optim import build_optimizer, build_scheduler, lr_factor, warmup_steps


def test_linear_course_is_the_documented_example() -> None:
    assert [lr_factor(step, "linear", 2, 6, 0.0) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_and_constant() -> None:
    course = [lr_factor(step, "cosine", 0, 4, 0.2) for step in range(5)]
    assert course == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * p / 4)) / 2 for p in range(5)])
    assert [lr_factor(step, "constant", 2, 4, 0.0) for step in range(4)] == [0.5, 1, 1, 1]


def test_nothing_lies_below_the_minimum_after_the_last_step() -> None:
    assert lr_factor(9, "linear", 0, 4, 0.1) == pytest.approx(0.1)


def test_warmup_only_run_has_no_division_by_zero() -> None:
    assert lr_factor(4, "linear", 4, 4, 0.0) == 1.0


def test_warmup_ratio_wins_and_rounds_up() -> None:
    assert warmup_steps(LrSchedulerConfig(warmup_ratio=0.1, warmup_steps=7), 25) == 3
    assert warmup_steps(LrSchedulerConfig(warmup_steps=7), 25) == 7


def test_scheduler_sets_the_rate_of_each_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimConfig(), learning_rate=2.0)
    scheduler = build_scheduler(optimizer, LrSchedulerConfig(name="linear", warmup_steps=2), num_steps=6)
    rates = []
    for _ in range(6):
        rates.append(scheduler.get_last_lr()[0])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_weight_decay_spares_vectors_and_frozen_parameters_are_left_out() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.5), learning_rate=0.1)
    decay = {id(param): group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    assert decay == {id(model[0].weight): 0.5, id(model[0].bias): 0.0}


def test_a_shard_is_updated_like_the_same_slice_of_the_whole() -> None:
    torch.manual_seed(0)
    whole, gradient = nn.Parameter(torch.randn(37, 19)), torch.randn(37, 19)
    parts = nn.ParameterList([whole[:5].detach().clone(), whole[5:6].detach().clone(), whole[6:].detach().clone()])
    holder = nn.ParameterList([whole])
    config = OptimConfig(weight_decay=0.1)
    optimizers = [build_optimizer(holder, config, 0.01), build_optimizer(parts, config, 0.01)]
    for _ in range(3):
        whole.grad = gradient.clone()
        for part, slice_ in zip(parts, gradient.split([5, 1, 31]), strict=True):
            part.grad = slice_.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())


def test_foreach_computes_what_fused_does() -> None:
    torch.manual_seed(0)
    weights, gradient = torch.randn(5, 4), torch.randn(5, 4)
    results = []
    for implementation in ("fused", "foreach"):
        param = nn.Parameter(weights.clone())
        param.grad = gradient.clone()
        config = OptimConfig(implementation=implementation, weight_decay=0.1)
        optimizer = build_optimizer(nn.ParameterList([param]), config, 0.01)
        assert (
            optimizer.param_groups[0][implementation]
            and sum(bool(optimizer.param_groups[0][name]) for name in ("fused", "foreach")) == 1
        )
        optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_muon_is_refused_because_torch_refuses_stacked_experts() -> None:
    """The day this fails, the recipe's refusal has lost its reason."""
    with pytest.raises(ValueError, match="only supports 2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(4, 3, 2))])
    recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", "optim_config": {"name": "muon"}})
    (problem,) = [problem for problem in check_recipe(recipe) if problem.field == "optim_config.name"]
    assert "stacks" in problem.rule and "adamw" in problem.remedy


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig(), 0.1)
