"""Which quantised folders a recipe may train: those that loading unpacks; the others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.config import Problem, Recipe, check_recipe
from tests.unit.model_folders import write_model_folder

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def find(folder: Path, quantization: object, *, nested: bool = False) -> list[Problem]:
    config: dict[str, object] = {"num_experts": 8, "quantization_config": quantization}
    config = {"text_config": config} if nested else config
    write_model_folder(folder, {"model_type": "qwen3_moe", **config})
    recipe = Recipe.model_validate({"model": str(folder), "train_dataset": "a/b", "output_dir": str(folder / "run")})
    return check_recipe(recipe)


@pytest.mark.parametrize("quantization", [FP8, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, None])
def test_what_is_unpacked_may_be_trained(quantization: object, tmp_path: Path) -> None:
    assert find(tmp_path, quantization) == []


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors"},
        {"quant_method": "awq"},
        {"quant_method": "gptq", "bits": 4},
        {**FP8, "weight_block_size": None},
        {**FP8, "activation_scheme": "static"},
        {**FP8, "expert_dtype": "fp4"},
        {},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_not_unpacked_is_refused_by_name(quantization: dict[str, object], nested: bool, tmp_path: Path) -> None:
    (problem,) = find(tmp_path, quantization, nested=nested)
    assert problem.field == "model" and "bf16" in problem.remedy
    assert str(quantization.get("quant_method", "{}")) in problem.rule
