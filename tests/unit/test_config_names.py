"""Keys that are no fields: which field was meant, and that one wrong line hides no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesaic.config import RecipeError, load_recipe
from moesaic.config.parse import parse_recipe
from tests.unit.model_folders import write_model_folder

# A key that isn't a field -> the field that was meant.
MEANT = {
    # verl's names, in the section of that meaning, or anywhere
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "rollout.tp_size",
    "rollout.val_kwargs": "rollout.val_sampling",
    "actor.use_kl_loss": "kl_config.use",
    "actor.kl_loss_coef": "kl_config.coef",
    "algorithm.kl_penalty": "kl_config.estimator",
    "critic.lr": "critic.learning_rate",
    "actor.lr": "learning_rate",
    "lr": "learning_rate",
    "grad_clip": "max_grad_norm",
    "test_freq": "eval_steps",
    "save_freq": "save_steps",
    "total_epochs": "num_train_epochs",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "critic.ppo_max_token_len_per_gpu": "critic.micro_batch_tokens",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.ppo_micro_batch_size_per_gpu",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "max_response_length": "rollout.sampling.max_tokens",
    # a role's own name of a field of the recipe
    "actor.micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    # the end of a name; a slip goes before other trainers' names
    "algorithm.estimator": "algorithm.adv_estimator",
    "critic.warmup": "critic.critic_warmup",
    "reward.timeout": "reward.timeout_s",
    "timeout": "dist_timeout",
    "rollout.temperature": "rollout.sampling.temperature",
    "actor.clip_ratio_low": "algorithm.clip_ratio_low",
    "rollout.cp_size": "cp_size",
}


@pytest.mark.parametrize("key", MEANT)
def test_the_field_that_was_meant_is_named(key: str) -> None:
    data: dict[str, Any] = {"model": "m", "train_dataset": "d", "stage": "rl"}
    section, _, name = key.rpartition(".")
    data |= {section: {name: 1}} if section else {name: 1}
    _, (problem,), _ = parse_recipe(data)
    assert problem.field == key
    assert re.search(rf"(?<![.\w]){re.escape(MEANT[key])}(?![.\w])", problem.remedy), problem.remedy


@pytest.mark.parametrize("section", ["actor_rollout_ref", "data", "trainer"])
def test_a_configuration_of_verl_is_sent_to_its_translation(section: str) -> None:
    _, (problem,), _ = parse_recipe({"model": "m", "train_dataset": "d", section: {"a": 1}})
    assert problem.field == section and "moesaic check --from verl" in problem.remedy


def test_one_wrong_line_hides_no_other(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model_folder(model, {"model_type": "qwen3_moe", "num_experts": 8, "num_attention_heads": 4})
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
model: {model}
train_dataset: {{path: some/prompts, options: {{1: 2}}, format: prompt}}
output_dir: {model}/run
stage: rl
global_batch_size: 8
temperature: 0.7
rollout: {{sampling_: {{}}, tp_size: 3, sampling: {{max_tokenz: 7, topk: 3, temperature: hot, n: 1}}, val_sampling: }}
critic: {{learning_rte: 1, ep_size: two}}
reward: {{functions: exact_match, weights: [1, 2]}}
algorithm: {{clip_ratio: 0.2}}
kl_config: {{use: loss, estimator: k1}}
"""
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["rollout.sampling.top_p=1.5", "kl_config.coeff=1"], world_size=4)
    remedies = {problem.field: problem.remedy for problem in caught.value.problems}
    assert remedies.pop("algorithm.clip_ratio").startswith("write algorithm.clip_ratio_low")
    assert remedies.pop("kl_config.estimator").startswith("set k3+ or k2")
    assert {field: remedies.pop(field) for field in list(remedies) if remedies[field].startswith("did you mean")} == {
        "temperature": "did you mean rollout.sampling.temperature or rollout.val_sampling.temperature?",
        "rollout.sampling_": "did you mean rollout.sampling?",
        "rollout.sampling.max_tokenz": "did you mean rollout.sampling.max_tokens?",
        "rollout.sampling.topk": "did you mean rollout.sampling.top_k?",
        "critic.learning_rte": "did you mean critic.learning_rate?",
        "kl_config.coeff": "did you mean kl_config.coef?",
    }
    assert remedies.keys() == {
        *("train_dataset.options", "rollout.sampling.temperature", "rollout.sampling.top_p", "rollout.tp_size"),
        *("critic.ep_size", "reward.weights", "rollout.sampling.n"),
    }


# Values that a field doesn't take -> a part of the problem.
NEAR = {
    "algorithm.adv_estimator: GRPO": "did you mean grpo?",
    "algorithm.loss_agg_mode: token_mean": "did you mean token-mean?",
    "rollout.engine: vlm": "did you mean vllm?",
    "distillation_config.mode: forward_kl": "did you mean forward_kl_topk?",
    "rollout.stop_token_ids: 5": "must be a list",
    "correction_config.rollout_rs_threshold: [0.5_2]": "must be text, in quotes where YAML would read a number",
}


@pytest.mark.parametrize("line", NEAR)
def test_a_value_of_another_kind_is_explained(line: str) -> None:
    path, _, value = line.partition(": ")
    section, _, key = path.partition(".")
    data = {"model": "m", "train_dataset": "d", "stage": "rl", section: {key: yaml.safe_load(value)}}
    _, (problem,), _ = parse_recipe(data)
    assert problem.field == path and NEAR[line] in f"{problem.rule} {problem.remedy}"
