"""verl's PPO trainer: composed configurations of version 0.9.1, as recipes for ``stage: rl``. Torch-free.

Where a name is the same and the meaning isn't:

- ``clip_ratio`` counts only where ``clip_ratio_low`` and ``clip_ratio_high`` are null; what these are depends on
  ``loss_mode``: distances from 1 (vanilla, gspo, cispo), or between probabilities (dppo_tv);
- GRPO without ``norm_adv_by_std_in_grpo`` is ``dr_grpo``;
- ``critic_warmup`` is the first step that trains the actor, not the number of steps before it;
- ``loss_scale_factor: null`` is the padded width of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moesaic.config.foreign.rules import Condition, computed, needless, one_of, only, same, when
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Tool, Value
from moesaic.config.foreign.verl_parts import (
    COMMON,
    ULYSSES,
    cp_size_of,
    engine_rules,
    micro_batches,
    model_rules,
    optim_rules,
)
from moesaic.config.foreign.verl_reward import REWARD_RULES, distillation_rules, is_distilled_by_policy
from moesaic.config.foreign.verl_roles import ACTOR, CRITIC_RULES, REF_RULES, SPEED, has_critic, parks
from moesaic.config.foreign.verl_rollout import DATA_RULES, ROLLOUT_RULES

CORRECTION = "algorithm.rollout_correction"
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
}


LOSSES = ("vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv")
SAPO_AGGREGATION = "seq-mean-token-mean"
KL_TYPES = {"mse": "k2", "k2": "k2", "mse+": "k2", "k2+": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_TYPES_IN_LOSS = {**KL_TYPES, "low_var_kl+": "k3+", "k3+": "k3+", "k1+": "k2", "kl+": "k2"}
KL_TYPES_IN_REWARD = {**KL_TYPES, "kl": "k1", "k1": "k1", "kl+": "k1", "k1+": "k1", "low_var_kl+": "k3", "k3+": "k3"}


def _has_kl_loss(theirs: Theirs) -> bool:
    return bool(theirs.get(f"{ACTOR}.use_kl_loss"))


def _has_kl_reward(theirs: Theirs) -> bool:
    return bool(theirs.get("algorithm.use_kl_in_reward"))


def _loss_mode(theirs: Theirs) -> str:
    return str(theirs.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))


def _estimator(value: Any, theirs: Theirs) -> Outcome:
    if is_distilled_by_policy(theirs):
        return Value({"stage": "rl"}, "the estimator is distillation's")
    if value not in ESTIMATORS:
        return NoEquivalent(f"one of {', '.join(ESTIMATORS)}")
    if theirs.get("critic.enable") is not None and has_critic(theirs) != (value == "gae"):
        return NoEquivalent("critic.enable says otherwise: there is a critic for gae, and only for it")
    name = ESTIMATORS[value]
    if name == "grpo" and theirs.get("algorithm.norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    return Value({"stage": "rl", "algorithm.adv_estimator": name})


def _clip(side: str) -> Rule:
    """``clip_ratio_low`` or ``clip_ratio_high``: what they are depends on the loss."""
    targets = {
        "vanilla": f"algorithm.clip_ratio_{side}",
        "gspo": f"algorithm.clip_ratio_{side}",
        "dppo_tv": f"algorithm.dppo_delta_{side}",
        "cispo": "algorithm.cispo_ratio_min" if side == "low" else "algorithm.cispo_ratio_max",
    }

    def apply(value: Any, theirs: Theirs) -> Outcome:
        mode = _loss_mode(theirs)
        if value is None:
            value = theirs.get(f"{ACTOR}.clip_ratio", 0.2)
        if is_distilled_by_policy(theirs):
            return Needless("distillation has bounds of its own")
        if mode not in targets:
            return Needless(f"loss_mode: {mode} clips nothing")
        if mode == "cispo":
            bound = max(0.0, 1 - float(value)) if side == "low" else 1 + float(value)
            return Value({targets[mode]: bound}, "of the ratio itself, not the distance from 1")
        return Value({targets[mode]: float(value)})

    return computed(apply, *dict.fromkeys(targets.values()))


def _clip_c(value: Any, theirs: Theirs) -> Outcome:
    mode = "vanilla" if is_distilled_by_policy(theirs) else _loss_mode(theirs)
    if mode == "vanilla":
        return Value({"algorithm.clip_ratio_c": float(value)}) if value is not None else Needless("unset")
    if mode == "dppo_tv" and value != 20:
        return NoEquivalent("dppo_tv cuts a token's weight at 20 here")
    return Needless(f"loss_mode: {mode} has no dual clip")


def _aggregation(value: Any, theirs: Theirs) -> Outcome:
    """Theirs counts for divergence, entropy and values; for a policy loss but sapo's."""
    if value is None or value == SAPO_AGGREGATION or _loss_mode(theirs) != "sapo" or is_distilled_by_policy(theirs):
        return Value({"algorithm.loss_agg_mode": value}) if value else Needless("unset")
    if theirs.get(f"{ACTOR}.entropy_coeff", 0) or _has_kl_loss(theirs):
        return NoEquivalent(f"sapo takes {SAPO_AGGREGATION} there, divergence and entropy this one; here all take one")
    return Value({"algorithm.loss_agg_mode": SAPO_AGGREGATION}, "sapo's there, whatever is written")


def _scale_factor(value: Any, theirs: Theirs) -> Outcome:
    if theirs.get(f"{ACTOR}.loss_agg_mode") != "seq-mean-token-sum-norm":
        return Needless("counts for seq-mean-token-sum-norm only")
    if value is not None:
        return Value({"algorithm.loss_scale_factor": float(value)})
    width = float(theirs.get("data.max_response_length", 512))
    return Value({"algorithm.loss_scale_factor": width}, "the width that completions are padded to")


def _kl_use(use: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        if not value:
            return Needless("as here")
        if _has_kl_loss(theirs) and _has_kl_reward(theirs):
            return NoEquivalent("in the loss or in the reward, not in both")
        return Value({"kl_config.use": use})

    return computed(apply, "kl_config.use")


def _kl_type(names: Mapping[str, str], otherwise: str) -> Rule:
    def apply(value: Any, _: Theirs) -> Outcome:
        if value not in names:
            return NoEquivalent(otherwise)
        note = (
            "value and gradient of k2: theirs has another value, and this gradient" if value in ("k1+", "kl+") else ""
        )
        return Value({"kl_config.estimator": names[value]}, note if names[value] == "k2" else "")

    return computed(apply, "kl_config.estimator")


def _adaptive(target: str) -> Rule:
    return when(
        lambda theirs: _has_kl_reward(theirs) and theirs.get("algorithm.kl_ctrl.type") == "adaptive",
        same(target),
        "counts for use_kl_in_reward with kl_ctrl.type: adaptive only",
    )


def _warmup(value: Any, theirs: Theirs) -> Outcome:
    steps = max(0, int(value or 0) - 1)
    if not has_critic(theirs) or steps == 0:
        return Needless("the actor is trained from the first step on")
    return Value({"critic.critic_warmup": steps}, "theirs is the first step that trains the actor")


def _threshold(value: Any, theirs: Theirs) -> Outcome:
    if theirs.get(f"{CORRECTION}.rollout_is") is None or theirs.get(f"{CORRECTION}.bypass_mode"):
        return Needless("counts for rollout_is only")
    low, underscore, high = str(value).partition("_")
    if not underscore:
        return Value({"correction_config.rollout_is_threshold": float(value)})
    names = ("correction_config.rollout_is_threshold_lower", "correction_config.rollout_is_threshold")
    return Value({names[0]: float(low), names[1]: float(high)})


def _importance(value: Any, theirs: Theirs) -> Outcome:
    if value is None or theirs.get(f"{CORRECTION}.bypass_mode"):
        return Needless("unset" if value is None else "under bypass_mode the ratio has it")
    is_icepop = "_" in str(theirs.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
    if value not in ("token", "sequence") or (is_icepop and value == "sequence"):
        return NoEquivalent("token or sequence, and bounds below too for tokens only")
    return Value({"correction_config.rollout_is": "icepop" if is_icepop else value})


def _measures(theirs: Theirs) -> list[str]:
    value = theirs.get(f"{CORRECTION}.rollout_rs") or []
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else [str(name) for name in value]


def _rejection(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Needless("unset")
    if theirs.get(f"{CORRECTION}.bypass_mode"):
        return NoEquivalent("under bypass_mode there is nothing to reject by: no log-probabilities but the engine's")
    return Value({"correction_config.rollout_rs": _measures(theirs)})


def _rejection_threshold(value: Any, theirs: Theirs) -> Outcome:
    measures = _measures(theirs)
    if not measures or value is None or theirs.get(f"{CORRECTION}.bypass_mode"):
        return Needless("counts for rollout_rs only")
    texts = [text.strip() for text in str(value).split(",")]
    return Value({"correction_config.rollout_rs_threshold": texts * len(measures) if len(texts) == 1 else texts})


def _filter_metric(value: Any, _: Theirs) -> Outcome:
    if value in ("reward", "seq_reward", "seq_final_reward", "score", None):
        return Needless("a completion's reward, before KL")
    return NoEquivalent("groups are compared by their completions' rewards")


def _gen_batches(value: Any, _: Theirs) -> Outcome:
    if value and value > 0:
        return Value({"algorithm.max_num_gen_batches": value})
    return Needless("there is a limit here: algorithm.max_num_gen_batches")


def _filters(theirs: Theirs) -> bool:
    return bool(theirs.get("algorithm.filter_groups.enable"))


def _is_gae(theirs: Theirs) -> bool:
    return theirs.get("algorithm.adv_estimator") == "gae" and not is_distilled_by_policy(theirs)


def _discounts(theirs: Theirs) -> bool:
    names = ("gae", "reinforce_plus_plus")
    return theirs.get("algorithm.adv_estimator") in names and not is_distilled_by_policy(theirs)


def _counts_for_loss(*modes: str) -> Condition:
    return lambda theirs: _loss_mode(theirs) in modes


ACTOR_RULES: Mapping[str, Rule] = {
    **optim_rules(f"{ACTOR}.optim"),
    **engine_rules(f"{ACTOR}.fsdp_config"),  # some of it is said in another way below
    f"{ACTOR}.strategy": one_of("dist_config.name", {"fsdp": "fsdp2", "fsdp2": "fsdp2"}, "FSDP2, or moesaic"),
    f"{ACTOR}.ppo_mini_batch_size": same("algorithm.ppo_mini_batch_size", note="prompts, with all their completions"),
    f"{ACTOR}.ppo_micro_batch_size": only(reason="ppo_micro_batch_size_per_gpu says it"),
    **micro_batches(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz"
    ),
    f"{ACTOR}.clip_ratio": needless("clip_ratio_low and clip_ratio_high go before it, and stand in for it where null"),
    f"{ACTOR}.clip_ratio_low": _clip("low"),
    f"{ACTOR}.clip_ratio_high": _clip("high"),
    f"{ACTOR}.clip_ratio_c": computed(_clip_c, "algorithm.clip_ratio_c"),
    f"{ACTOR}.tau_pos": when(_counts_for_loss("sapo"), same("algorithm.sapo_tau_pos", float), "counts for sapo only"),
    f"{ACTOR}.tau_neg": when(_counts_for_loss("sapo"), same("algorithm.sapo_tau_neg", float), "counts for sapo only"),
    f"{ACTOR}.policy_loss.loss_mode": when(
        lambda theirs: not is_distilled_by_policy(theirs),
        one_of("algorithm.loss_mode", {name: name for name in LOSSES}, f"one of {', '.join(LOSSES)}"),
        "distillation has a loss of its own",
    ),
    f"{ACTOR}.policy_loss.*": needless("counts for losses that aren't here"),
    f"{ACTOR}.loss_agg_mode": computed(_aggregation, "algorithm.loss_agg_mode"),
    f"{ACTOR}.loss_scale_factor": computed(_scale_factor, "algorithm.loss_scale_factor"),
    f"{ACTOR}.entropy_coeff": same("algorithm.entropy_coeff", float),
    f"{ACTOR}.calculate_entropy": needless("a metric"),
    f"{ACTOR}.calculate_sum_pi_squared": needless("counts for estimators that aren't here"),
    f"{ACTOR}.use_kl_loss": _kl_use("loss"),
    f"{ACTOR}.kl_loss_coef": when(_has_kl_loss, same("kl_config.coef", float), "counts for use_kl_loss only"),
    f"{ACTOR}.kl_loss_type": when(
        _has_kl_loss,
        _kl_type(KL_TYPES_IN_LOSS, "k2, k3 or k3+; k1's gradient has expectation zero"),
        "counts for use_kl_loss only",
    ),
    f"{ACTOR}.ppo_epochs": same("algorithm.ppo_epochs"),
    f"{ACTOR}.shuffle": only(False, reason="updates take a step's prompts in their order"),
    f"{ACTOR}.data_loader_seed": needless("counts for shuffle only"),
    f"{ACTOR}.checkpoint.*": needless("checkpoints hold everything; the last model is exported"),
    f"{ACTOR}.grad_clip": same("max_grad_norm", float),
    f"{ACTOR}.optim.clip_grad": needless("grad_clip says it"),
    **{
        f"{ACTOR}.{section}{ULYSSES}": computed(lambda _, theirs: Value({"cp_size": cp_size_of(theirs)}), "cp_size")
        for section in ("", "fsdp_config.")
    },
    f"{ACTOR}.fsdp_config.param_offload": computed(parks, "park_idle_roles"),
    f"{ACTOR}.fsdp_config.optimizer_offload": computed(parks, "park_idle_roles"),
    f"{ACTOR}.fsdp_config.strategy": needless("the actor's strategy says it"),
    f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": computed(
        lambda value, _: Value({"gradient_accumulation": "unsharded" if value else "sharded"}), "gradient_accumulation"
    ),
    f"{ACTOR}.fsdp_config.qat.enable": only(False, reason="training isn't quantized"),
    f"{ACTOR}.fsdp_config.qat.*": needless("counts for qat.enable only"),
    f"{ACTOR}.fsdp_config.turbo_config.*": needless("counts for strategy: fsdp_turbo only"),
    f"{ACTOR}.fsdp_config.pad_to_length*": needless(SPEED),
    f"{ACTOR}.qat.enable": only(False, reason="training isn't quantized"),
    f"{ACTOR}.qat.*": needless("counts for qat.enable only"),
    f"{ACTOR}.freeze_vision_tower": needless("only text is trained on"),
    f"{ACTOR}.use_prefix_grouper": needless(SPEED),
    f"{ACTOR}.use_torch_compile": needless(SPEED),
    f"{ACTOR}.use_fused_kernels": only(False, reason="other kernels: kernel_config"),
    f"{ACTOR}.use_remove_padding": needless("padding is never trained on; micro_batch_tokens leaves it out"),
    f"{ACTOR}.rollout_n": needless("rollout.n says it"),
    f"{ACTOR}.entropy_*": needless(SPEED),
    f"{ACTOR}.pad_to_length*": needless(SPEED),
}


ALGORITHM_RULES: Mapping[str, Rule] = {
    "algorithm.adv_estimator": computed(_estimator, "stage", "algorithm.adv_estimator"),
    "algorithm.norm_adv_by_std_in_grpo": needless("part of adv_estimator: grpo, or dr_grpo"),
    "algorithm.gamma": when(_discounts, same("algorithm.gamma", float), "counts for gae and reinforce_plus_plus only"),
    "algorithm.lam": when(_is_gae, same("algorithm.lam", float), "counts for gae only"),
    "algorithm.use_kl_in_reward": _kl_use("reward"),
    "algorithm.kl_penalty": when(
        _has_kl_reward, _kl_type(KL_TYPES_IN_REWARD, "k1, k2 or k3"), "counts for use_kl_in_reward only"
    ),
    "algorithm.kl_ctrl.type": when(
        _has_kl_reward, only("fixed", "adaptive", reason="fixed or adaptive"), "counts for use_kl_in_reward only"
    ),
    "algorithm.kl_ctrl.kl_coef": when(
        _has_kl_reward, same("kl_config.coef", float), "counts for use_kl_in_reward only"
    ),
    "algorithm.kl_ctrl.target_kl": _adaptive("kl_config.target"),
    "algorithm.kl_ctrl.horizon": _adaptive("kl_config.horizon"),
    "algorithm.filter_groups.enable": same("algorithm.filter_groups"),
    "algorithm.filter_groups.metric": when(_filters, computed(_filter_metric), "counts for filter_groups.enable only"),
    "algorithm.filter_groups.max_num_gen_batches": when(
        _filters, computed(_gen_batches, "algorithm.max_num_gen_batches"), "counts for filter_groups.enable only"
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": needless(SPEED),
    "algorithm.filter_groups": only(reason="its fields are known, no other form"),
    f"{CORRECTION}.rollout_is": computed(_importance, "correction_config.rollout_is"),
    f"{CORRECTION}.rollout_is_threshold": computed(
        _threshold, "correction_config.rollout_is_threshold", "correction_config.rollout_is_threshold_lower"
    ),
    f"{CORRECTION}.rollout_is_batch_normalize": when(
        lambda theirs: theirs.get(f"{CORRECTION}.rollout_is") is not None,
        same("correction_config.rollout_is_batch_normalize"),
        "counts for rollout_is only",
    ),
    f"{CORRECTION}.rollout_rs": computed(_rejection, "correction_config.rollout_rs"),
    f"{CORRECTION}.rollout_rs_threshold": computed(_rejection_threshold, "correction_config.rollout_rs_threshold"),
    f"{CORRECTION}.bypass_mode": same("correction_config.bypass_mode"),
    f"{CORRECTION}.loss_type": when(
        lambda theirs: bool(theirs.get(f"{CORRECTION}.bypass_mode")),
        only("ppo_clip", reason="under bypass_mode the loss is loss_mode's"),
        "counts for bypass_mode only",
    ),
    "algorithm.rollout_correction": only(reason="its fields are known, no other form"),
    "algorithm.use_pf_ppo": only(False, reason="samples are not weighed again"),
    "algorithm.pf_ppo.*": needless("counts for use_pf_ppo only"),
}


TRAINER_RULES: Mapping[str, Rule] = {
    "trainer.critic_warmup": computed(_warmup, "critic.critic_warmup"),
    "trainer.val_before_train": needless("changes nothing in training"),
    "trainer.val_only": only(False, reason="a run trains"),
    "trainer.log_val_generations": needless("samples are written to output_dir"),
    "trainer.rollout_data_dir": needless("samples are written to output_dir"),
    "trainer.validation_data_dir": needless("samples are written to output_dir"),
    "trainer.esi_redundant_time": needless("a run is stopped from outside"),
    "trainer.checkpoint_callback_class": only(reason="checkpoints call nothing"),
    "trainer.ray_wait_register_center_timeout": needless("ranks are started by moesaic or torchrun"),
    "trainer.use_v1": needless("two trainers of one algorithm"),
    "trainer.use_legacy_worker_impl": needless("two trainers of one algorithm"),
    "trainer.v1.trainer_mode": only("sync", reason="a step generates, then trains"),
    "trainer.v1.*": needless("counts for other modes"),
    "transfer_queue.enable": only(False, reason="a step's samples are on every rank"),
    "transfer_queue.*": needless("counts for transfer_queue.enable only"),
    "skip.*.enable": only(False, reason="every step generates"),
    "skip.*": needless("counts for skip.*.enable only"),
    "ray_init.*": needless("ranks are started by moesaic or torchrun"),
    "ray_kwargs.*": needless("ranks are started by moesaic or torchrun"),
}


PPO_RULES: Mapping[str, Rule] = {
    **DATA_RULES,
    **ACTOR_RULES,
    **REF_RULES,
    **ROLLOUT_RULES,
    **{f"actor_rollout_ref.{name}": rule for name, rule in model_rules("model").items()},
    "actor_rollout_ref.hybrid_engine": only(True, reason="the engine is on the ranks that train"),
    "actor_rollout_ref.nccl_timeout": same("dist_timeout"),
    **CRITIC_RULES,
    **ALGORITHM_RULES,
    **distillation_rules(),
    **REWARD_RULES,
    **TRAINER_RULES,
}


PPO = Tool(name="verl PPO", rules=MappingProxyType({**COMMON, **PPO_RULES}))
