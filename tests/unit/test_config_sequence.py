"""Heads and attention that cp_size and tp_size can't share are refused before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.config import Recipe
from moesaic.config.check import check_recipe
from moesaic.config.problem import Problem
from tests.unit.model_folders import write_model_folder

HEADS = {"model_type": "qwen3_moe", "num_experts": 8, "num_attention_heads": 12, "num_key_value_heads": 4}
LATENT = {**HEADS, "model_type": "deepseek_v3", "n_routed_experts": 8, "kv_lora_rank": 16}
HYBRID = {
    "model_type": "qwen3_5_moe",
    "text_config": {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}


def find(folder: Path, config: dict[str, object], fields: dict[str, object], world_size: int = 96) -> list[Problem]:
    write_model_folder(folder, config)
    defaults = {"model": str(folder), "train_dataset": "some/dataset", "output_dir": str(folder / "run")}
    return check_recipe(Recipe.model_validate({**defaults, **fields}), world_size)


@pytest.mark.parametrize(
    ("config", "fields", "field", "rule", "remedy"),
    [
        (HEADS, {"tp_size": 8}, "tp_size", "12 attention heads", "[1, 2, 3, 4, 6, 12]"),
        (HEADS, {"tp_size": 6}, "tp_size", "4 key and value heads", "choose one of [1, 2, 4, 12]"),
        (HEADS, {"cp_size": 8}, "cp_size", "12 attention heads that a rank has", "[1, 2, 3, 4, 6, 12]"),
        (HEADS, {"cp_size": 4, "tp_size": 2}, "cp_size", "6 attention heads that a rank has", "[1, 2, 3, 6]"),
        (HYBRID, {"cp_size": 3}, "cp_size", "8 value heads of linear attention", "a product among [1, 2, 4, 8]"),
        (HYBRID, {"tp_size": 12}, "tp_size", "4 key heads", "a product among [1, 2, 4, 8]"),
        (
            HEADS,
            {"cp_size": 2, "attn_implementation": "eager"},
            "attn_implementation",
            "one of sdpa, flash_attention_2, flash_attention_3",
            "remove it",
        ),
    ],
)
def test_what_cannot_be_shared(
    tmp_path: Path, config: dict[str, object], fields: dict[str, object], field: str, rule: str, remedy: str
) -> None:
    (problem,) = find(tmp_path, config, fields)
    assert problem.field == field and rule in problem.rule and remedy in problem.remedy, problem


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (HEADS, {"tp_size": 4, "cp_size": 3}),
        (HEADS, {"tp_size": 12}),  # fewer key and value heads than ranks
        (LATENT, {"tp_size": 6}),  # keys and values of all heads are made from one latent
        (HYBRID, {"cp_size": 2, "tp_size": 2}),
        (HEADS, {"attn_implementation": "eager"}),
        (HEADS, {"cp_size": 2, "attn_implementation": "flash_attention_2"}),
    ],
)
def test_what_can(tmp_path: Path, config: dict[str, object], fields: dict[str, object]) -> None:
    assert find(tmp_path, config, fields) == []
