"""Datasets of a recipe: one or several, weights, streaming, and what doesn't go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.config import RecipeError, check_recipe, load_recipe
from moesaic.config.recipe import Recipe
from tests.unit.model_folders import write_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model_folder(tmp_path, {"model_type": "qwen3_moe", "num_experts": 8})
    (tmp_path / "a.txt").touch()
    return tmp_path


def find(model: Path, **fields: Any) -> set[str]:
    plain = {"model": str(model), "train_dataset": "some/set", "output_dir": str(model / "run"), **fields}
    return {problem.field for problem in check_recipe(Recipe.model_validate(plain))}


def test_one_dataset_and_a_list_of_one_are_the_same() -> None:
    one, listed = (Recipe.model_validate({"model": "m", "train_dataset": value}) for value in ("a", [{"path": "a"}]))
    assert one == listed and [dataset.path for dataset in one.train_dataset] == ["a"]
    assert one.eval_dataset == () == Recipe.model_validate({**one.model_dump(), "eval_dataset": None}).eval_dataset


@pytest.mark.parametrize(
    "fields",
    [
        {"train_dataset": ["a", "b"]},
        {"train_dataset": [{"path": "a", "weight": 2.0}, {"path": "b", "weight": 1.0}]},
        {"train_dataset": {"path": "a", "streaming": True}, "max_steps": 3},
        {"eval_dataset": ["a", {"path": "a", "split": "test"}]},
        {"stage": "pt"},
        {"stage": "pt", "train_dataset": {"path": "a", "format": "text"}},
        {"micro_batch_tokens": 2048, "global_batch_size": 7},
    ],
)
def test_good_ones(model: Path, fields: dict[str, Any]) -> None:
    assert find(model, **fields) == set()


STREAM = {"path": "a", "streaming": True}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"train_dataset": []}, "train_dataset"),
        ({"train_dataset": [{"path": "a", "weight": 1.0}, "b"]}, "train_dataset.weight"),
        ({"train_dataset": STREAM}, "train_dataset.streaming"),
        ({"train_dataset": [STREAM | {"weight": 1.0}, {"path": "b", "weight": 1.0}]}, "train_dataset.streaming"),
        ({"train_dataset": [STREAM, STREAM | {"path": "b"}], "max_steps": 1}, "train_dataset.weight"),
        (
            {"train_dataset": [STREAM | {"weight": 1.0}, STREAM | {"weight": 1.0, "buffer_size": 5}], "max_steps": 1},
            "train_dataset.buffer_size",
        ),
        ({"train_dataset": "no.txt", "stage": "pt"}, "train_dataset"),
        ({"train_dataset": ["a", "no.jsonl"]}, "train_dataset[1]"),
        ({"eval_dataset": ["a", "a"]}, "eval_dataset"),
        ({"eval_dataset": [], "eval_steps": 3}, "eval_steps"),
        ({"stage": "pt", "train_dataset": {"path": "a", "format": "alpaca"}}, "train_dataset.format"),
        ({"train_dataset": {"path": "a", "format": "text"}}, "train_dataset.format"),
        ({"eval_dataset": ["b", {"path": "a", "format": "text"}]}, "eval_dataset[1].format"),
    ],
)
def test_what_does_not_go_together(model: Path, fields: dict[str, Any], field: str) -> None:
    assert find(model, **fields) == {field}


BY_TOKENS = {"micro_batch_tokens": 4096, "global_batch_size": 7}


@pytest.mark.parametrize(
    ("fields", "field", "rule", "remedy"),
    [
        ({"packing": True}, "packing", "lie end to end anyhow", "remove packing"),
        ({"micro_batch_size": 4}, "micro_batch_size", "says how large", "one of the two"),
        ({"global_batch_size": None}, "global_batch_size", "how many samples", "set global_batch_size"),
        ({"cutoff_len": 4097}, "micro_batch_tokens", "cutoff_len = 4097 tokens", "set 4097 or more"),
        ({"train_dataset": STREAM, "max_steps": 1}, "micro_batch_tokens", "a stream's aren't known", "packing: true"),
    ],
)
def test_what_micro_batches_by_tokens_refuse(
    model: Path, fields: dict[str, Any], field: str, rule: str, remedy: str
) -> None:
    plain = {"model": str(model), "train_dataset": "a", "output_dir": str(model / "run"), **BY_TOKENS, **fields}
    (problem,) = check_recipe(Recipe.model_validate(plain), 4)
    assert problem.field == field and rule in problem.rule and remedy in problem.remedy, problem


def test_a_budget_that_only_fits_before_rounding(model: Path) -> None:
    """Rows are cut by cp and tp: of 10 tokens, 8 can be used by 2 * 2 ranks."""
    plain = {"model": str(model), "train_dataset": "a", "output_dir": str(model / "run"), **BY_TOKENS}
    plain |= {"micro_batch_tokens": 10, "cutoff_len": 9, "cp_size": 2, "tp_size": 2}
    (problem,) = (one for one in check_recipe(Recipe.model_validate(plain)) if one.field == "micro_batch_tokens")
    assert "in multiples of cp_size * tp_size = 4" in problem.rule and "set 12 or more" in problem.remedy


def test_micro_batches_by_tokens_are_not_yet_for_linear_attention(model: Path) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    write_model_folder(model, {"model_type": "qwen3_moe", "num_experts": 8, **layers})
    assert find(model, **BY_TOKENS) == {"micro_batch_tokens"}


def test_text_files_are_for_pt_and_not_for_streaming(model: Path) -> None:
    file = str(model / "a.txt")
    assert find(model, train_dataset=file) == {"train_dataset.format"}
    assert find(model, train_dataset=file, stage="pt") == set()
    streamed = {"path": file, "streaming": True}
    assert find(model, train_dataset=streamed, stage="pt", max_steps=1) == {"train_dataset.streaming"}


def test_problems_inside_a_list_are_named(model: Path) -> None:
    datasets = "[a, {path: b, weights: 2}, {format: alpacca}, 3]"
    text = f"model: {model}\noutput_dir: {model}/run\ntrain_dataset: {datasets}\n"
    (model / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(model / "recipe.yaml")
    problems = {problem.field: problem for problem in caught.value.problems}
    assert problems.keys() == {
        "train_dataset",
        "train_dataset.weights",
        "train_dataset.path",
        "train_dataset.format",
    }
    assert problems["train_dataset.weights"].remedy == "did you mean train_dataset.weight?"
    (model / "recipe.yaml").write_text(text.replace(", {path: b, weights: 2}, {format: alpacca}, 3", ", b"))
    recipe = load_recipe(model / "recipe.yaml", ["eval_dataset=[c, {path: d, split: test}]"])
    assert [dataset.path for dataset in (*recipe.train_dataset, *recipe.eval_dataset)] == ["a", "b", "c", "d"]
