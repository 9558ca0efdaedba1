"""Whole runs whose ranks share sequences and matrices: as one rank's, and resumed by another topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.config import MoesaicConfig, Recipe, check_recipe
from tests.dist.test_train import read_metrics, read_weights, recipe_of, source, train_on_rank
from tests.oracle.cells import TOLERANCES
from tests.pool import RunRanks

__all__ = ["source"]  # the fixture

ND = {"cp_size": 2, "tp_size": 2, "dist_config": MoesaicConfig(name="moesaic", ep_size=4)}
ALONE = {"dist_config": MoesaicConfig(name="moesaic")}
# Whole rows of 64 positions in parts of 32, shared by 2 ranks each: 3 of 8 rows an epoch are filled up.
COMMON = {"packing": True, "global_batch_size": 2, "micro_batch_size": 2, "max_steps": 4, "cutoff_len": 30}
COMMON |= {"optim_config": {"eps": 1e-4}, "router_config": {"aux_loss_coef": 0.01}}

# Of losses and norms over four steps, each of which begins where rounding has moved the one before: that of a gradient.
BOUND = TOLERANCES["grads"]


def losses_of(folder: Path) -> dict[str, list[float]]:
    steps, held_out = read_metrics(folder, "train"), read_metrics(folder, "eval")
    return {
        "loss": [line["loss"] for line in steps],
        "norm": [line["grad_norm"] for line in steps],
        "aux": [line["router"]["aux_loss"] for line in steps],
        "tokens": [line["num_loss_tokens"] for line in steps],
        "held-out": [line["loss"] for line in held_out],
    }


def worst_difference(one: Path, other: Path) -> float:
    a, b = read_weights(one / "export"), read_weights(other / "export")
    assert a.keys() == b.keys() and len(a) > 20
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)


def recipe_on(source: Path, folder: Path, world_size: int, **fields: Any) -> Recipe:
    recipe = recipe_of(source, folder, **{**COMMON, **fields})
    assert check_recipe(recipe, world_size) == []
    return recipe


def test_a_run_of_shared_sequences_is_one_ranks_and_goes_on_elsewhere(
    run_ranks: RunRanks, source: Path, tmp_path: Path
) -> None:
    run_ranks(train_on_rank, 1, recipe_on(source, tmp_path / "alone", 1, **ALONE))
    run_ranks(train_on_rank, 4, recipe_on(source, tmp_path / "nd", 4, **ND))
    alone, shared = losses_of(tmp_path / "alone"), losses_of(tmp_path / "nd")
    for quantity, values in alone.items():
        assert shared[quantity] == pytest.approx(values, rel=BOUND), quantity
    assert worst_difference(tmp_path / "nd", tmp_path / "alone") < TOLERANCES["adamw"]
    assert json.loads((tmp_path / "nd" / "environment.json").read_text())["world_size"] == 4

    # From the shared run's second step: on two ranks that share nothing, and on two that share matrices.
    elsewhere: dict[str, dict[str, Any]] = {
        "ep": {"dist_config": MoesaicConfig(name="moesaic", ep_size=2), "micro_batch_size": 1},
        "tp": {"tp_size": 2, "dist_config": MoesaicConfig(name="moesaic", ep_size=2)},
    }
    for name, fields in elsewhere.items():
        start = {"resume_from_checkpoint": str(tmp_path / "nd" / "step-000002")}
        run_ranks(train_on_rank, 2, recipe_on(source, tmp_path / name, 2, **fields, **start))
        resumed = losses_of(tmp_path / name)
        assert resumed["loss"] == pytest.approx(alone["loss"][2:], rel=BOUND), name
        assert worst_difference(tmp_path / name, tmp_path / "alone") < TOLERANCES["adamw"], name


@pytest.mark.slow
def test_a_resumed_run_of_shared_sequences_repeats_it_bit_for_bit(
    run_ranks: RunRanks, source: Path, tmp_path: Path
) -> None:
    run_ranks(train_on_rank, 4, recipe_on(source, tmp_path / "straight", 4, **ND))
    start = {"resume_from_checkpoint": str(tmp_path / "straight" / "step-000002")}
    run_ranks(train_on_rank, 4, recipe_on(source, tmp_path / "resumed", 4, **ND, **start))
    a, b = read_weights(tmp_path / "straight" / "export"), read_weights(tmp_path / "resumed" / "export")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
