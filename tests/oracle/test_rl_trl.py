"""A few GRPO updates of TRL's ``GRPOTrainer`` on a tiny Qwen3-MoE, frozen by ``tools/trl_steps.py``, and ours.

The same first weights, prompts, completions and rewards through roles, advantages, old log-probabilities and updates,
on one rank and on four: every weight within 1e-5 of its tensor's largest. ``dapo``: two rollouts, one update each, with
clipped gradients. ``grpo``: two epochs over each of two rollouts, with ratios that are clipped, beside a reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.config import Recipe
from moesaic.rl.advantages import compute_advantages
from moesaic.rl.forward import compute_columns
from moesaic.rl.roles import build_roles
from moesaic.rl.types import Experience, Prompt, Trajectory
from moesaic.rl.update import update_actor
from moesaic.train.setup import start
from moesaic.weights.export import export_hf
from tests.pool import RunRanks
from tools.vectors import Case, load_vectors, relative_error

FILE = Path(__file__).parent.parent / "unit" / "vectors" / "trl_steps.safetensors"
# Seen: 3e-7. The smallest of what a wrong setting does to the weights (no KL at all): 9e-4.
TOLERANCE = 1e-5
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {"dist_config": {"name": "fsdp2"}, "micro_batch_size": 3}),
    "ep2 efsdp2": (4, {"dist_config": {"name": "moesaic", "ep_size": 2}, "micro_batch_size": 2}),
}
# TRL's loss: our aggregation, estimator, estimator of KL.
LOSSES = {"dapo": ("token-mean", "dr_grpo"), "grpo": ("seq-mean-token-mean", "grpo")}


def save_first(case: Case, folder: Path) -> None:
    """The model that the updates begin with."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.options["model"]))
    save_file(weights_of(case.inputs, "first"), folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(tensors: Any, when: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{when}."): tensor for name, tensor in tensors.items() if name.startswith(f"{when}.")}


def recipe_of(case: Case, folder: Path, topology: dict[str, Any]) -> Recipe:
    """TRL's settings of the run, in our recipe."""
    options = case.options
    aggregation, estimator = LOSSES[options["loss_type"]]
    uses_kl = options["beta"] > 0
    return Recipe.model_validate(
        {
            "stage": "rl",
            "model": str(folder),
            "train_dataset": {"path": "unused"},
            "bf16": False,
            "learning_rate": options["learning_rate"],
            "optim_config": {"name": "adamw", "eps": options["adam_epsilon"]},
            "max_grad_norm": options["max_grad_norm"] or None,
            "max_steps": 2,
            "algorithm": {
                "adv_estimator": estimator,
                "loss_agg_mode": aggregation,
                "clip_ratio_low": options["epsilon"],
                "clip_ratio_high": options["epsilon_high"],
                "clip_ratio_c": None,
                "ppo_epochs": options["num_iterations"],
            },
            "kl_config": {"use": "loss", "estimator": "k3", "coef": options["beta"]} if uses_kl else {"use": "off"},
            **topology,
        }
    )


def experience_of(case: Case, number: int) -> Experience:
    """A rollout's trajectories: four prompts, four completions each."""
    inputs = case.inputs
    trajectories = []
    for group, completions in enumerate(inputs["completions"][number]):
        tokens = inputs["prompts"][group, : inputs["prompt_lengths"][group]].tolist()
        prompt = Prompt(number=group, tokens=tuple(tokens), text="", row={})
        for index, row in enumerate(completions):
            length = int(inputs["completion_lengths"][number, group, index])
            trajectory = Trajectory(
                prompt=prompt,
                group=group,
                index=index,
                tokens=tuple(row[:length].tolist()),
                is_model=(True,) * length,
                logprobs=(0.0,) * length,
                versions=(number,) * length,
                finish_reason="length",
            )
            trajectories.append(trajectory)
    return Experience.of(trajectories)


def rewards_on_last_tokens(case: Case, number: int, experience: Experience) -> Tensor:
    rewards = case.inputs["rewards"][number].flatten() * case.options["reward_scale"]
    return experience.table(
        [
            [0.0] * (len(each.tokens) - 1) + [float(reward)]
            for each, reward in zip(experience.trajectories, rewards, strict=True)
        ]
    )


def train(rank: int, recipe: Recipe, case: Case, out: Path) -> list[float]:
    """All rollouts' updates; the actor's last weights go to ``out``. The gradient norms, a mean for each rollout."""
    start(recipe)
    roles = build_roles(recipe)
    norms = []
    for number in range(len(case.inputs["completions"])):
        experience = experience_of(case, number)
        columns = {"old_logprobs": compute_columns(roles.actor, experience, ["logprobs"])["logprobs"]}
        if roles.ref is not None:
            columns["ref_logprobs"] = compute_columns(roles.ref, experience, ["logprobs"])["logprobs"]
        advantages = compute_advantages(
            recipe.algorithm.adv_estimator,
            token_rewards_BT=rewards_on_last_tokens(case, number, experience),
            mask_BT=experience.mask_BT,
            groups_B=experience.groups_B,
        ).advantages_BT
        experience = experience.with_columns(advantages=advantages, **columns)
        metrics = update_actor(roles.actor, experience, experience.mask_BT)
        assert metrics["actor/num_skipped"] == 0
        norms.append(metrics["actor/grad_norm"])
    export_hf(roles.actor.model, out)
    return norms


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_updates_are_trls(name: str, topology: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    case = load_vectors(FILE).of_kind("steps")[name]
    world_size, sizes = TOPOLOGIES[topology]
    save_first(case, tmp_path / "first")
    recipe = recipe_of(case, tmp_path / "first", sizes)
    norms = run_ranks(train, world_size, recipe, case, tmp_path / "last")[0]
    expected_norms = case.outputs["grad_norms"].view(len(norms), -1).mean(dim=1)
    assert relative_error(torch.tensor(norms), expected_norms) <= TOLERANCE, (norms, expected_norms)
    found = {}
    for file in sorted((tmp_path / "last").glob("*.safetensors")):
        found |= load_file(file)
    first, last = weights_of(case.inputs, "first"), weights_of(case.outputs, "last")
    assert found.keys() == first.keys() == last.keys()
    errors = {key: relative_error(found[key], last[key]) for key in last}
    assert max(errors.values()) <= TOLERANCE, {key: error for key, error in errors.items() if error > TOLERANCE}
    # What the updates did to each is far larger than what they may be off by.
    assert min(relative_error(first[key], last[key]) for key in last) > 100 * TOLERANCE
