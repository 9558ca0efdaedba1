"""The recipe of one role: what builds its model and its meshes. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from moesaic.config.recipe import DistConfig, Fsdp2Config, MoesaicConfig, Recipe
from moesaic.config.rl_sections import CriticConfig, RoleConfig

RoleName = Literal["actor", "ref", "critic", "teacher", "reward"]

# Roles with a section of the recipe; the reward model has only ``reward.model``.
SECTION_ROLES: tuple[Literal["actor", "ref", "critic", "teacher"], ...] = ("actor", "ref", "critic", "teacher")
TRAINED_ROLES: tuple[RoleName, ...] = ("actor", "critic")
# Fields of a role's section that are fields of the recipe, of the same meaning.
SAME_FIELDS = (
    *("model", "cp_size", "tp_size", "mp_replicate_size"),
    *("activation_checkpointing", "reshard_after_forward"),
)


def role_section(recipe: Recipe, role: RoleName) -> RoleConfig:
    """The role's section; of the reward model, which has none, what stands for it: its folder, sharded by FSDP2."""
    if role == "reward":
        return RoleConfig(model=recipe.reward.model, dist="fsdp2", cp_size=1, tp_size=1, mp_replicate_size=1)
    return {"actor": recipe.actor, "ref": recipe.ref, "critic": recipe.critic, "teacher": recipe.teacher}[role]


def role_recipe(recipe: Recipe, role: RoleName) -> Recipe:
    """The recipe with the role's section laid over it: its model, sizes and micro-batches; whatever the section doesn't
    say is as in the recipe.

    ``cutoff_len`` is the longest trajectory. ``dp_size`` and ``mp_shard_size`` stay where they still hold, else they
    are unset: the ranks are the same. Only roles that are trained have ``frozen_modules``. Parameters are stored in the
    recipe's type, whatever the role's ``dist``. Example: ``dist_config: {name: moesaic, ep_size: 4}`` and ``critic:
    {dist: fsdp2, learning_rate: 1.0e-5}`` make the critic's ``dist_config: {name: fsdp2}`` and ``learning_rate:
    1.0e-5``.
    """
    section = role_section(recipe, role)
    fields: dict[str, Any] = {name: getattr(section, name) for name in SAME_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    if role == "actor":  # whose model is the recipe's; its section may not name another
        fields.pop("model", None)
    dist_config = _dist_config(recipe, section)
    fields |= {"dist_config": dist_config, "master_dtype": recipe.storage_dtype, "cutoff_len": max_tokens(recipe)}
    fields |= _micro_batches(recipe, section)
    if role not in TRAINED_ROLES:  # whose modules may have other names
        fields["frozen_modules"] = ()
    if isinstance(section, CriticConfig) and section.learning_rate is not None:
        fields["learning_rate"] = section.learning_rate
    laid = recipe.model_copy(update=fields)
    if isinstance(dist_config, Fsdp2Config) or not laid.activation_checkpointing:
        fields["exchanged_tokens"] = "keep"
    if (laid.cp_size, laid.tp_size) != (recipe.cp_size, recipe.tp_size):
        fields["dp_size"] = None
    if (laid.mp_replicate_size, laid.tp_size) != (recipe.mp_replicate_size, recipe.tp_size):
        fields["mp_shard_size"] = None
    return recipe.model_copy(update=fields)


def max_tokens(recipe: Recipe) -> int:
    """Most tokens of one trajectory that is trained on: prompt and completion."""
    return recipe.rollout.max_prompt_length + recipe.rollout.sampling.max_tokens


def _dist_config(recipe: Recipe, section: RoleConfig) -> DistConfig:
    """The recipe's, with the role's own sizes. A size of experts makes ``moesaic`` of ``fsdp2``."""
    config = recipe.dist_config
    sizes = {name: value for name in ("ep_size", "edp_size") if (value := getattr(section, name)) is not None}
    if section.dist == "fsdp2" or (section.dist is None and isinstance(config, Fsdp2Config) and not sizes):
        return Fsdp2Config(name="fsdp2")
    if isinstance(config, Fsdp2Config):
        return MoesaicConfig(name="moesaic", **sizes)
    if config.fsdp_implementation == "custom" and sizes.get("ep_size") == 1:  # experts have no mesh of their own then
        sizes["fsdp_implementation"] = "native"
    return config.model_copy(update=sizes)


def _micro_batches(recipe: Recipe, section: RoleConfig) -> dict[str, int | None]:
    """Rows or tokens of a micro-batch: the role's word, else the recipe's."""
    if section.micro_batch_tokens is not None:
        return {"micro_batch_tokens": section.micro_batch_tokens, "micro_batch_size": 1}
    if section.ppo_micro_batch_size_per_gpu is not None:
        return {"micro_batch_size": section.ppo_micro_batch_size_per_gpu, "micro_batch_tokens": None}
    return {}


def active_roles(recipe: Recipe) -> tuple[RoleName, ...]:
    """The roles that a run of the recipe has models of, the actor first."""
    has: dict[RoleName, bool] = {
        "actor": True,
        "ref": recipe.kl_config.use != "off",
        "critic": recipe.algorithm.adv_estimator == "gae",
        "teacher": recipe.distillation_config.mode != "off" and recipe.teacher.model is not None,
        "reward": recipe.reward.model is not None,
    }
    return tuple(role for role, is_there in has.items() if is_there)
