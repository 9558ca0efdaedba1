"""What the sections for ``stage: rl`` must satisfy together: algorithm, rewards, sampling, corrections. Torch-free.

Where roles and engines lie is ``rl_role_check.py``'s; settings that nothing would read are ``rl_unused.py``'s.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from moesaic.config.case import Case, Check
from moesaic.config.problem import Problem
from moesaic.config.recipe import Recipe
from moesaic.config.rl_sections import GROUP_ESTIMATORS, AlgorithmConfig

# Reward functions that come with the package, and the package that each needs.
BUILT_IN_REWARDS: Mapping[str, str | None] = MappingProxyType(
    {"exact_match": None, "math": "math_verify", "reasoning_gym": "reasoning_gym"}
)
OPTIONAL_EXTRA = "rl"


def trains_on_rewards(recipe: Recipe) -> bool:
    """Whether advantages are made of rewards: always, but where all there is to learn is the teacher's."""
    return recipe.distillation_config.mode != "policy_gradient" and has_policy_loss(recipe)


def has_policy_loss(recipe: Recipe) -> bool:
    """Whether there are advantages to learn from, be they of rewards or of the teacher."""
    distillation = recipe.distillation_config
    return distillation.mode != "forward_kl_topk" or distillation.use_task_rewards


def _reward_source_problems(recipe: Recipe) -> Iterable[Problem]:
    sources = (recipe.reward.functions, recipe.reward.model, recipe.rollout.environment)
    if trains_on_rewards(recipe) and not any(sources):
        rule = "nothing says what a completion is worth"
        remedy = "name a function, a reward.model, a rollout.environment, or a teacher to learn from instead "
        remedy += "(distillation_config)"
        yield Problem(field="reward.functions", value=[], rule=rule, remedy=remedy)


def reward_weight_problems(recipe: Recipe) -> Iterable[Problem]:
    """Weights that aren't one for each function and the model."""
    reward = recipe.reward
    count = len(reward.functions) + (reward.model is not None)
    if reward.weights and len(reward.weights) != count:
        rule = f"there are {len(reward.functions)} functions and {'a' if reward.model else 'no'} model to weigh"
        remedy = f"give {count} weights, functions first, or remove them" if count else "remove them"
        yield Problem(field="reward.weights", value=reward.weights, rule=rule, remedy=remedy)


def _reward_function_problems(recipe: Recipe) -> Iterable[Problem]:
    for name in recipe.reward.functions:
        if name not in BUILT_IN_REWARDS:
            yield from _function_problems("reward.functions", name, f"; built in: {', '.join(BUILT_IN_REWARDS)}")
            continue
        package = BUILT_IN_REWARDS[name]
        if package is not None:
            yield from package_problems("reward.functions", name, package)


def _environment_problems(recipe: Recipe) -> Iterable[Problem]:
    if recipe.rollout.environment is not None:
        yield from _function_problems("rollout.environment", recipe.rollout.environment, "")


def _function_problems(field: str, name: str, known: str) -> Iterable[Problem]:
    """A function is named by its file and name. The file isn't imported here."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        rule, remedy = f"a function is named as file.py:name{known}", "write e.g. rewards.py:score"
        yield Problem(field=field, value=name, rule=rule, remedy=remedy)
    elif not Path(path).is_file():
        rule = f"no such file: {path} (seen from {Path.cwd()})"
        yield Problem(field=field, value=name, rule=rule, remedy="correct the path, or write the function first")


def package_problems(field: str, value: str, package: str) -> Iterable[Problem]:
    """An optional package that isn't installed."""
    if importlib.util.find_spec(package) is None:
        rule, remedy = f"the package {package} isn't installed", f"pip install 'moesaic[{OPTIONAL_EXTRA}]'"
        yield Problem(field=field, value=value, rule=rule, remedy=remedy)


def _estimator_problems(recipe: Recipe) -> Iterable[Problem]:
    estimator, n = recipe.algorithm.adv_estimator, recipe.rollout.sampling.n
    if trains_on_rewards(recipe) and estimator in GROUP_ESTIMATORS and n < 2:
        rule = f"adv_estimator: {estimator} compares a prompt's completions with each other, and there is one"
        remedy = "set 2 or more (8 is usual), or an estimator without groups (gae, reinforce_plus_plus, remax)"
        yield Problem(field="rollout.sampling.n", value=n, rule=rule, remedy=remedy)


def _aggregation_problems(recipe: Recipe) -> Iterable[Problem]:
    algorithm = recipe.algorithm
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and algorithm.loss_scale_factor is None:
        rule = "seq-mean-token-sum-norm divides by a constant: each step's longest completion would be another one"
        remedy = f"set it, e.g. to rollout.sampling.max_tokens: {recipe.rollout.sampling.max_tokens}"
        yield Problem(field="algorithm.loss_scale_factor", value=None, rule=rule, remedy=remedy)


def _cispo_problems(recipe: Recipe) -> Iterable[Problem]:
    low, high = recipe.algorithm.cispo_ratio_min, recipe.algorithm.cispo_ratio_max
    if recipe.algorithm.loss_mode == "cispo" and not low <= 1 <= high:
        field, value = ("cispo_ratio_min", low) if low > 1 else ("cispo_ratio_max", high)
        rule = "the bounds are of the ratio itself, and must have 1 between them: no token is cut before it has moved"
        remedy = (
            "set cispo_ratio_min to 1 or less, cispo_ratio_max to 1 or more (1 + epsilon, where that is what it is)"
        )
        yield Problem(field=f"algorithm.{field}", value=value, rule=rule, remedy=remedy)


def _kl_problems(recipe: Recipe) -> Iterable[Problem]:
    kl = recipe.kl_config
    if kl.use == "loss" and kl.estimator == "k1":
        rule = "as a loss, k1's gradient has expectation zero: it pulls nowhere"
        remedy = "set k3+ or k2, whose gradient is that of the divergence, or use: reward"
        yield Problem(field="kl_config.estimator", value="k1", rule=rule, remedy=remedy)
    if kl.use == "reward" and kl.estimator == "k3+":
        rule = "nothing is differentiated in the reward, and k3+ is about a gradient"
        yield Problem(field="kl_config.estimator", value="k3+", rule=rule, remedy="set k1 (or k3, its value)")
    if kl.use == "reward" and not trains_on_rewards(recipe):
        rule = f"distillation_config.mode: {recipe.distillation_config.mode} makes no advantages of rewards"
        yield Problem(field="kl_config.use", value="reward", rule=rule, remedy="set loss, or off")


def _batch_problems(recipe: Recipe) -> Iterable[Problem]:
    size, mini = recipe.global_batch_size, recipe.algorithm.ppo_mini_batch_size
    if size is None:
        rule = "under stage: rl it is how many prompts a step generates for, and nothing else says it"
        remedy = "set it; the step trains on rollout.sampling.n times as many completions"
        yield Problem(field="global_batch_size", value=None, rule=rule, remedy=remedy)
    elif mini is not None and size % mini:
        fitting = [number for number in range(1, size + 1) if size % number == 0]
        rule = f"prompts of one update must divide the step's global_batch_size: {size}"
        remedy = f"choose one of {fitting}"
        yield Problem(field="algorithm.ppo_mini_batch_size", value=mini, rule=rule, remedy=remedy)


def _sampling_problems(recipe: Recipe) -> Iterable[Problem]:
    sampling, val_sampling = recipe.rollout.sampling, recipe.rollout.val_sampling
    if sampling.temperature == 0:
        rule = "greedy completions of a prompt are all the same one, and nothing is explored"
        yield Problem(field="rollout.sampling.temperature", value=0, rule=rule, remedy="set 1, or another above 0")
    if val_sampling is not None and val_sampling.temperature == 0 and val_sampling.n > 1:
        rule = "greedy completions of a prompt are all the same one"
        remedy = "set 1, or a temperature above 0"
        yield Problem(field="rollout.val_sampling.n", value=val_sampling.n, rule=rule, remedy=remedy)


def _bypass_problems(recipe: Recipe) -> Iterable[Problem]:
    config, temperature = recipe.correction_config, recipe.rollout.sampling.temperature
    if not config.bypass_mode:
        return
    if temperature not in (0, 1):
        rule = f"the engine's log-probabilities are of temperature 1, the policy's of {temperature}"
        remedy = "set bypass_mode: false, or rollout.sampling.temperature: 1"
        yield Problem(field="correction_config.bypass_mode", value=True, rule=rule, remedy=remedy)
    for name, value in (("rollout_is", config.rollout_is), ("rollout_rs", config.rollout_rs or None)):
        if value is not None:
            rule = "under bypass_mode the old log-probabilities are the engine's: the ratio has it all, and nothing is "
            rule += "left to correct"
            remedy = f"remove {name}, or bypass_mode"
            yield Problem(field=f"correction_config.{name}", value=value, rule=rule, remedy=remedy)


def _importance_problems(recipe: Recipe) -> Iterable[Problem]:
    config = recipe.correction_config
    low, high = config.rollout_is_threshold_lower, config.rollout_is_threshold
    if config.rollout_is == "icepop" and not low < high:
        rule, remedy = f"must be below rollout_is_threshold: {high}", "set e.g. 0.5, and 5.0 there"
        yield Problem(field="correction_config.rollout_is_threshold_lower", value=low, rule=rule, remedy=remedy)


def _rejection_problems(recipe: Recipe) -> Iterable[Problem]:
    names, thresholds = recipe.correction_config.rollout_rs, recipe.correction_config.rollout_rs_threshold
    field = "correction_config.rollout_rs_threshold"
    if len(set(names)) < len(names):
        rule, remedy = "names one twice", "keep one of them"
        yield Problem(field="correction_config.rollout_rs", value=names, rule=rule, remedy=remedy)
    if names and len(names) != len(thresholds):
        rule = f"rollout_rs names {len(names)}, and each has a threshold"
        yield Problem(field=field, value=thresholds, rule=rule, remedy=f"give {len(names)}, in the same order")
        return
    for name, text in zip(names, thresholds, strict=False):
        if name.endswith("k1") and rejection_bounds(text) is None:
            rule = f"{name} has a least and a largest ratio, both above 0, as low_high, or one above 1"
            yield Problem(field=field, value=text, rule=rule, remedy='write e.g. "0.5_2.0"')
        elif not name.endswith("k1") and _positive(text) is None:
            rule = f"{name} has one threshold, the largest value that is kept, above 0"
            yield Problem(field=field, value=text, rule=rule, remedy='write e.g. "0.1"')


def rejection_bounds(text: str) -> tuple[float, float] | None:
    """``low_high`` of k1's thresholds, or one number above 1 that stands for its inverse and itself; None where it is
    neither. Example: ``"0.5_4"`` -> ``(0.5, 4.0)``, ``"4"`` -> ``(0.25, 4.0)``."""
    first, underscore, second = text.partition("_")
    numbers = _positive(first), _positive(second) if underscore else _positive(first)
    if numbers[0] is None or numbers[1] is None:
        return None
    low, high = (numbers[0] if underscore else 1 / numbers[0]), numbers[1]
    return (low, high) if low < high else None


def _positive(text: str) -> float | None:
    try:
        number = 0.0 if "_" in text else float(text)  # Python reads 1_2 as 12
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _filter_problems(recipe: Recipe) -> Iterable[Problem]:
    if not recipe.algorithm.filter_groups:
        return
    field = "algorithm.filter_groups"
    if recipe.rollout.sampling.n < 2:
        rule, remedy = "a group of one completion has nothing to differ", "set rollout.sampling.n to 2 or more"
        yield Problem(field=field, value=True, rule=rule, remedy=remedy)
    if not trains_on_rewards(recipe):
        rule = f"distillation_config.mode: {recipe.distillation_config.mode} learns from groups of equal rewards too"
        yield Problem(field=field, value=True, rule=rule, remedy="remove it")
    elif not recipe.reward.functions and recipe.rollout.environment is None:
        rule = "groups are chosen while the engine generates, by functions' or an environment's rewards, and there is "
        rule += "only a model"
        yield Problem(field=field, value=True, rule=rule, remedy="remove it, or name a function in reward.functions")


def _overlong_problems(recipe: Recipe) -> Iterable[Problem]:
    length, longest = recipe.reward.overlong_buffer_len, recipe.rollout.sampling.max_tokens
    if length is not None and length >= longest:
        rule = f"it is the last part of rollout.sampling.max_tokens: {longest}"
        yield Problem(field="reward.overlong_buffer_len", value=length, rule=rule, remedy="set less than that")


def _distillation_problems(recipe: Recipe) -> Iterable[Problem]:
    mode, estimator = recipe.distillation_config.mode, recipe.algorithm.adv_estimator
    if mode != "off" and recipe.teacher.model is None:
        rule, remedy = f"distillation_config.mode: {mode} needs a model to learn from", "set its folder"
        yield Problem(field="teacher.model", value=None, rule=rule, remedy=remedy)
    is_distilled = estimator == "on_policy_distillation"
    if mode == "policy_gradient" and not is_distilled:
        rule = "distillation_config.mode: policy_gradient makes its advantages of the teacher's log-probabilities"
        remedy = "set on_policy_distillation"
        yield Problem(field="algorithm.adv_estimator", value=estimator, rule=rule, remedy=remedy)
    if mode != "policy_gradient" and is_distilled:
        rule = "its advantages are the teacher's, and distillation_config.mode says of no teacher, or of a loss"
        remedy = "set distillation_config.mode: policy_gradient, or another estimator"
        yield Problem(field="algorithm.adv_estimator", value=estimator, rule=rule, remedy=remedy)
    is_default = estimator == AlgorithmConfig.model_fields["adv_estimator"].default
    if not has_policy_loss(recipe) and not is_default and not is_distilled:
        rule = "without distillation_config.use_task_rewards no advantage is estimated"
        yield Problem(field="algorithm.adv_estimator", value=estimator, rule=rule, remedy="remove it, or set that")


def _warmup_problems(recipe: Recipe) -> Iterable[Problem]:
    warmup, max_steps = recipe.critic.critic_warmup, recipe.max_steps
    if max_steps is not None and warmup >= max_steps and recipe.algorithm.adv_estimator == "gae":
        rule = f"the run ends after max_steps: {max_steps}, before the actor is trained"
        yield Problem(field="critic.critic_warmup", value=warmup, rule=rule, remedy="set less, or more steps")


def _validation_problems(recipe: Recipe) -> Iterable[Problem]:
    if recipe.rollout.val_sampling is not None and not recipe.eval_dataset:
        rule, remedy = "needs prompts to validate on", "set eval_dataset, or remove val_sampling"
        value = recipe.rollout.val_sampling.model_dump(exclude_defaults=True)
        yield Problem(field="rollout.val_sampling", value=value, rule=rule, remedy=remedy)


def _built_in_data_problems(recipe: Recipe) -> Iterable[Problem]:
    """The task that made a row scores it, and only its own."""
    datasets = (*recipe.train_dataset, *recipe.eval_dataset)
    made = [dataset for dataset in datasets if dataset.format == "reasoning_gym"]
    for dataset in made[:1]:
        yield from package_problems("train_dataset.format", dataset.format, "reasoning_gym")
    if "reasoning_gym" in recipe.reward.functions and len(made) < len(datasets):
        others = [dataset.path for dataset in datasets if dataset not in made]
        rule = f"it scores rows that its own tasks made, and {', '.join(others)} isn't one of them"
        remedy = "set format: reasoning_gym there, or another function"
        yield Problem(field="reward.functions", value="reasoning_gym", rule=rule, remedy=remedy)


def for_rl(find: Callable[[Recipe], Iterable[Problem]], *needs: str) -> Check:
    """A check of ``stage: rl`` alone."""

    def find_in(case: Case) -> Iterable[Problem]:
        return find(case.recipe) if case.recipe.stage == "rl" else ()

    return Check(needs=("stage", *needs), find=find_in)


# What says whether there are rewards to train on.
_REWARDED = ("distillation_config.mode", "distillation_config.use_task_rewards")
_SOURCES = ("reward.functions", "reward.model", "rollout.environment")

RL_CHECKS: tuple[Check, ...] = (
    for_rl(_reward_source_problems, *_SOURCES, *_REWARDED),
    for_rl(reward_weight_problems, "reward.weights", "reward.functions", "reward.model"),
    for_rl(_reward_function_problems, "reward.functions"),
    for_rl(_environment_problems, "rollout.environment"),
    for_rl(_estimator_problems, "algorithm.adv_estimator", "rollout.sampling.n", *_REWARDED),
    for_rl(_aggregation_problems, "algorithm.loss_agg_mode", "algorithm.loss_scale_factor"),
    for_rl(_cispo_problems, "algorithm.loss_mode", "algorithm.cispo_ratio_min", "algorithm.cispo_ratio_max"),
    for_rl(_kl_problems, "kl_config.use", "kl_config.estimator", *_REWARDED),
    for_rl(_batch_problems, "global_batch_size", "algorithm.ppo_mini_batch_size"),
    for_rl(_sampling_problems, "rollout.sampling.temperature", "rollout.val_sampling.*"),
    for_rl(
        _bypass_problems,
        "correction_config.bypass_mode",
        "correction_config.rollout_is",
        "correction_config.rollout_rs",
        "rollout.sampling.temperature",
    ),
    for_rl(
        _importance_problems,
        "correction_config.rollout_is",
        "correction_config.rollout_is_threshold",
        "correction_config.rollout_is_threshold_lower",
    ),
    for_rl(_rejection_problems, "correction_config.rollout_rs", "correction_config.rollout_rs_threshold"),
    for_rl(_filter_problems, "algorithm.filter_groups", "rollout.sampling.n", *_SOURCES, *_REWARDED),
    for_rl(_overlong_problems, "reward.overlong_buffer_len", "rollout.sampling.max_tokens"),
    for_rl(_distillation_problems, "teacher.model", "algorithm.adv_estimator", *_REWARDED),
    for_rl(_warmup_problems, "critic.critic_warmup", "max_steps", "algorithm.adv_estimator"),
    for_rl(_validation_problems, "rollout.val_sampling.*", "eval_dataset.*"),
    for_rl(_built_in_data_problems, "reward.functions", "train_dataset.*", "eval_dataset.*"),
)
