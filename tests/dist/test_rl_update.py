"""What updates leave out, count and move once, and that routers are trained beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.rl.batches import mini_batches
from moesaic.rl.forward import compute_columns
from moesaic.rl.roles import Role
from moesaic.rl.types import Experience
from moesaic.rl.update import update_actor
from moesaic.train.router import RouterOptions, build_router_training
from tests.oracle.cells import full
from tests.oracle.reference import Case, load_reference
from tests.oracle.rl_reference import RlCase, draw_experience
from tests.pool import RunRanks

CASE = RlCase(temperature=1.0)


def build_actor(folder: Path, **fields: Any) -> tuple[Role, LambdaLR]:
    meshes = build_meshes("cpu")
    model = from_pretrained(folder, meshes, attn_implementation="sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    recipe = CASE.recipe(folder, micro_batch_size=2, **fields)
    role = Role(
        name="actor",
        recipe=recipe,
        meshes=meshes,
        model=model,
        optimizer=cast(Optimizer, optimizer),
        scheduler=scheduler,
    )
    return role, scheduler


def build_experience(role: Role) -> tuple[Experience, Tensor]:
    experience, mask_BT = draw_experience(0)
    columns = compute_columns(role, experience, ("logprobs", "entropy"))
    advantages = torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(0))
    return (
        experience.with_columns(
            old_logprobs=columns["logprobs"], entropy=columns["entropy"], advantages=advantages * mask_BT
        ),
        mask_BT,
    )


def weights_of(role: Role) -> dict[str, Tensor]:
    return {name: full(param) for name, param in role.model.named_parameters()}


def rows_of_update(role: Role, experience: Experience, number: int) -> list[int]:
    """Trajectories of an update of the only epoch, a group each."""
    return list(mini_batches(experience, 1)[number])


def skip_one(rank: int, folder: Path) -> tuple[dict[str, float], float, bool]:
    """Metrics, the learning rate afterwards, and whether weights are those of the other updates alone."""
    role, scheduler = build_actor(folder, ppo_mini_batch_size=1)
    experience, mask_BT = build_experience(role)
    rows = rows_of_update(role, experience, 1)
    spoilt = experience.columns["advantages"].clone()
    (row,) = (row for row in rows if mask_BT[row].sum() == 1)  # one token, which one rank has
    spoilt[row] = torch.where(mask_BT[row], float("inf"), spoilt[row])
    metrics = update_actor(role, experience.with_columns(advantages=spoilt), mask_BT)
    found = weights_of(role)

    other, _ = build_actor(folder, ppo_mini_batch_size=1)
    rejected_BT = mask_BT.clone()
    rejected_BT[rows] = False
    without = update_actor(other, experience, rejected_BT)
    assert without["actor/num_skipped"] == 0, "an update without a trained token is none, and is not counted"
    expected = weights_of(other)
    is_same = all(torch.equal(found[name], expected[name]) for name in found)
    kept = {name: value for name, value in metrics.items() if name != "actor/num_skipped"}
    assert kept == {name: without[name] for name in kept}
    return metrics, float(scheduler.get_last_lr()[0]), is_same


def test_an_update_that_is_not_finite_moves_nothing(run_ranks: RunRanks, reference_root: Path) -> None:
    folder = load_reference(Case(), reference_root).folder
    for metrics, lr, is_same in run_ranks(skip_one, 2, folder):
        assert metrics["actor/num_skipped"] == 1 and is_same
        assert metrics["actor/lr"] == 0.1 and lr == 0.05, "once for all updates of the step"
        assert all(abs(value) < float("inf") for value in metrics.values())


def spoil_all(rank: int, folder: Path) -> tuple[dict[str, float], float, bool]:
    role, scheduler = build_actor(folder)
    before = weights_of(role)
    experience, mask_BT = build_experience(role)
    spoilt = torch.where(mask_BT, float("nan"), experience.columns["advantages"])
    metrics = update_actor(role, experience.with_columns(advantages=spoilt), mask_BT)
    after = weights_of(role)
    is_unmoved = all(torch.equal(before[name], after[name]) for name in before)
    return metrics, float(scheduler.get_last_lr()[0]), is_unmoved


def test_all_updates_may_be_skipped(run_ranks: RunRanks, reference_root: Path) -> None:
    folder = load_reference(Case(), reference_root).folder
    for metrics, lr, is_unmoved in run_ranks(spoil_all, 2, folder):
        assert metrics == {"actor/lr": 0.1, "actor/num_skipped": 1.0} and is_unmoved and lr == 0.1


def count_updates(rank: int, folder: Path) -> tuple[dict[str, float], float]:
    """Metrics of three updates, and the mean of their mean entropies: a column, which no update changes."""
    role, _ = build_actor(folder, ppo_mini_batch_size=1)
    experience, mask_BT = build_experience(role)
    entropy_BT = experience.columns["entropy"]
    chosen = [rows_of_update(role, experience, number) for number in range(3)]
    means = [entropy_BT[rows][mask_BT[rows]].mean().item() for rows in chosen]
    return update_actor(role, experience, mask_BT), sum(means) / len(means)


def test_metrics_are_means_over_updates(run_ranks: RunRanks, reference_root: Path) -> None:
    folder = load_reference(Case(), reference_root).folder
    for metrics, expected in run_ranks(count_updates, 2, folder):
        assert metrics["actor/entropy"] == pytest.approx(expected, rel=1e-6)


def modes(rank: int, folder: Path) -> tuple[list[bool], list[bool]]:
    """Whether the model was in training mode: in forwards of a table and of an update, and after each."""
    role, _ = build_actor(folder, micro_batch_tokens=128)
    experience, mask_BT = draw_experience(0)
    heard: list[bool] = []
    role.model.register_forward_pre_hook(lambda module, _: heard.append(module.training))
    after = []
    for was_training in (True, False):
        role.model.train(was_training)
        columns = compute_columns(role, experience, ("logprobs",))
        after.append(role.model.training)
    experience = experience.with_columns(old_logprobs=columns["logprobs"], advantages=torch.ones(mask_BT.shape))
    update_actor(role, experience, mask_BT)
    return heard, after


def test_tables_are_made_in_evaluation_mode_and_updates_in_training_mode(
    run_ranks: RunRanks, reference_root: Path
) -> None:
    folder = load_reference(Case(), reference_root).folder
    assert run_ranks(modes, 1, folder) == [([False, False, True], [True, False])]


def first_ratio(rank: int, folder: Path) -> dict[str, float]:
    role, _ = build_actor(folder)
    other = replace(role, recipe=role.recipe.model_copy(update={"micro_batch_size": 3}))
    experience, mask_BT = build_experience(other)
    return update_actor(role, experience, mask_BT)


def test_the_first_update_is_on_policy(run_ranks: RunRanks, reference_root: Path) -> None:
    """Its log-probabilities are the old ones, though the old ones come from another mode and another cut."""
    folder = load_reference(Case(), reference_root).folder
    for metrics in run_ranks(first_ratio, 2, folder):
        assert abs(metrics["actor/ppo_kl"]) < 1e-6 and metrics["actor/pg_clipfrac"] == 0
        assert metrics["actor/entropy"] > 1 and metrics["actor/grad_norm"] > 0


def train_routers(rank: int, folder: Path, coefficient: float) -> tuple[float, Tensor]:
    role, _ = build_actor(folder, max_grad_norm=None)
    experience, mask_BT = build_experience(role)
    router = build_router_training(role.model, RouterOptions(aux_loss_coef=coefficient), role.meshes)
    update_actor(role, experience, mask_BT, router=router)
    (name,) = (name for name in weights_of(role) if name.endswith("layers.0.mlp.gate.weight"))
    return (0.0 if router is None else router.measure()["aux_loss"]), weights_of(role)[name]


def test_routers_are_trained_beside_the_policy(run_ranks: RunRanks, reference_root: Path) -> None:
    """By one loss of the whole update, however it is cut: into four micro-batches of one rank, or two of two."""
    folder = load_reference(Case(), reference_root).folder
    without, beside = (run_ranks(train_routers, 2, folder, coefficient)[0] for coefficient in (0.0, 1.0))
    assert beside[0] > 1 and not torch.equal(without[1], beside[1])
    alone = run_ranks(train_routers, 1, folder, 1.0)[0]
    assert beside[0] == pytest.approx(alone[0], rel=1e-6)
    torch.testing.assert_close(beside[1], alone[1], rtol=0, atol=1e-5 * alone[1].abs().max().item())


def missing_columns(rank: int, folder: Path) -> str:
    role, _ = build_actor(folder)
    experience, mask_BT = draw_experience(0)
    with pytest.raises(AssertionError) as error:
        update_actor(role, experience, mask_BT)
    beyond = torch.ones_like(mask_BT)
    columns = {"old_logprobs": torch.zeros(beyond.shape), "advantages": torch.zeros(beyond.shape)}
    with pytest.raises(AssertionError, match="tokens that the model didn't write"):
        update_actor(role, experience.with_columns(**columns), beyond)
    with pytest.raises(AssertionError, match="is not trained"):
        update_actor(replace(role, optimizer=None), experience.with_columns(**columns), mask_BT)
    return str(error.value)


def test_what_an_update_needs(run_ranks: RunRanks, reference_root: Path) -> None:
    folder = load_reference(Case(), reference_root).folder
    assert "no ['old_logprobs', 'advantages'], but ['rollout_logprobs']" in run_ranks(missing_columns, 1, folder)[0]
