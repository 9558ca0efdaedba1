"""A checkpoint of several roles: a run that stops and resumes equals one that doesn't, whatever is parked meanwhile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from moesaic.checkpoint import TrainState, load_checkpoint, load_model, save_checkpoint
from moesaic.cli import app
from moesaic.config import Recipe, save_recipe
from moesaic.config.rl_sections import KlConfig
from moesaic.engines.base import Sampling
from moesaic.ops.gather import gather_to_rank_0
from moesaic.ops.parking import build_tier, local_tensor
from moesaic.rl.budget import State, count_resident, optimizer_tensors
from moesaic.rl.kl import KlController
from moesaic.rl.memory import HandOver
from moesaic.rl.roles import Role, Roles, build_roles
from moesaic.rl.rollout_engines import RolloutEngines, build_rollout
from moesaic.rl.state import RlState, load_rl_checkpoint, save_rl_checkpoint
from moesaic.train.setup import start
from moesaic.weights.agree import state_tensors
from tests.dist.test_checkpoint import Counter, seed_everything
from tests.dist.test_rl_memory import UNEVEN, planned, update
from tests.dist.test_rl_roles import rl_recipe
from tests.dist.test_train import read_weights
from tests.pool import RunRanks
from tests.unit.data_tokenizers import build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny


class Remembered:
    """Anything plain that a run keeps: lists of changing length, dicts, text."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.groups = state["groups"]


class Run:
    """A small run of actor, reference and critic, with all that a checkpoint holds."""

    def __init__(self, recipe: Recipe, scratch: Path) -> None:
        start(recipe)
        self.hand_over = HandOver(tier=build_tier("cpu", scratch))
        self.roles: Roles = build_roles(recipe, when_built=self.hand_over.add)
        self.kl = KlController(KlConfig(use="reward", coef=0.1, target=0.5, horizon=10))
        self.state = RlState(
            roles=self.roles, prompts=Counter(), kl=self.kl, rollout=Remembered(), hand_over=self.hand_over
        )

    @property
    def trained(self) -> tuple[Role, Role]:
        assert self.roles.critic is not None
        return self.roles.actor, self.roles.critic

    def steps(self, num: int, rank: int) -> list[float]:
        """Updates whose data comes from the position, and noise from all three generators."""
        noises = []
        for _ in range(num):
            self.state.prompts.index += 1
            noise = torch.rand(()).item() + random.random() + float(numpy.random.rand())
            for role in self.trained:
                self.hand_over.enter(State.TRAIN, role.name)
                update(role, self.state.prompts.index * 4 + rank)
                update(role, int(noise * 1000) + rank)
            self.kl.update(noise, 4)
            self.state.rollout.groups = [{"text": "x" * self.state.prompts.index, "logprobs": [noise, -0.5]}, None]
            noises.append(noise)
        return noises

    def values(self) -> list[Tensor]:
        """This rank's parts of weights and moments, read in each role's turn."""
        found = []
        for role in self.trained:
            self.hand_over.enter(State.TRAIN, role.name)
            tensors = [*state_tensors(role.model).values(), *optimizer_tensors(role.optimizer)]
            found += [local_tensor(each).clone() for each in tensors]
        return found

    def facts(self) -> Any:
        schedulers = [role.scheduler.get_last_lr() for role in self.trained]
        return schedulers, self.kl.coef, self.state.rollout.groups, self.state.prompts.index


def stop_and_resume(rank: int, recipe: Recipe, folder: Path) -> None:
    straight = Run(recipe, folder / "scratch")
    seed_everything(rank)
    straight.steps(2, rank)
    straight.hand_over.enter(State.ASLEEP)
    path = save_rl_checkpoint(folder, straight.state, 2)
    assert straight.hand_over.state is State.ASLEEP and path.name == "step-000002"
    expected = straight.steps(2, rank)

    resumed = Run(recipe, folder / "scratch")
    seed_everything(99)
    resumed.steps(1, rank)
    assert load_rl_checkpoint(path, resumed.state) == 2
    for role in resumed.trained:  # what was loaded is what is parked, and the budget holds
        resumed.hand_over.enter(State.TRAIN, role.name)
        rows = planned(resumed.hand_over.budget(), State.TRAIN, role.name)
        counted = count_resident(resumed.roles.present)
        assert {key: size for key, size in counted.items() if key[1] != "gradients"} == {
            key: size for key, size in rows.items() if key[1] != "gradients"
        }
    assert resumed.steps(2, rank) == expected
    assert resumed.facts() == straight.facts()
    assert all(map(torch.equal, resumed.values(), straight.values()))
    for run in (straight, resumed):
        run.hand_over.close()


@pytest.mark.slow  # `make test` has whole runs that go on in tests/dist/test_rl_run.py
def test_a_resumed_run_equals_one_that_never_stopped(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **UNEVEN)
    run_ranks(stop_and_resume, 4, rl_recipe(tmp_path / "model"), tmp_path)


def save_on_ranks(rank: int, recipe: Recipe, folder: Path) -> list[Tensor]:
    run = Run(recipe, folder / "scratch")
    run.steps(1, rank=0)
    save_rl_checkpoint(folder, run.state, 1)
    return wholes(run)


def wholes(run: Run) -> list[Tensor]:
    """Weights and moments, whole, on rank 0."""
    found: list[Tensor] = []
    for role in run.trained:
        run.hand_over.enter(State.TRAIN, role.name)
        assert role.optimizer is not None
        moments = [role.optimizer.state[param]["exp_avg_sq"] for param in role.model.parameters()]
        for tensor in (*role.model.parameters(), *moments):
            gathered = gather_to_rank_0(tensor.detach())
            found += [] if gathered is None else [gathered.clone()]
    run.hand_over.close()
    return found


def load_elsewhere(rank: int, recipe: Recipe, folder: Path) -> tuple[list[Tensor], int]:
    run = Run(recipe, folder / "scratch")
    step = load_rl_checkpoint(folder / "step-000001", run.state)
    return wholes(run), step


def test_other_topologies_go_on_with_the_same_values(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe", **UNEVEN)
    saved = run_ranks(save_on_ranks, 4, rl_recipe(tmp_path / "model"), tmp_path)[0]
    elsewhere = rl_recipe(
        tmp_path / "model", dist_config={"name": "fsdp2"}, critic={"tp_size": 2, "ep_size": 2}, ref={"ep_size": 1}
    )
    loaded, step = run_ranks(load_elsewhere, 2, elsewhere, tmp_path)[0]
    assert step == 1 and len(loaded) == len(saved) > 20
    assert all(map(torch.equal, loaded, saved))


def save_and_export(rank: int, recipe: Recipe, folder: Path) -> None:
    run = Run(recipe, folder / "scratch")
    run.steps(1, rank)
    save_rl_checkpoint(Path(recipe.output_dir), run.state, 1)
    if rank == 0:
        save_recipe(recipe, Path(recipe.output_dir) / "recipe.yaml")
    run.hand_over.enter(State.TRAIN, "actor")
    gathered = {name: gather_to_rank_0(param.detach()) for name, param in run.roles.actor.model.named_parameters()}
    if rank == 0:
        torch.save(gathered, folder / "actor.pt")
    run.hand_over.close()


def export_by_command(rank: int, checkpoint: Path, out: Path) -> None:
    app(["export", str(checkpoint), str(out)], standalone_mode=False)


def test_an_export_has_the_actors_weights(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "actor", "qwen3_moe")
    build_tokenizer().save_pretrained(tmp_path / "actor")
    save_tiny(tmp_path / "other", "qwen3_moe", num_hidden_layers=1)
    critic = {"dist": "fsdp2", "model": str(tmp_path / "other")}
    recipe = rl_recipe(tmp_path / "actor", output_dir=str(tmp_path / "run"), critic=critic)
    run_ranks(save_and_export, 4, recipe, tmp_path)
    run_ranks(export_by_command, 1, tmp_path / "run" / "step-000001", tmp_path / "out")
    actor, exported = torch.load(tmp_path / "actor.pt"), read_weights(tmp_path / "out")
    assert torch.equal(exported["lm_head.weight"], actor["lm_head.weight"])
    gate, up = actor["model.layers.1.mlp.experts.gate_up_proj"][3].chunk(2)
    assert torch.equal(exported["model.layers.1.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(exported["model.layers.1.mlp.experts.3.up_proj.weight"], up)
    assert not torch.equal(exported["lm_head.weight"], read_weights(tmp_path / "actor")["lm_head.weight"])


def refuse_checkpoints(rank: int, recipe: Recipe, folder: Path) -> list[str]:
    """Without the critic, without plain values, with parts nobody asks for."""
    run = Run(recipe, folder / "scratch")
    alone = replace(run.state, roles=replace(run.roles, critic=None))
    path = save_rl_checkpoint(folder, alone, 1)
    messages = []
    with pytest.raises(ValueError) as caught:
        load_rl_checkpoint(path, run.state)
    messages.append(str(caught.value))
    run.hand_over.close()

    run = Run(recipe, folder / "scratch")
    run.hand_over.enter(State.TRAIN, "actor")
    actor = run.roles.actor
    state = TrainState(model=actor.model, optimizer=actor.optimizer, scheduler=actor.scheduler, data=Counter())
    plain = save_checkpoint(folder, state, 2)
    with pytest.raises(ValueError) as caught:
        load_rl_checkpoint(plain, replace(run.state, roles=replace(run.roles, critic=None)))
    messages.append(str(caught.value))
    # One that has more than is asked for can be gone on with, as supervised training's is.
    run.state.prompts.index = 7
    whole = save_rl_checkpoint(folder, run.state, 3)
    run.hand_over.enter(State.TRAIN, "actor")
    load_model(whole, actor.model)
    assert load_checkpoint(whole, state) == 3 and state.data.state_dict()["index"] == 7
    run.hand_over.close()
    return messages


def test_a_checkpoint_that_lacks_a_role_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    recipe = rl_recipe(tmp_path / "model", ref={"ep_size": 2})
    no_critic, no_plain = run_ranks(refuse_checkpoints, 2, recipe, tmp_path)[0]
    assert "step-000001: has no critic; name one of a run that trained it, too" in no_critic
    assert "step-000002: it is of a run that had no kl, rollout" in no_plain


def save_between_rollouts(rank: int, recipe: Recipe, folder: Path) -> None:
    """A checkpoint written while engines generate leaves them as they were: no sync is needed."""
    run = Run(recipe, folder / "scratch")
    engines: RolloutEngines = build_rollout(recipe, run.roles.actor)
    run.hand_over.add_engines(engines.engines)
    run.steps(1, rank)
    run.hand_over.enter(State.SYNC)
    engines.sync(1)
    run.hand_over.enter(State.ROLLOUT)
    greedy = Sampling(max_tokens=4, temperature=0)
    before = engines.engine.generate([[1, 2, 3]], greedy)
    save_rl_checkpoint(folder, run.state, 1)
    assert run.hand_over.state is State.ROLLOUT
    assert engines.engine.generate([[1, 2, 3]], greedy) == before
    engines.close()
    run.hand_over.close()


def test_saving_between_rollouts_needs_no_sync(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    run_ranks(save_between_rollouts, 2, rl_recipe(tmp_path / "model", ref={"ep_size": 2}), tmp_path)
