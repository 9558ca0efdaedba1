"""verl's PPO trainer as a recipe: its own composed configuration, and fields that don't mean what they seem to."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesaic.config import RecipeError, load_recipe
from moesaic.config.foreign import Translation, render, translate
from moesaic.config.foreign.table import Needless, NoEquivalent, Unknown
from tests.unit.model_folders import write_model_folder

COMPOSED = Path(__file__).parent / "vectors" / "verl_ppo_trainer.yaml"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS = "distillation.distillation_loss"


@cache
def load() -> dict[str, Any]:
    """verl's file."""
    data = yaml.safe_load(COMPOSED.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def composed(**overrides: Any) -> dict[str, Any]:
    """verl's file with dotted fields set, as ``++key=value`` does on its command line."""
    data = copy.deepcopy(load())
    for path, value in overrides.items():
        *sections, key = path.split(".")
        mapping = data
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[key] = value
    return data


def read(**overrides: Any) -> Translation:
    return translate("verl", composed(**overrides))


def outcomes(translation: Translation, kind: type) -> set[str]:
    return {line.field for line in translation.lines if isinstance(line.outcome, kind)}


def field(translation: Translation, path: str) -> Any:
    """A field of the recipe; None where it isn't set."""
    value: Any = translation.recipe()
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


# What verl's file leaves open: which engine, and which reward (it has its own by ``data_source``).
OPEN = {f"{ROLLOUT}.name", "reward.custom_reward_function.path"}


def test_the_composed_file_names_what_has_no_equivalent() -> None:
    translation = read()
    assert outcomes(translation, NoEquivalent) == OPEN
    assert outcomes(translation, Unknown) == set()


def test_the_composed_file_is_a_recipe(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8})
    (tmp_path / "rewards.py").touch()
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    translation = read(
        **{
            f"{ROLLOUT}.name": "hf",
            "reward.custom_reward_function.path": f"{tmp_path}/rewards.py",
            "actor_rollout_ref.model.path": f"{tmp_path}/model",
            "data.train_files": f"{tmp_path}/train.parquet",
            "data.val_files": f"{tmp_path}/test.parquet",
            "trainer.default_local_dir": f"{tmp_path}/run",
            "trainer.logger": ["console"],
        }
    )
    assert translation.is_complete, translation.table()
    (tmp_path / "ours.yaml").write_text(render(translation, translation.recipe(), COMPOSED))
    with pytest.raises(RecipeError) as caught:  # theirs: a critic of another model
        load_recipe(tmp_path / "ours.yaml")
    assert [problem.field for problem in caught.value.problems] == ["critic.model"]
    recipe = load_recipe(tmp_path / "ours.yaml", ["critic.model="])
    assert (recipe.stage, recipe.dp_size, recipe.global_batch_size) == ("rl", 8, 1024)
    assert (recipe.algorithm.adv_estimator, recipe.algorithm.ppo_mini_batch_size) == ("gae", 256)
    assert recipe.reward.functions == (f"{tmp_path}/rewards.py:compute_score",)
    assert (recipe.learning_rate, recipe.critic.learning_rate, recipe.critic.cliprange_value) == (1e-6, 1e-5, 0.5)
    assert (recipe.rollout.tp_size, recipe.rollout.val_sampling) == (2, None)
    assert [dataset.format for dataset in recipe.train_dataset + recipe.eval_dataset] == ["verl", "verl"]


GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}

DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}

# Their fields -> a field here, and its value; None: not set.
SAME: list[tuple[dict[str, Any], str, Any]] = [
    # estimators
    (GRPO, "algorithm.adv_estimator", "grpo"),
    ({**GRPO, "algorithm.norm_adv_by_std_in_grpo": False}, "algorithm.adv_estimator", "dr_grpo"),
    ({"algorithm.adv_estimator": "rloo_vectorized"}, "algorithm.adv_estimator", "rloo"),
    ({**GRPO, "algorithm.gamma": 0.9}, "algorithm.gamma", None),
    ({"algorithm.gamma": 0.9, "algorithm.lam": 0.95}, "algorithm.gamma", 0.9),
    ({"algorithm.lam": 0.95}, "algorithm.lam", 0.95),
    # clipping
    ({f"{ACTOR}.clip_ratio": 0.1}, "algorithm.clip_ratio_low", 0.2),
    ({f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": None}, "algorithm.clip_ratio_low", 0.1),
    ({f"{ACTOR}.clip_ratio_high": 0.28}, "algorithm.clip_ratio_high", 0.28),
    ({f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4}, "algorithm.clip_ratio_low", 3e-4),
    ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "algorithm.clip_ratio_c", None),
    ({f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 1.0}, "algorithm.cispo_ratio_min", 0.0),
    ({f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_high": 4.0}, "algorithm.cispo_ratio_max", 5.0),
    ({f"{ACTOR}.policy_loss.loss_mode": "cispo"}, "algorithm.clip_ratio_low", None),
    ({f"{ACTOR}.policy_loss.loss_mode": "dppo_tv", f"{ACTOR}.clip_ratio_c": 20.0}, "algorithm.dppo_delta_low", 0.2),
    ({**GRPO, f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.1}, "algorithm.sapo_tau_neg", 1.1),
    ({f"{ACTOR}.tau_neg": 1.1}, "algorithm.sapo_tau_neg", None),
    # aggregation
    (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 99},
        "algorithm.loss_scale_factor",
        99.0,
    ),
    (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 7},
        "algorithm.loss_scale_factor",
        7.0,
    ),
    ({**GRPO, f"{ACTOR}.policy_loss.loss_mode": "sapo"}, "algorithm.loss_agg_mode", "seq-mean-token-mean"),
    ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "algorithm.loss_agg_mode", "token-mean"),
    # divergence
    ({f"{ACTOR}.use_kl_loss": True}, "kl_config", {"use": "loss", "coef": 0.001, "estimator": "k3"}),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "low_var_kl+"}, "kl_config.estimator", "k3+"),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "mse"}, "kl_config.estimator", "k2"),
    ({}, "kl_config", None),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
        "kl_config",
        {"use": "reward", "estimator": "k1", "coef": 0.001, "target": 0.1, "horizon": 10000},
    ),
    ({"algorithm.use_kl_in_reward": True}, "kl_config.target", None),
    # dynamic sampling, overlong completions
    ({**GRPO, "algorithm.filter_groups.enable": True}, "algorithm.filter_groups", True),
    (
        {
            **GRPO,
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.max_num_gen_batches": 4,
        },
        "algorithm.max_num_gen_batches",
        4,
    ),
    (
        {
            "reward.reward_manager.name": "dapo",
            "reward.reward_kwargs.overlong_buffer_cfg": {"enable": True, "len": 64, "penalty_factor": 2, "log": False},
        },
        "reward",
        {"overlong_buffer_len": 64, "overlong_penalty_factor": 2.0},
    ),
    # corrections
    ({f"{CORRECTION}.rollout_is": "token"}, "correction_config.rollout_is_threshold", 2.0),
    (
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
        "correction_config",
        {
            "rollout_is": "icepop",
            "rollout_is_threshold_lower": 0.5,
            "rollout_is_threshold": 5.0,
            "rollout_is_batch_normalize": False,
            "bypass_mode": False,
        },
    ),
    (
        {f"{CORRECTION}.rollout_rs": "token_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": "0.5_2,9"},
        "correction_config.rollout_rs_threshold",
        ["0.5_2", "9"],
    ),
    (
        {f"{CORRECTION}.rollout_rs": "token_k2,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold": 0.1},
        "correction_config.rollout_rs_threshold",
        ["0.1", "0.1"],
    ),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"}, "correction_config.rollout_is", None),
    # sampling
    ({f"{ROLLOUT}.top_k": 50}, "rollout.sampling.top_k", 50),
    (
        {
            f"{ROLLOUT}.val_kwargs.n": 4,
            f"{ROLLOUT}.val_kwargs.do_sample": True,
            f"{ROLLOUT}.val_kwargs.temperature": 0.6,
        },
        "rollout.val_sampling",
        {"n": 4, "temperature": 0.6, "top_p": 1.0, "top_k": 0, "max_tokens": 512},
    ),
    (
        {f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.temperature": 0.6},
        "rollout.val_sampling.temperature",
        0.0,
    ),
    # roles
    ({"trainer.critic_warmup": 1}, "critic.critic_warmup", None),
    ({"trainer.critic_warmup": 20}, "critic.critic_warmup", 19),
    ({**GRPO, "trainer.critic_warmup": 20}, "critic", None),
    ({"critic.ulysses_sequence_parallel_size": 2}, "critic.cp_size", 2),
    ({"critic.fsdp.ulysses_sequence_parallel_size": 2}, "critic.cp_size", 2),
    ({**DYNAMIC, "critic.fsdp.ulysses_sequence_parallel_size": 2}, "critic.micro_batch_tokens", 65536),
    (
        {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": 2},
        "ref.cp_size",
        2,
    ),
    ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}, "cp_size", 2),
    (DYNAMIC, "micro_batch_tokens", 16384),
    (DYNAMIC, "critic.micro_batch_tokens", 32768),
    # per GPU there, of all ranks that share a sequence here
    ({**DYNAMIC, "critic.ulysses_sequence_parallel_size": 2}, "critic.micro_batch_tokens", 65536),
    ({**DYNAMIC, f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "micro_batch_tokens", 32768),
    ({**DYNAMIC, f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "critic.micro_batch_tokens", None),
    (
        {**DYNAMIC, f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 4},
        "ref.micro_batch_tokens",
        65536,
    ),
    (
        {**DYNAMIC, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        "ref",
        {"cp_size": 1, "micro_batch_tokens": 16384},
    ),
    (
        {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8, f"{ACTOR}.use_kl_loss": True},
        "ref.ppo_micro_batch_size_per_gpu",
        8,
    ),
    ({"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8}, "ref", None),
    ({f"{ACTOR}.fsdp_config.param_offload": True}, "park_idle_roles", True),
    ({f"{ACTOR}.fsdp_config.param_offload": True}, "offload", None),
    ({f"{ACTOR}.fsdp_config.offload_policy": True, "critic.fsdp.offload_policy": True}, "offload", True),
    ({f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": True}, "gradient_accumulation", "unsharded"),
    # rewards
    (
        {"custom_reward_function.path": "old.py", "reward.custom_reward_function.path": "new.py"},
        "reward.functions",
        ["old.py:compute_score"],
    ),
    ({"reward.reward_model.enable": True, "reward.reward_model.model_path": "scorer"}, "reward.model", "scorer"),
    # distillation
    (
        {
            "distillation.enabled": True,
            "distillation.teacher_models.teacher_model.model_path": "big",
            f"{LOSS}.loss_mode": "k1",
            f"{LOSS}.use_policy_gradient": True,
            f"{LOSS}.use_task_rewards": False,
            f"{LOSS}.clip_ratio_high": 0.3,
        },
        "algorithm",
        {
            "adv_estimator": "on_policy_distillation",
            "clip_ratio_high": 0.3,
            "clip_ratio_low": 0.2,
            "clip_ratio_c": 3.0,
            "ppo_mini_batch_size": 256,
            "loss_agg_mode": "token-mean",
            "entropy_coeff": 0.0,
            "ppo_epochs": 1,
            "filter_groups": False,
        },
    ),
    (
        {
            **GRPO,
            "distillation.enabled": True,
            "distillation.teacher_models.teacher_model.model_path": "big",
            f"{LOSS}.loss_mode": "forward_kl_topk",
            f"{LOSS}.distillation_loss_coef": 0.5,
        },
        "distillation_config",
        {"mode": "forward_kl_topk", "topk": 32, "use_task_rewards": True, "coef": 0.5},
    ),
    ({"distillation.teacher_models.teacher_model.model_path": "big"}, "teacher", None),
]


@pytest.mark.parametrize(("theirs", "path", "ours"), SAME, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(SAME)])
def test_fields_with_an_equivalent(theirs: dict[str, Any], path: str, ours: Any) -> None:
    translation = read(**theirs)
    assert outcomes(translation, NoEquivalent) <= OPEN and not outcomes(translation, Unknown)
    assert field(translation, path) == ours


SAPO = {f"{ACTOR}.policy_loss.loss_mode": "sapo"}

# Their fields -> the one that is named.
LOST: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.adv_estimator": "optimal_token_baseline"}, "algorithm.adv_estimator"),
    ({**GRPO, "critic.enable": True}, "algorithm.adv_estimator"),
    ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, f"{ACTOR}.policy_loss.loss_mode"),
    ({f"{ACTOR}.policy_loss.loss_mode": "dppo_tv"}, f"{ACTOR}.clip_ratio_c"),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "kl"}, f"{ACTOR}.kl_loss_type"),
    ({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "abs"}, "algorithm.kl_penalty"),
    ({f"{ACTOR}.shuffle": True}, f"{ACTOR}.shuffle"),
    (
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine", "critic.optim.lr_scheduler_type": "cosine"},
        f"{ACTOR}.optim.zero_indexed_step",
    ),
    ({"critic.optim.weight_decay": 0.1}, "critic.optim.weight_decay"),
    ({"critic.optim.optimizer": "SGD"}, "critic.optim.optimizer"),
    ({"critic.loss_agg_mode": "token-sum"}, "critic.loss_agg_mode"),
    (
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "critic.loss_scale_factor": 7},
        "critic.loss_scale_factor",
    ),
    ({**GRPO, **SAPO, f"{ACTOR}.entropy_coeff": 0.01}, f"{ACTOR}.loss_agg_mode"),
    ({**GRPO, **SAPO, f"{ACTOR}.use_kl_loss": True}, f"{ACTOR}.loss_agg_mode"),
    (SAPO, "critic.loss_agg_mode"),
    ({**GRPO, "algorithm.filter_groups": {"enable": True, "metric": "acc"}}, "algorithm.filter_groups.metric"),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"}, f"{CORRECTION}.loss_type"),
    ({f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_rs": "token_k1"}, f"{CORRECTION}.rollout_rs"),
    (
        {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "0.5_2"},
        f"{CORRECTION}.rollout_is",
    ),
    ({f"{ROLLOUT}.multi_turn.enable": True}, f"{ROLLOUT}.multi_turn.enable"),
    ({f"{ROLLOUT}.response_length": 99}, f"{ROLLOUT}.response_length"),
    ({"data.truncation": "left"}, "data.truncation"),
    ({"reward.reward_manager.name": "prime"}, "reward.reward_manager.name"),
    ({"reward.reward_model.enable": True}, "reward.reward_model.model_path"),
    ({"trainer.v1.trainer_mode": "separate_async"}, "trainer.v1.trainer_mode"),
    ({"actor_rollout_ref.model.lora_rank": 8}, "actor_rollout_ref.model.lora_rank"),
    (
        {"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": "big"},
        f"{LOSS}.loss_mode",
    ),
    (
        {
            "distillation.enabled": True,
            "distillation.teacher_models.teacher_model.model_path": "big",
            f"{LOSS}.loss_mode": "k1",
            f"{LOSS}.use_policy_gradient": True,
        },
        f"{LOSS}.loss_mode",
    ),
]


@pytest.mark.parametrize(("theirs", "path"), LOST, ids=[path for _, path in LOST])
def test_fields_without_an_equivalent(theirs: dict[str, Any], path: str) -> None:
    assert outcomes(read(**theirs), NoEquivalent) - OPEN == {path}


@pytest.mark.parametrize("section", [ACTOR, ROLLOUT, "critic", "critic.optim", "actor_rollout_ref.ref", "distillation"])
def test_an_unknown_field_is_named(section: str) -> None:
    is_there = {f"{ACTOR}.use_kl_loss": True, "distillation.enabled": True}
    assert outcomes(read(**{f"{section}.brand_new": 1, **is_there}), Unknown) == {f"{section}.brand_new"}
    assert f"{ACTOR}.optim._target_" in outcomes(read(), Needless)


def test_a_part_of_a_file_is_read_as_far_as_it_goes() -> None:
    actor = {"ppo_micro_batch_size_per_gpu": 2, "ppo_max_token_len_per_gpu": 16384, "use_dynamic_bsz": True}
    translation = translate("verl", {"actor_rollout_ref": {"actor": actor}})
    assert translation.is_complete and translation.recipe() == {"micro_batch_tokens": 16384}
