"""verl's PPO trainer: reference and critic, of which a recipe says only what isn't the actor's. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.config.foreign.rules import Condition, computed, needless, only, same, when
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Value
from moesaic.config.foreign.verl_parts import RESHARD, ULYSSES, cp_size_of, home, model_rules, optim_rules

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
SPEED = "speed only"
AS_ACTOR = "it is the actor's here, and the file has another"


def as_actor(name: str, reason: str = AS_ACTOR) -> Rule:
    """A field of another role that has to say what the actor's field ``name`` says."""

    def apply(value: Any, theirs: Theirs) -> Outcome:
        is_same = value is None or value == theirs.values.get(name, value)
        return Needless("as the actor's") if is_same else NoEquivalent(reason)

    return computed(apply)


def unless_actors(target: str, name: str) -> Rule:
    """A field of another role that the recipe has to say only where it differs from the actor's field ``name``."""

    def apply(value: Any, theirs: Theirs) -> Outcome:
        if value is None or value == theirs.get(name):
            return Needless("unset" if value is None else "as the actor's")
        return Value({target: value})

    return computed(apply, target)


# Where a role that isn't the actor says how many ranks a sequence has: in the role's own field, or its engine's.
ROLE_SECTIONS: Mapping[str, Sequence[str]] = {
    "ref": (f"{REF}.", f"{REF}.fsdp_config."),
    "critic": ("critic.", "critic.fsdp.", "critic.model.fsdp_config."),
}


def _cp_size(role: str) -> Rule:
    """Ranks of a sequence, whichever of the role's sections says it."""

    def apply(_: Any, theirs: Theirs) -> Outcome:
        cp_size = cp_size_of(theirs, ROLE_SECTIONS[role])
        return Needless("as the actor's") if cp_size == cp_size_of(theirs) else Value({f"{role}.cp_size": cp_size})

    return computed(apply, f"{role}.cp_size")


def _micro_batch_tokens(role: str) -> Rule:
    """Theirs are per GPU, here they are of all ranks that share a sequence."""
    target = f"{role}.micro_batch_tokens"

    def apply(value: Any, theirs: Theirs) -> Outcome:
        if value is None:
            return Needless("unset")
        cp_size = cp_size_of(theirs, ROLE_SECTIONS[role])
        tokens = int(value) * cp_size
        if tokens == theirs.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 0) * cp_size_of(theirs):
            return Needless("as the actor's")
        return Value({target: tokens}, "" if cp_size == 1 else f"per GPU * {ULYSSES}")

    return computed(apply, target)


def _critic_aggregation(value: Any, theirs: Theirs) -> Outcome:
    """Here it is one with the policy's, which under sapo is seq-mean-token-mean there, whatever is written."""
    is_sapo = theirs.get(f"{ACTOR}.policy_loss.loss_mode") == "sapo"
    policy = "seq-mean-token-mean" if is_sapo else theirs.get(f"{ACTOR}.loss_agg_mode")
    if value in (None, policy):
        return Needless("as the actor's")
    return NoEquivalent(
        "sapo is averaged by sequences there, and values aren't; here both are" if is_sapo else AS_ACTOR
    )


def has_critic(theirs: Theirs) -> bool:
    """As their trainer decides it."""
    return bool(theirs.get("critic.enable", theirs.get("algorithm.adv_estimator") == "gae"))


def has_reference(theirs: Theirs) -> bool:
    """KL in the loss or in the reward."""
    return bool(theirs.get(f"{ACTOR}.use_kl_loss") or theirs.get("algorithm.use_kl_in_reward"))


def parks(value: Any, _: Theirs) -> Outcome:
    """Weights or optimizer state that leave the device while they aren't used."""
    if value:
        return Value({"park_idle_roles": True}, "they leave the device while nothing trains")
    return Needless("where idle weights lie; park_idle_roles: false keeps them on the device")


def _role_engine(prefix: str, role: str) -> dict[str, Rule]:
    """The FSDP section of a role that isn't the actor: what it may say, and what is the actor's."""
    base = f"{ACTOR}.fsdp_config"
    return {
        f"{prefix}.reshard_after_forward": unless_actors(f"{role}.reshard_after_forward", f"{base}.{RESHARD}"),
        f"{prefix}.model_dtype": as_actor(f"{base}.model_dtype"),
        f"{prefix}.dtype": as_actor(f"{base}.dtype"),
        f"{prefix}.offload_policy": as_actor(f"{base}.offload_policy"),
        f"{prefix}.fsdp_size": as_actor(f"{base}.fsdp_size"),
        f"{prefix}.param_offload": computed(parks, "park_idle_roles"),
        f"{prefix}.optimizer_offload": computed(parks, "park_idle_roles"),
        f"{prefix}.strategy": needless("the role's own strategy says it"),
        f"{prefix}.ulysses_sequence_parallel_size": _cp_size(role),
        f"{prefix}.qat.enable": only(False, reason="training isn't quantized"),
        f"{prefix}.full_determinism": as_actor(f"{base}.full_determinism"),
        f"{prefix}.seed": needless("the run's"),
        f"{prefix}.forward_only": needless("as the role is"),
        f"{prefix}.qat.*": needless("counts for qat.enable only"),
        f"{prefix}.turbo_config.*": needless("counts for strategy: fsdp_turbo only"),
        **{
            f"{prefix}.{name}": needless(SPEED)
            for name in (
                *("wrap_policy.*", "forward_prefetch", "use_orig_params", "entropy_*", "use_torch_compile"),
                *("use_no_sync_for_gradient_accumulation", "pad_to_length*"),
            )
        },
    }


def _role(prefix: str, role: str, is_there: Condition, absent: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """All of a role's fields count only where there is one."""
    return {f"{prefix}.{name}": when(is_there, rule, absent) for name, rule in rules.items()}


NO_REFERENCE = "no reference is loaded without KL"
REF_RULES: Mapping[str, Rule] = _role(
    REF,
    "ref",
    has_reference,
    NO_REFERENCE,
    {
        "strategy": as_actor(f"{ACTOR}.strategy"),
        "log_prob_micro_batch_size": only(reason="log_prob_micro_batch_size_per_gpu says it"),
        "log_prob_micro_batch_size_per_gpu": when(
            lambda theirs: not theirs.get(f"{REF}.log_prob_use_dynamic_bsz"),
            unless_actors("ref.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
            "log_prob_use_dynamic_bsz: tokens are counted, not rows",
        ),
        "log_prob_use_dynamic_bsz": as_actor(f"{ACTOR}.use_dynamic_bsz"),
        "log_prob_max_token_len_per_gpu": when(
            lambda theirs: bool(theirs.get(f"{REF}.log_prob_use_dynamic_bsz")),
            _micro_batch_tokens("ref"),
            "counts for log_prob_use_dynamic_bsz only",
        ),
        ULYSSES: _cp_size("ref"),
        **{name.removeprefix(f"{REF}."): rule for name, rule in _role_engine(f"{REF}.fsdp_config", "ref").items()},
        "rollout_n": needless("rollout.n says it"),
        "use_torch_compile": needless(SPEED),
        "entropy_*": needless(SPEED),
        "pad_to_length*": needless(SPEED),
    },
)


CRITIC_RULES: Mapping[str, Rule] = _role(
    "critic",
    "critic",
    has_critic,
    "there is no critic without gae",
    {
        "model.path": computed(
            lambda value, theirs: (
                Needless("as the actor's")
                if value == theirs.get("actor_rollout_ref.model.path")
                else Value({"critic.model": home(value)})
            ),
            "critic.model",
        ),
        "model.enable_gradient_checkpointing": unless_actors(
            "critic.activation_checkpointing", "actor_rollout_ref.model.enable_gradient_checkpointing"
        ),
        "optim.lr": same("critic.learning_rate", float),
        **{
            f"optim.{name}": as_actor(f"{ACTOR}.optim.{name}", "the critic has the actor's optimizer, but for its rate")
            for name in (field.removeprefix(".") for field in optim_rules(""))
            if name not in ("lr", "clip_grad")
        },
        "optim.clip_grad": needless("grad_clip says it"),
        "cliprange_value": same("critic.cliprange_value", float),
        "strategy": as_actor(f"{ACTOR}.strategy"),
        "enable": needless("part of adv_estimator"),
        "ppo_micro_batch_size": only(reason="ppo_micro_batch_size_per_gpu says it"),
        "forward_*": needless("values take the updates' micro-batches"),
        "ppo_micro_batch_size_per_gpu": when(
            lambda theirs: not theirs.get("critic.use_dynamic_bsz"),
            unless_actors("critic.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
            "use_dynamic_bsz: tokens are counted, not rows",
        ),
        "ppo_max_token_len_per_gpu": when(
            lambda theirs: bool(theirs.get("critic.use_dynamic_bsz")),
            _micro_batch_tokens("critic"),
            "counts for use_dynamic_bsz only",
        ),
        **{
            name: as_actor(f"{ACTOR}.{name}")
            for name in (
                "use_dynamic_bsz",
                "ppo_mini_batch_size",
                "ppo_epochs",
                "grad_clip",
                "shuffle",
            )
        },
        "loss_agg_mode": computed(_critic_aggregation),
        "loss_scale_factor": when(
            lambda theirs: theirs.get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm",
            as_actor(f"{ACTOR}.loss_scale_factor"),
            "counts for seq-mean-token-sum-norm only",
        ),
        "data_loader_seed": needless("counts for shuffle only"),
        "checkpoint.*": needless("checkpoints hold everything"),
        "rollout_n": needless("rollout.n says it"),
        ULYSSES: _cp_size("critic"),
        **{name.removeprefix("critic."): rule for name, rule in _role_engine("critic.fsdp", "critic").items()},
        **{
            name.removeprefix("critic."): rule
            for name, rule in _role_engine("critic.model.fsdp_config", "critic").items()
        },
        **{
            name.removeprefix("critic."): rule
            for name, rule in model_rules("critic.model").items()
            if ".path" not in name and "checkpointing" not in name
        },
    },
)
