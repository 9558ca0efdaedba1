"""Settings that nothing would read: refused, so that no one believes in them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from moesaic.config.case import Case, Check
from moesaic.config.problem import Problem
from moesaic.config.recipe import RL_FIELDS, Recipe, RouterConfig
from moesaic.config.rl_check import has_policy_loss
from moesaic.config.roles import max_tokens
from moesaic.config.section import Section


def _uses_reference(recipe: Recipe) -> bool:
    return recipe.kl_config.use != "off"


def _weighs(recipe: Recipe) -> bool:
    return recipe.correction_config.rollout_is is not None


def _distills(recipe: Recipe) -> bool:
    return recipe.distillation_config.mode != "off"


def _distills_by_loss(recipe: Recipe) -> bool:
    return recipe.distillation_config.mode == "forward_kl_topk"


def _has_mode(*modes: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.algorithm.loss_mode in modes


def _has_estimator(*estimators: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.algorithm.adv_estimator in estimators


# What a field counts for: how that is told, in which field, and in words.
_Condition = tuple[Callable[[Recipe], bool], str, str]
_KL: _Condition = (_uses_reference, "kl_config.use", "kl_config.use: loss or reward")
_IS: _Condition = (_weighs, "correction_config.rollout_is", "a correction_config.rollout_is")
_GAE: _Condition = (_has_estimator("gae"), "algorithm.adv_estimator", "adv_estimator: gae")
_DISTILLATION: _Condition = (_distills, "distillation_config.mode", "a distillation_config.mode")
_TOP_K: _Condition = (_distills_by_loss, "distillation_config.mode", "distillation_config.mode: forward_kl_topk")
_LOSS = "algorithm.loss_mode"

COUNTS_FOR: Mapping[str, _Condition] = MappingProxyType(
    {
        "ref": _KL,
        "critic": _GAE,
        "teacher": _DISTILLATION,
        "kl_config.estimator": _KL,
        "kl_config.coef": _KL,
        "kl_config.target": (lambda recipe: recipe.kl_config.use == "reward", "kl_config.use", "kl_config.use: reward"),
        "kl_config.horizon": (
            lambda recipe: recipe.kl_config.target is not None,
            "kl_config.target",
            "a kl_config.target",
        ),
        "algorithm.lam": _GAE,
        "algorithm.gamma": (
            _has_estimator("gae", "reinforce_plus_plus"),
            "algorithm.adv_estimator",
            "adv_estimator: gae or reinforce_plus_plus",
        ),
        "algorithm.loss_scale_factor": (
            lambda recipe: recipe.algorithm.loss_agg_mode == "seq-mean-token-sum-norm",
            "algorithm.loss_agg_mode",
            "loss_agg_mode: seq-mean-token-sum-norm",
        ),
        "algorithm.clip_ratio_low": (_has_mode("vanilla", "gspo"), _LOSS, "loss_mode: vanilla or gspo"),
        "algorithm.clip_ratio_high": (_has_mode("vanilla", "gspo"), _LOSS, "loss_mode: vanilla or gspo"),
        "algorithm.clip_ratio_c": (_has_mode("vanilla"), _LOSS, "loss_mode: vanilla"),
        "algorithm.cispo_ratio_min": (_has_mode("cispo"), _LOSS, "loss_mode: cispo"),
        "algorithm.cispo_ratio_max": (_has_mode("cispo"), _LOSS, "loss_mode: cispo"),
        "algorithm.sapo_tau_pos": (_has_mode("sapo"), _LOSS, "loss_mode: sapo"),
        "algorithm.sapo_tau_neg": (_has_mode("sapo"), _LOSS, "loss_mode: sapo"),
        "algorithm.dppo_delta_low": (_has_mode("dppo_tv"), _LOSS, "loss_mode: dppo_tv"),
        "algorithm.dppo_delta_high": (_has_mode("dppo_tv"), _LOSS, "loss_mode: dppo_tv"),
        "algorithm.max_num_gen_batches": (
            lambda recipe: recipe.algorithm.filter_groups,
            "algorithm.filter_groups",
            "algorithm.filter_groups",
        ),
        "correction_config.rollout_is_threshold": _IS,
        "correction_config.rollout_is_batch_normalize": _IS,
        "correction_config.rollout_is_threshold_lower": (
            lambda recipe: recipe.correction_config.rollout_is == "icepop",
            "correction_config.rollout_is",
            "correction_config.rollout_is: icepop",
        ),
        "correction_config.rollout_rs_threshold": (
            lambda recipe: bool(recipe.correction_config.rollout_rs),
            "correction_config.rollout_rs",
            "a correction_config.rollout_rs",
        ),
        "distillation_config.coef": _DISTILLATION,
        "distillation_config.loss_max_clamp": _DISTILLATION,
        "distillation_config.topk": _TOP_K,
        "distillation_config.use_task_rewards": _TOP_K,
        "reward.timeout_s": (
            lambda recipe: bool(recipe.reward.functions),
            "reward.functions",
            "reward.functions",
        ),
        "reward.overlong_penalty_factor": (
            lambda recipe: recipe.reward.overlong_buffer_len is not None,
            "reward.overlong_buffer_len",
            "a reward.overlong_buffer_len",
        ),
        "rollout.max_turns": (
            lambda recipe: recipe.rollout.environment is not None,
            "rollout.environment",
            "a rollout.environment",
        ),
        "rollout.max_batch_tokens": (
            lambda recipe: recipe.rollout.engine == "hf",
            "rollout.engine",
            "rollout.engine: hf",
        ),
    }
)


def _field(section: Section, path: str) -> tuple[object, object]:
    """A field's value and its default."""
    name, _, rest = path.partition(".")
    value: object = dict(section)[name]
    if rest:
        assert isinstance(value, Section), path
        return _field(value, rest)
    return value, type(section).model_fields[name].get_default(call_default_factory=True)


def _shown(value: object) -> object:
    """A section without its defaults."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


def _unused(path: str) -> Check:
    """The check that a field which differs from its default counts for something."""
    counts, decided_by, words = COUNTS_FOR[path]

    def find(case: Case) -> Iterable[Problem]:
        if case.recipe.stage != "rl" or counts(case.recipe):
            return
        value, default = _field(case.recipe, path)
        if value != default:
            yield Problem(
                field=path, value=_shown(value), rule=f"counts for {words} alone", remedy="remove it, or set that"
            )

    return Check(needs=("stage", path, decided_by), find=find)


# What a policy loss reads, where nothing of COUNTS_FOR stands against it.
OF_POLICY_LOSS = (
    *("algorithm.loss_mode", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high", "algorithm.clip_ratio_c"),
    "correction_config.rollout_is",
)


def _policy_loss_problems(case: Case) -> Iterable[Problem]:
    recipe = case.recipe
    if recipe.stage != "rl" or has_policy_loss(recipe):
        return
    for path in OF_POLICY_LOSS:
        value, default = _field(recipe, path)
        if value != default and (path not in COUNTS_FOR or COUNTS_FOR[path][0](recipe)):
            rule = "without distillation_config.use_task_rewards there is no policy loss that would read it"
            yield Problem(field=path, value=value, rule=rule, remedy="remove it, or set that")


def _other_stage_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.stage == "rl":
        return
    for name in RL_FIELDS:
        value, default = _field(case.recipe, name)
        if value != default:
            rule, remedy = "counts for stage: rl alone", "remove it, or set stage: rl"
            yield Problem(field=name, value=_shown(value), rule=rule, remedy=remedy)


def _sft_field_problems(case: Case) -> Iterable[Problem]:
    """Fields of supervised training that mean nothing, or nothing yet, for trajectories."""
    recipe = case.recipe
    if recipe.stage != "rl":
        return
    if recipe.packing:
        rule, remedy = "trajectories lie end to end under micro_batch_tokens", "set micro_batch_tokens instead"
        yield Problem(field="packing", value=True, rule=rule, remedy=remedy)
    if recipe.load_best_model_at_end:
        rule = "it keeps the lowest held-out loss, and under stage: rl there is none"
        remedy = "remove it; checkpoints are kept by save_steps"
        yield Problem(field="load_best_model_at_end", value=True, rule=rule, remedy=remedy)
    if recipe.dump is not None:
        rule = "not yet: a step of stage: rl has several updates, and none of them is written down"
        yield Problem(field="dump.steps", value=recipe.dump.steps, rule=rule, remedy="remove dump")
    if recipe.router_config != RouterConfig():
        rule, value = "not yet: policy losses leave the balance of the experts alone", _shown(recipe.router_config)
        yield Problem(field="router_config", value=value, rule=rule, remedy="remove it")
    longest, default = max_tokens(recipe), Recipe.model_fields["cutoff_len"].default
    if recipe.cutoff_len not in (default, longest):
        rule = f"nothing is cut: rollout.max_prompt_length + rollout.sampling.max_tokens = {longest} is the longest"
        yield Problem(field="cutoff_len", value=recipe.cutoff_len, rule=rule, remedy="remove it, or set those")
    for key, default_of in (("weight", None), ("streaming", False)):
        values = [dict(dataset)[key] for dataset in recipe.train_dataset]
        if any(value != default_of for value in values):
            rule = "the prompts of all datasets are taken as they are, in one shuffled order"
            yield Problem(field=f"train_dataset.{key}", value=values, rule=rule, remedy="remove it")


UNUSED_CHECKS: tuple[Check, ...] = (
    Check(needs=("stage",), find=_other_stage_problems),
    Check(
        needs=(
            *(
                "router_config.*",
                "stage",
                "packing",
                "load_best_model_at_end",
                "dump.*",
                "cutoff_len",
                "train_dataset.*",
            ),
            *("rollout.max_prompt_length", "rollout.sampling.max_tokens"),
        ),
        find=_sft_field_problems,
    ),
    Check(
        needs=("stage", "distillation_config.mode", "distillation_config.use_task_rewards", *OF_POLICY_LOSS),
        find=_policy_loss_problems,
    ),
    *(_unused(path) for path in COUNTS_FOR),
)
