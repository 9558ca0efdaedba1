"""The recipe of each role: what its section says, over what the recipe says."""

from __future__ import annotations

import pytest

from moesaic.config import Fsdp2Config, FsdpTurboConfig, MoesaicConfig, Recipe, resolve_sizes
from moesaic.config.roles import role_recipe, role_section


def build_recipe(**fields: object) -> Recipe:
    return Recipe.model_validate({"model": "m", "train_dataset": "d", "stage": "rl", **fields})


def test_a_role_without_a_word_of_its_own_is_as_the_recipe() -> None:
    recipe = build_recipe(dp_size=2, cp_size=2, dist_config={"name": "moesaic", "ep_size": 2}, master_dtype="bf16")
    for role in ("actor", "ref", "critic", "teacher"):
        assert role_recipe(recipe, role) == recipe.model_copy(update={"cutoff_len": 1024})


def test_what_a_role_says_goes_before_the_recipe() -> None:
    recipe = build_recipe(
        dp_size=4,
        mp_shard_size=4,
        activation_checkpointing=True,
        exchanged_tokens="recompute",
        micro_batch_tokens=4096,
        learning_rate=1e-6,
        dist_config={"name": "moesaic", "ep_size": 4, "ep_dispatcher": "eager"},
        rollout={"max_prompt_length": 100, "sampling": {"max_tokens": 28}},
        critic={
            "model": "small",
            "tp_size": 2,
            "ep_size": 2,
            "activation_checkpointing": False,
            "reshard_after_forward": False,
            "ppo_micro_batch_size_per_gpu": 3,
            "learning_rate": 1e-5,
        },
    )
    critic = role_recipe(recipe, "critic")
    assert (critic.model, critic.tp_size, critic.ep_size, critic.learning_rate) == ("small", 2, 2, 1e-5)
    assert (critic.micro_batch_size, critic.micro_batch_tokens, critic.cutoff_len) == (3, None, 128)
    assert (critic.activation_checkpointing, critic.reshard_after_forward) == (False, False)
    assert (critic.exchanged_tokens, recipe.exchanged_tokens) == ("keep", "recompute")
    assert (critic.dp_size, critic.mp_shard_size) == (None, None), "they were of tp_size 1"
    assert resolve_sizes(critic, 4).dp_size == 2
    assert role_recipe(recipe, "ref").learning_rate == 1e-6
    tokens = role_recipe(build_recipe(micro_batch_size=4, ref={"micro_batch_tokens": 99}), "ref")
    assert (tokens.micro_batch_size, tokens.micro_batch_tokens) == (1, 99)


@pytest.mark.parametrize(
    ("of_recipe", "of_role", "expected"),
    [
        ({"name": "fsdp2"}, {}, Fsdp2Config(name="fsdp2")),
        ({"name": "fsdp2"}, {"ep_size": 4}, MoesaicConfig(name="moesaic", ep_size=4)),
        ({"name": "fsdp2"}, {"dist": "moesaic"}, MoesaicConfig(name="moesaic")),
        ({"name": "moesaic", "ep_size": 4}, {"dist": "fsdp2"}, Fsdp2Config(name="fsdp2")),
        (
            {"name": "moesaic", "ep_size": 4, "edp_size": 2},
            {"ep_size": 2},
            MoesaicConfig(name="moesaic", ep_size=2, edp_size=2),
        ),
        (
            {"name": "moesaic", "ep_size": 4},
            {"dist": "moesaic", "edp_size": 2},
            MoesaicConfig(name="moesaic", ep_size=4, edp_size=2),
        ),
        ({"name": "fsdpturbo", "ep_size": 4}, {"ep_size": 2}, FsdpTurboConfig(name="fsdpturbo", ep_size=2)),
        (
            {"name": "moesaic", "ep_size": 4, "fsdp_implementation": "custom"},
            {"ep_size": 1},
            MoesaicConfig(name="moesaic", ep_size=1),
        ),
    ],
)
def test_how_a_role_is_sharded(of_recipe: dict[str, object], of_role: dict[str, object], expected: object) -> None:
    recipe = build_recipe(dist_config=of_recipe, teacher=of_role)
    assert role_recipe(recipe, "teacher").dist_config == expected
    assert role_recipe(recipe, "ref").dist_config == recipe.dist_config


def test_a_role_stores_what_the_recipe_stores() -> None:
    recipe = build_recipe(dist_config={"name": "fsdpturbo", "ep_size": 4}, critic={"dist": "fsdp2"})
    assert (recipe.storage_dtype, role_recipe(recipe, "critic").storage_dtype) == ("bf16", "bf16")
    assert role_recipe(build_recipe(), "critic").storage_dtype == "fp32"


def test_the_reward_model_is_sharded_by_fsdp2() -> None:
    recipe = build_recipe(
        cp_size=2, dp_size=2, dist_config={"name": "moesaic", "ep_size": 4}, reward={"model": "scorer"}
    )
    reward = role_recipe(recipe, "reward")
    assert (reward.model, reward.dist_config, reward.cp_size) == ("scorer", Fsdp2Config(name="fsdp2"), 1)
    assert role_section(recipe, "actor") is recipe.actor


def test_only_what_is_trained_has_something_frozen() -> None:
    """A dense teacher has no routers, and nothing of it is trained anyhow."""
    recipe = build_recipe(frozen_modules=["model.layers.*.mlp.gate"], reward={"model": "scorer"})
    frozen = {
        role for role in ("actor", "ref", "critic", "teacher", "reward") if role_recipe(recipe, role).frozen_modules
    }
    assert frozen == {"actor", "critic"}
