"""verl's PPO trainer: what completions are worth, and what a teacher says of them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.config.foreign.rules import computed, needless, only, when
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Value
from moesaic.config.foreign.verl_parts import home

FUNCTION = "reward.custom_reward_function"
LEGACY_FUNCTION = "custom_reward_function"
DISTILLATION = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
OWN_FUNCTIONS = (
    "verl chooses one of its own functions by data_source: name one in reward.functions (`math` compares answers of "
    "mathematics)"
)


def is_distilled(theirs: Theirs) -> bool:
    """Whether there is a teacher."""
    return bool(theirs.get("distillation.enabled"))


def is_distilled_by_policy(theirs: Theirs) -> bool:
    """Whether advantages are the teacher's, and nothing else."""
    return (
        is_distilled(theirs)
        and bool(theirs.get(f"{DISTILLATION}.use_policy_gradient"))
        and not theirs.get(f"{DISTILLATION}.use_task_rewards", True)
    )


def _is_by_loss(theirs: Theirs) -> bool:
    return is_distilled(theirs) and not theirs.get(f"{DISTILLATION}.use_policy_gradient")


def _needs_no_reward(theirs: Theirs) -> bool:
    return is_distilled(theirs) and not theirs.get(f"{DISTILLATION}.use_task_rewards", True)


def _function(prefix: str) -> Rule:
    """A file and a name in it; the older section goes before the newer one."""

    def apply(value: Any, theirs: Theirs) -> Outcome:
        if prefix == FUNCTION and theirs.get(f"{LEGACY_FUNCTION}.path"):
            return Needless(f"{LEGACY_FUNCTION} goes before it")
        if value:
            name = theirs.get(f"{prefix}.name", "compute_score")
            return Value({"reward.functions": [f"{home(value)}:{name}"]})
        if prefix == LEGACY_FUNCTION or _needs_no_reward(theirs) or theirs.get("reward.reward_model.enable"):
            return Needless("unset")
        return NoEquivalent(OWN_FUNCTIONS)

    return computed(apply, "reward.functions")


def _model(prefix: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        if not theirs.get(f"{prefix}.enable"):
            return Needless("no reward model")
        if not value:
            return NoEquivalent("the reward model has no path")
        return Value({"reward.model": home(value)}, "a sequence classifier of one label")

    return computed(apply, "reward.model")


def _overlong(prefix: str) -> dict[str, Rule]:
    """DAPO's penalty of completions that come near the longest."""

    def apply(target: str) -> Rule:
        def convert(value: Any, theirs: Theirs) -> Outcome:
            if not theirs.get(f"{prefix}.enable"):
                return Needless("counts for its enable only")
            return Value({target: int(value) if target.endswith("len") else float(value)})

        return computed(convert, target)

    return {
        f"{prefix}.enable": needless("part of its len"),
        f"{prefix}.len": apply("reward.overlong_buffer_len"),
        f"{prefix}.penalty_factor": apply("reward.overlong_penalty_factor"),
        f"{prefix}.log": needless("a metric"),
    }


REWARD_RULES: Mapping[str, Rule] = {
    f"{FUNCTION}.path": _function(FUNCTION),
    f"{FUNCTION}.name": needless("part of its path"),
    f"{LEGACY_FUNCTION}.path": _function(LEGACY_FUNCTION),
    f"{LEGACY_FUNCTION}.name": needless("part of its path"),
    f"{FUNCTION}.reward_kwargs*": only(
        {}, reason="functions get no arguments of their own: write them into the function"
    ),
    "reward.reward_manager.source": only("register", reason="rewards are functions, a model, an environment"),
    "reward.reward_manager.name": only(
        "naive", "dapo", reason="rewards are functions, a model, an environment: write what it does as a function"
    ),
    "reward.reward_manager.module.*": needless("counts for source: importlib only"),
    "reward.num_workers": needless("speed only"),
    **_overlong("reward.reward_kwargs.overlong_buffer_cfg"),
    "reward.reward_kwargs.max_resp_len": needless("rollout.sampling.max_tokens says it"),
    "reward.reward_model.enable": only(False, True, reason="true or false"),
    "reward.reward_model.model_path": _model("reward.reward_model"),
    "reward.reward_model.enable_resource_pool": only(False, reason="the model is on the ranks that train"),
    "reward.reward_model.*": needless("the model runs as the others do, without an engine"),
    "reward.sandbox_fusion.url": only(reason="functions call what they need"),
    "reward.sandbox_fusion.*": needless("counts for its url only"),
    "sandbox_fusion.url": only(reason="functions call what they need"),
    "sandbox_fusion.*": needless("counts for its url only"),
    **_overlong("reward_model.overlong_buffer"),
    "reward_model.enable": only(False, True, reason="true or false"),
    "reward_model.model.path": _model("reward_model"),
    "reward_model.model.external_lib": only(reason="models are transformers' own"),
    "reward_model.model.trust_remote_code": only(False, reason="models are transformers' own"),
    "reward_model.reward_manager": only("naive", "dapo", reason="write what it does as a function"),
    "reward_model.enable_resource_pool": only(False, reason="the model is on the ranks that train"),
    "reward_model.reward_loop_*": only(reason="write what it does as a function"),
    "reward_model.*": needless("the model runs as the others do, without an engine"),
}


def _mode(value: Any, theirs: Theirs) -> Outcome:
    if not theirs.get(f"{DISTILLATION}.use_policy_gradient"):
        if value == "forward_kl_topk":
            return Value({"stage": "rl", "distillation_config.mode": value})
        return NoEquivalent("as a loss: forward_kl_topk")
    if value not in ("k1", "kl"):
        return NoEquivalent("by policy gradient: k1")
    if not is_distilled_by_policy(theirs):
        return NoEquivalent("by policy gradient, without rewards of the task: use_task_rewards: false")
    return Value(
        {
            "stage": "rl",
            "distillation_config.mode": "policy_gradient",
            "algorithm.adv_estimator": "on_policy_distillation",
        }
    )


def _coef(value: Any, theirs: Theirs) -> Outcome:
    if not theirs.get(f"{DISTILLATION}.use_task_rewards", True):
        return Needless("counts for use_task_rewards only")
    return Value({"distillation_config.coef": float(value)})


def _clip(side: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        if not is_distilled_by_policy(theirs):
            return Needless("counts for use_policy_gradient only")
        value = theirs.get(f"{DISTILLATION}.clip_ratio", 0.2) if value is None else value
        return Value({f"algorithm.clip_ratio_{side}": float(value)})

    return computed(apply, f"algorithm.clip_ratio_{side}")


def distillation_rules() -> dict[str, Rule]:
    """Of the section ``distillation``: none counts unless it is enabled."""
    rules = {
        f"{DISTILLATION}.loss_mode": computed(_mode, "stage", "distillation_config.mode", "algorithm.adv_estimator"),
        f"{DISTILLATION}.topk": computed(
            lambda value, theirs: (
                Value({"distillation_config.topk": value})
                if _is_by_loss(theirs)
                else Needless("counts for forward_kl_topk only")
            ),
            "distillation_config.topk",
        ),
        f"{DISTILLATION}.use_task_rewards": computed(
            lambda value, theirs: (
                Value({"distillation_config.use_task_rewards": bool(value)})
                if _is_by_loss(theirs)
                else Needless("part of loss_mode")
            ),
            "distillation_config.use_task_rewards",
        ),
        f"{DISTILLATION}.distillation_loss_coef": computed(_coef, "distillation_config.coef"),
        f"{DISTILLATION}.loss_max_clamp": computed(
            lambda value, _: (
                Needless("unset") if value is None else Value({"distillation_config.loss_max_clamp": float(value)})
            ),
            "distillation_config.loss_max_clamp",
        ),
        f"{DISTILLATION}.log_prob_min_clamp": only(reason="log-probabilities are taken as they are"),
        f"{DISTILLATION}.use_policy_gradient": needless("part of loss_mode"),
        f"{DISTILLATION}.policy_loss_mode": only("vanilla", reason="vanilla, as theirs"),
        f"{DISTILLATION}.clip_ratio": needless("clip_ratio_low and clip_ratio_high go before it"),
        f"{DISTILLATION}.clip_ratio_low": _clip("low"),
        f"{DISTILLATION}.clip_ratio_high": _clip("high"),
        f"{DISTILLATION}.*chunked*": needless("speed only"),
        f"{TEACHER}.model_path": computed(
            lambda value, _: Value({"teacher.model": home(value)}) if value else NoEquivalent("no teacher is named"),
            "teacher.model",
        ),
        f"{TEACHER}.*": needless("the teacher answers on the ranks that train, without an engine"),
        "distillation.teacher_models.*.model_path": only(reason="one teacher, under the name teacher_model"),
        "distillation.teacher_models.*": needless("the teacher answers on the ranks that train, without an engine"),
        "distillation.enabled": needless("part of distillation_loss.loss_mode"),
        "distillation.n_gpus_per_node": needless("the teacher is on the ranks that train"),
        "distillation.nnodes": needless("the teacher is on the ranks that train"),
        "distillation.teacher_key": needless("one teacher answers all"),
    }

    return {name: when(is_distilled, rule, "counts for distillation only") for name, rule in rules.items()}
