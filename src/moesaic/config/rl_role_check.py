"""Whether each role of ``stage: rl`` can be laid out on the ranks: by the rules of the recipe's own model. Torch-free.

A role's problem is named by the role's field (``critic.ep_size``), unless the recipe as a whole has it anyhow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from moesaic.config.case import MODEL_FILES, Case, Check
from moesaic.config.data_check import budget_problems
from moesaic.config.model_check import config_parts, model_file_problems, model_problems, packing_problems, read_config
from moesaic.config.parallel import dense_size_problems, divisors, expert_size_problems
from moesaic.config.problem import Problem
from moesaic.config.recipe import Fsdp2Config, MoesaicConfig, Recipe
from moesaic.config.roles import SECTION_ROLES, RoleName, active_roles, max_tokens, role_recipe, role_section
from moesaic.config.sequence_check import sequence_problems

# Fields of a recipe that a role's section has under other names.
ROLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dist_config.name": "dist",
        "dist_config.ep_size": "ep_size",
        "dist_config.edp_size": "edp_size",
        "micro_batch_size": "ppo_micro_batch_size_per_gpu",
    }
)


def _role_problems(case: Case, role: RoleName) -> Iterable[Problem]:
    """What the role's layout has wrong that the recipe's own has not."""
    if case.recipe.stage != "rl" or role not in active_roles(case.recipe):
        return
    known = {(found.field, _content(found)) for found in _layout_problems(case.recipe, case.world_size)}
    for found in _layout_problems(role_recipe(case.recipe, role), case.world_size):
        if (found.field, _content(found)) not in known:
            yield replace(found, field=_role_field(case.recipe, role, found.field))


def _content(problem: Problem) -> str:
    """What tells two problems of one field apart."""
    return f"{problem.value}: {problem.rule}"


def _role_field(recipe: Recipe, role: RoleName, field: str) -> str:
    name = ROLE_NAMES.get(field, field)
    if role == "reward":
        return "reward.model" if name == "model" else field
    return f"{role}.{name}" if name in type(role_section(recipe, role)).model_fields else field


def _layout_problems(recipe: Recipe, world: int | None) -> list[Problem]:
    """By the checks of ``check.py``: model, heads, sizes, the longest trajectory."""
    found = [*model_problems(recipe), *sequence_problems(recipe), *packing_problems(recipe)]
    if world is not None:
        found += dense_size_problems(world, recipe.cp_size, recipe.tp_size, recipe.mp_replicate_size)
        if not isinstance(recipe.dist_config, Fsdp2Config):
            found += expert_size_problems(world, recipe.ep_size, recipe.edp_size)
    return [*found, *_length_problems(recipe)]


def _base_length_problems(case: Case) -> Iterable[Problem]:
    return _length_problems(case.recipe) if case.recipe.stage == "rl" else ()


def _length_problems(recipe: Recipe) -> Iterable[Problem]:
    longest = recipe.model_copy(update={"cutoff_len": max_tokens(recipe)})
    limit = "rollout.max_prompt_length + rollout.sampling.max_tokens"
    yield from budget_problems(longest, "a trajectory", limit)


def _scored_length_problems(case: Case) -> Iterable[Problem]:
    """A reward model reads held-out trajectories as well, and those may be longer."""
    recipe, val_sampling = case.recipe, case.recipe.rollout.val_sampling
    budget = recipe.micro_batch_tokens
    if recipe.stage != "rl" or recipe.reward.model is None or val_sampling is None or budget is None:
        return
    longest = recipe.rollout.max_prompt_length + val_sampling.max_tokens
    if longest > budget:
        rule = f"reward.model scores held-out trajectories too, of up to {longest} tokens, and there are "
        rule += f"micro_batch_tokens: {budget}"
        remedy = f"set at most {budget - recipe.rollout.max_prompt_length}, or micro_batch_tokens: {longest} or more"
        yield Problem(field="rollout.val_sampling.max_tokens", value=val_sampling.max_tokens, rule=rule, remedy=remedy)


def _role_file_problems(case: Case, role: RoleName) -> Iterable[Problem]:
    recipe = case.recipe
    if recipe.stage != "rl" or role not in active_roles(recipe) or role_recipe(recipe, role).model == recipe.model:
        return
    for found in model_file_problems(role_recipe(recipe, role)):
        yield replace(found, field=_role_field(recipe, role, found.field))


def _section_problems(case: Case, role: RoleName) -> Iterable[Problem]:
    """What a role's section can't say at once."""
    if case.recipe.stage != "rl":
        return
    section = role_section(case.recipe, role)
    if role == "actor" and section.model is not None:
        rule, remedy = "the actor is the recipe's model", "write it at the top level: `model: ...`"
        yield Problem(field="actor.model", value=section.model, rule=rule, remedy=remedy)
    for key, value in (("ep_size", section.ep_size), ("edp_size", section.edp_size)):
        if section.dist == "fsdp2" and value is not None:
            rule, remedy = f"{role}.dist: fsdp2 has no expert axis", "remove it, or set dist: moesaic"
            yield Problem(field=f"{role}.{key}", value=value, rule=rule, remedy=remedy)
    rows, tokens = section.ppo_micro_batch_size_per_gpu, section.micro_batch_tokens
    if rows is not None and tokens is not None:
        rule = "micro_batch_tokens says how large a micro-batch is"
        yield Problem(
            field=f"{role}.ppo_micro_batch_size_per_gpu", value=rows, rule=rule, remedy="remove one of the two"
        )


def _update_problems(case: Case) -> Iterable[Problem]:
    """An update needs a trajectory for each data-parallel rank of what it updates."""
    recipe, world = case.recipe, case.world_size
    size = recipe.algorithm.ppo_mini_batch_size or recipe.global_batch_size
    if recipe.stage != "rl" or world is None or size is None:
        return
    count = size * recipe.rollout.sampling.n
    for role in ("actor", "critic"):
        laid = role_recipe(recipe, role)
        dp_size = world // (laid.cp_size * laid.tp_size)
        if role in active_roles(recipe) and count < dp_size:
            is_mini = recipe.algorithm.ppo_mini_batch_size is not None
            field = "algorithm.ppo_mini_batch_size" if is_mini else "global_batch_size"
            rule = f"prompts * rollout.sampling.n = {count} completions are fewer than the {role}'s {dp_size} "
            rule += "data-parallel ranks"
            remedy = f"set {-(-dp_size // recipe.rollout.sampling.n)} or more, or a larger n"
            yield Problem(field=field, value=size, rule=rule, remedy=remedy)
            return


def _position_problems(case: Case) -> Iterable[Problem]:
    """Models can't read further than their positions."""
    recipe, rollout = case.recipe, case.recipe.rollout
    if recipe.stage != "rl":
        return
    val_tokens = 0 if rollout.val_sampling is None else rollout.val_sampling.max_tokens
    longest = rollout.max_prompt_length + max(rollout.sampling.max_tokens, val_tokens)
    name = "val_sampling" if val_tokens > rollout.sampling.max_tokens else "sampling"
    for role in active_roles(recipe):
        folder = role_recipe(recipe, role).model
        limit = _config_number(folder, "max_position_embeddings")
        if role != "reward" and limit is not None and longest > limit:
            value = longest - rollout.max_prompt_length
            rule = f"rollout.max_prompt_length + it = {longest}, and {folder} has {limit} positions"
            remedy = f"set at most {limit} together"
            yield Problem(field=f"rollout.{name}.max_tokens", value=value, rule=rule, remedy=remedy)
            return


def _vocabulary_problems(case: Case) -> Iterable[Problem]:
    """Tokens that the model doesn't have."""
    recipe = case.recipe
    size = _config_number(recipe.model, "vocab_size")
    if recipe.stage != "rl" or size is None:
        return
    stops, topk = recipe.rollout.stop_token_ids, recipe.distillation_config.topk
    if any(token >= size for token in stops):
        rule, remedy = f"the model's tokens are those from 0 to {size - 1}", "remove what is beyond"
        yield Problem(field="rollout.stop_token_ids", value=stops, rule=rule, remedy=remedy)
    if topk > size and recipe.distillation_config.mode == "forward_kl_topk":
        rule, remedy = f"the model has {size} tokens", "set fewer"
        yield Problem(field="distillation_config.topk", value=topk, rule=rule, remedy=remedy)


def _config_number(folder: str, key: str) -> int | None:
    """An integer of a model's config; None where it has none, or can't be read."""
    config = read_config(Path(folder))
    if isinstance(config, Problem):
        return None
    found = [part.get(key) for part in config_parts(config)]
    return next((number for number in found if isinstance(number, int)), None)


def _engine_problems(case: Case) -> Iterable[Problem]:
    rollout = case.recipe.rollout
    if case.recipe.stage != "rl":
        return
    if rollout.engine != "hf":
        rule = f"not yet: {rollout.engine} is known, and only hf works so far"
        yield Problem(field="rollout.engine", value=rollout.engine, rule=rule, remedy="set hf, or remove it")
        return
    for key, value, default in (
        ("pp_size", rollout.pp_size, 1),
        ("enable_expert_parallel", rollout.enable_expert_parallel, False),
    ):
        if value != default:
            rule = "rollout.engine: hf has no such thing; it is vllm's"
            yield Problem(
                field=f"rollout.{key}", value=value, rule=rule, remedy=f"remove it, or set {str(default).lower()}"
            )
    if rollout.ep_size > 1 and rollout.dp_size is not None:
        rule = "experts split over ranks make one replica of all of them (rollout.ep_size above 1)"
        yield Problem(field="rollout.dp_size", value=rollout.dp_size, rule=rule, remedy="remove it, or rollout.ep_size")
    if rollout.ep_size > 1 and rollout.tp_size > 1:
        rule = "rollout.engine: hf splits experts over ranks that have other sequences, and tp_size shares sequences"
        yield Problem(field="rollout.tp_size", value=rollout.tp_size, rule=rule, remedy="set 1, or rollout.ep_size: 1")


def _replica_problems(case: Case) -> Iterable[Problem]:
    """Replicas times their ranks are all ranks."""
    rollout, world = case.recipe.rollout, case.world_size
    if case.recipe.stage != "rl" or world is None or rollout.ep_size > 1:
        return
    ranks = rollout.tp_size * rollout.pp_size
    if world % ranks:
        field, value = ("tp_size", rollout.tp_size) if rollout.pp_size == 1 else ("pp_size", rollout.pp_size)
        rule = f"tp_size * pp_size = {ranks} ranks of a replica must divide the {world} ranks"
        remedy = f"choose sizes with a product among {divisors(world)}"
        yield Problem(field=f"rollout.{field}", value=value, rule=rule, remedy=remedy)
    elif rollout.dp_size is not None and rollout.dp_size * ranks != world:
        rule = f"dp_size * tp_size * pp_size = {rollout.dp_size * ranks} must be the {world} ranks"
        remedy = f"remove it, or set {world // ranks}"
        yield Problem(field="rollout.dp_size", value=rollout.dp_size, rule=rule, remedy=remedy)


def _replica_model_problems(case: Case) -> Iterable[Problem]:
    """The actor's model, split as the engine splits it."""
    recipe, rollout = case.recipe, case.recipe.rollout
    if recipe.stage != "rl" or isinstance(read_config(Path(recipe.model)), Problem):
        return
    split = {"tp_size": rollout.tp_size, "cp_size": 1, "attn_implementation": None}
    for found in sequence_problems(recipe.model_copy(update=split)):
        yield replace(found, field=f"rollout.{found.field}")
    if rollout.ep_size > 1:
        world = case.world_size
        if world is not None and world % rollout.ep_size:
            rule, remedy = f"must divide the {world} ranks", f"choose one of {divisors(world)}"
            yield Problem(field="rollout.ep_size", value=rollout.ep_size, rule=rule, remedy=remedy)
        experts = recipe.model_copy(update={"dist_config": MoesaicConfig(name="moesaic", ep_size=rollout.ep_size)})
        for found in model_problems(experts):
            if found.field == "dist_config.ep_size" or isinstance(recipe.dist_config, Fsdp2Config):
                yield replace(found, field="rollout.ep_size", value=rollout.ep_size)


_LAYOUT = (
    *("stage", "model", "dist_config.*", "cp_size", "tp_size", "mp_replicate_size", "attn_implementation"),
    *("micro_batch_tokens", "micro_batch_size", "packing", "bf16", "master_dtype"),
    *("rollout.max_prompt_length", "rollout.sampling.max_tokens"),
)
# What says which roles there are.
_ACTIVE = ("kl_config.use", "algorithm.adv_estimator", "distillation_config.mode", "reward.model")
_ALL_ROLES: tuple[RoleName, ...] = (*SECTION_ROLES, "reward")


def _section_of(role: RoleName) -> str:
    return "reward.model" if role == "reward" else f"{role}.*"


def _role_checks(role: RoleName) -> Iterable[Check]:
    needs = (*_LAYOUT, *_ACTIVE, _section_of(role))
    yield Check(needs=needs, find=lambda case: _role_problems(case, role))
    yield Check(needs=(*needs, MODEL_FILES), find=lambda case: _role_file_problems(case, role))
    if role != "reward":
        yield Check(needs=("stage", _section_of(role)), find=lambda case: _section_problems(case, role))


ROLE_CHECKS: tuple[Check, ...] = (
    Check(
        needs=(
            *("stage", "micro_batch_tokens", "cp_size", "tp_size"),
            *("rollout.max_prompt_length", "rollout.sampling.max_tokens"),
        ),
        find=_base_length_problems,
    ),
    Check(
        needs=(
            *("stage", "micro_batch_tokens", "reward.model"),
            *("rollout.max_prompt_length", "rollout.val_sampling.*"),
        ),
        find=_scored_length_problems,
    ),
    *(check for role in _ALL_ROLES for check in _role_checks(role)),
    Check(
        needs=(
            *("algorithm.ppo_mini_batch_size", "global_batch_size", "rollout.sampling.n", "algorithm.adv_estimator"),
            *("stage", "cp_size", "tp_size", "actor.*", "critic.*"),
        ),
        find=_update_problems,
    ),
    Check(
        needs=(
            *("stage", "model", "rollout.max_prompt_length", "rollout.sampling.max_tokens", "rollout.val_sampling.*"),
            *(_section_of(role) for role in _ALL_ROLES),
            *_ACTIVE,
        ),
        find=_position_problems,
    ),
    Check(
        needs=("stage", "model", "rollout.stop_token_ids", "distillation_config.mode", "distillation_config.topk"),
        find=_vocabulary_problems,
    ),
    Check(
        needs=(
            *("stage", "rollout.engine", "rollout.pp_size", "rollout.enable_expert_parallel", "rollout.ep_size"),
            *("rollout.dp_size", "rollout.tp_size"),
        ),
        find=_engine_problems,
    ),
    Check(
        needs=("stage", "rollout.dp_size", "rollout.tp_size", "rollout.pp_size", "rollout.ep_size"),
        find=_replica_problems,
    ),
    Check(
        needs=("stage", "model", "dist_config.*", "rollout.tp_size", "rollout.ep_size"), find=_replica_model_problems
    ),
)
