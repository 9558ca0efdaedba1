"""The recipe's fields: their number, their documentation, what follows from them; and every recipe we ship."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from moesaic.config import (
    KernelConfig,
    Problem,
    Recipe,
    RecipeError,
    check_recipe,
    dump_recipe,
    load_recipe,
    resolve_sizes,
    save_recipe,
)
from moesaic.config.fields import RecipeField, list_fields
from moesaic.config.foreign import translate
from moesaic.config.foreign.table import Value
from moesaic.config.problem import show
from moesaic.config.recipe import RL_FIELDS
from moesaic.config.verl_names import VERL_NAMES
from tests.unit.model_folders import write_model_folder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "recipe.md"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
MARKS = ("<!-- fields -->\n", "<!-- end of fields -->\n")
VERL_MARKS = ("<!-- defaults of verl -->\n", "<!-- end of defaults -->\n")

VERL_CONFIG = Path(__file__).parent / "vectors" / "verl_ppo_trainer.yaml"
# Fields of a role that verl has, though not of a teacher.
ROLE_KEYS = (
    *("cp_size", "ppo_micro_batch_size_per_gpu", "micro_batch_tokens"),
    *("activation_checkpointing", "reshard_after_forward"),
)

# What verl's file says of one machine and one run; and what says the same as our default, or stands for ours.
NO_DEFAULTS = (
    *("model", "train_dataset", "eval_dataset", "output_dir", "stage", "dp_size", "dist_config.name", "master_dtype"),
    *("kl_config.use", "distillation_config.mode"),
)

# More fields are more to learn, to document and to combine: raising this number is a decision.
NUM_FIELDS = 210

TINY = {"model_type": "qwen3_moe", "num_experts": 8, "num_attention_heads": 4, "max_position_embeddings": 128}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
}

# Recipe -> ranks, and the model whose config.json it needs.
SHIPPED: Mapping[str, tuple[int, Mapping[str, object]]] = {
    **{f"rl/{name}_tiny.yaml": (4, TINY) for name in ("grpo", "ppo", "dapo", "gspo", "opd")},
    **{f"rl/qwen3_30b_a3b_{name}_8gpu.yaml": (8, QWEN3_30B) for name in ("grpo", "dapo")},
    "quickstart.yaml": (4, {"model_type": "qwen2_moe", "num_experts": 4}),
    "sft/qwen3_235b_a22b_hsdp_128gpu.yaml": (128, {"model_type": "qwen3_moe", "num_experts": 128}),
    "sft/qwen3_30b_a3b_8gpu.yaml": (8, {"model_type": "qwen3_moe", "num_experts": 128}),
    "sft/qwen3_30b_a3b_fsdp2_8gpu.yaml": (8, {"model_type": "qwen3_moe", "num_experts": 128}),
    "sft/tiny.yaml": (2, TINY),
    "sft/qwen3_5_35b_a3b_fsdpturbo_16gpu.yaml": (
        16,
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "num_experts": 256}},
    ),
}


def build_recipe(**fields: object) -> Recipe:
    return Recipe.model_validate({"model": "m", "train_dataset": "d", **fields})


def render_table() -> str:
    """The table of docs/recipe.md, from the classes."""
    lines = ["| field | type | default | whose | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_render_row, list_fields())]) + "\n"


def _render_row(field: RecipeField) -> str:
    is_section_below = isinstance(field.default, dict) and field.type_text == "section" and field.path != "dist_config"
    default = "**required**" if field.is_required else "see below" if is_section_below else f"`{show(field.default)}`"
    only = f" Only under {' and '.join(f'`{name}`' for name in field.variants)}." if field.variants else ""
    verl = f" verl: {', '.join(f'`{name}`' for name in field.verl_names)}." if field.verl else ""
    return f"| `{field.path}` | {field.type_text} | {default} | {field.origin} | {field.description}{only}{verl} |"


def render_verl_defaults() -> str:
    """The table of docs/recipe.md: what verl's own configuration, translated, says otherwise than our defaults."""
    theirs = yaml.safe_load(VERL_CONFIG.read_text(encoding="utf-8"))
    theirs["actor_rollout_ref"]["actor"]["use_kl_loss"] = True
    theirs["distillation"]["enabled"] = True
    theirs["distillation"]["distillation_loss"]["loss_mode"] = "forward_kl_topk"
    fields = {field.path: field for field in list_fields()}
    said = [line.outcome.fields for line in translate("verl", theirs).lines if isinstance(line.outcome, Value)]
    values = {path: value for each in said for path, value in each.items()}
    shown = {path: (show(fields[path].default), show(values[path])) for path in fields if path in values}
    lines = ["| field | here | verl |", "|---|---|---|"]
    for path, (ours, verls) in shown.items():
        if ours != verls and path not in NO_DEFAULTS:
            lines.append(f"| `{path}` | {'none' if fields[path].is_required else f'`{ours}`'} | `{verls}` |")
    return "\n".join(lines) + "\n"


def _split_docs(marks: tuple[str, str] = MARKS) -> tuple[str, str, str]:
    before, rest = DOCS.read_text(encoding="utf-8").split(marks[0])
    table, after = rest.split(marks[1])
    return before, table, after


def test_number_of_fields_is_frozen() -> None:
    assert len(list_fields()) == NUM_FIELDS


def test_docs_list_the_fields_as_they_are() -> None:
    assert _split_docs()[1] == render_table(), "run: python -m tests.unit.test_config_recipe"


def test_docs_list_the_defaults_that_are_not_verls() -> None:
    assert _split_docs(VERL_MARKS)[1] == render_verl_defaults(), "run: python -m tests.unit.test_config_recipe"


def test_every_field_says_what_it_is_and_whose() -> None:
    for field in list_fields():
        assert field.description.endswith("."), field.path
        assert field.origin in ("FSDPTurbo", "LLaMA-Factory v1", "Hugging Face", "verl", "moesaic"), field.path
        assert "|" not in field.description


def test_names_of_verl_are_verls() -> None:
    fields = {field.path: field for field in list_fields()}
    assert set(VERL_NAMES) <= set(fields)
    known = set(flatten(yaml.safe_load(VERL_CONFIG.read_text(encoding="utf-8"))))
    # kept out of the composed file, and read by its DAPO reward manager
    known |= {f"reward.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("len", "penalty_factor")}
    named = {name for names in VERL_NAMES.values() for name in names.split(", ")}
    assert named <= known, named - known
    # A field that claims to be verl's has a name there.
    ours = {path for path, field in fields.items() if path.partition(".")[0] in RL_FIELDS and field.origin == "verl"}
    lost = {"actor.model", "ref.model", *(f"teacher.{key}" for key in ROLE_KEYS), "ref.activation_checkpointing"}
    lost |= {"kl_config", "rollout.val_sampling.max_tokens"}
    assert ours - set(VERL_NAMES) == lost


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of fields and sections."""
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")


def test_importing_config_imports_no_torch() -> None:
    heavy = ("torch", "transformers", "datasets", "numpy", "safetensors")
    code = f"import sys, moesaic.config; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_recipe_is_frozen_and_strict() -> None:
    recipe = build_recipe()
    with pytest.raises(ValidationError):
        recipe.seed = 1  # type: ignore[misc]
    for bad in ({"micro_batch_size": "2"}, {"bf16": 1}, {"seed": True}, {"learning_rate": float("nan")}, {"new": 1}):
        with pytest.raises(ValidationError):
            build_recipe(**bad)


def test_a_dataset_may_be_a_path() -> None:
    assert (
        build_recipe(train_dataset="a.jsonl").train_dataset
        == build_recipe(train_dataset={"path": "a.jsonl"}).train_dataset
    )


@pytest.mark.parametrize(
    ("fields", "compute", "storage"),
    [
        ({}, "bf16", "fp32"),
        ({"bf16": False}, "fp32", "fp32"),
        ({"master_dtype": "bf16"}, "bf16", "bf16"),
        ({"dist_config": {"name": "fsdpturbo"}}, "bf16", "bf16"),
        ({"dist_config": {"name": "fsdpturbo"}, "bf16": False}, "fp32", "fp32"),
        ({"dist_config": {"name": "fsdpturbo"}, "master_dtype": "fp32"}, "bf16", "fp32"),
    ],
)
def test_types_of_parameters(fields: dict[str, object], compute: str, storage: str) -> None:
    recipe = build_recipe(**fields)
    assert (recipe.compute_dtype, recipe.storage_dtype) == (compute, storage)


def test_expert_sizes_follow_the_recipe() -> None:
    assert (build_recipe(mp_replicate_size=2).ep_size, build_recipe(mp_replicate_size=2).edp_size) == (1, 2)
    recipe = build_recipe(mp_replicate_size=2, dist_config={"name": "moesaic", "ep_size": 4})
    assert (recipe.ep_size, recipe.edp_size, resolve_sizes(recipe, 16).efsdp_size) == (4, 2, 2)
    recipe = build_recipe(mp_replicate_size=2, dist_config={"name": "moesaic", "ep_size": 4, "edp_size": 1})
    assert (recipe.edp_size, resolve_sizes(recipe, 16).efsdp_size) == (1, 4)


def test_kernel_names_split_at_commas() -> None:
    config = KernelConfig(name="auto, flash-linear-attention", include_kernels="a ,b")
    assert (config.names, config.kernels) == (("auto", "flash-linear-attention"), ("a", "b"))
    assert KernelConfig(include_kernels="auto").kernels == ()


def test_a_dumped_recipe_loads_as_the_same(tmp_path: Path) -> None:
    write_model_folder(tmp_path, {"model_type": "qwen3_moe", "num_experts": 8})
    recipe = build_recipe(
        model=str(tmp_path),
        output_dir=str(tmp_path / "run"),
        learning_rate=1e-7,
        optim_config={"betas": [0.8, 0.9]},
        dist_config={"name": "moesaic", "ep_size": 4, "fsdp_ignored_modules": ["model.embed_tokens"]},
    )
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert set(yaml.safe_load(dump_recipe(recipe))) == set(Recipe.model_fields)


def test_the_list_of_shipped_recipes_is_complete() -> None:
    assert {path.relative_to(ROOT / "recipes").as_posix() for path in RECIPES} == set(SHIPPED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_check(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # of packages for rewards
    world_size, config = SHIPPED[path.relative_to(ROOT / "recipes").as_posix()]
    write_model_folder(tmp_path, config)
    (tmp_path / "data.jsonl").touch()
    overrides = [f"model={tmp_path}", f"train_dataset.path={tmp_path}/data.jsonl", "resume_from_checkpoint="]
    overrides.append(f"output_dir={tmp_path}/run")
    if "eval_dataset" in path.read_text():
        overrides.append(f"eval_dataset.path={tmp_path}/data.jsonl")
    if "teacher:" in path.read_text():
        overrides.append(f"teacher.model={tmp_path}")
    recipe = load_recipe(path, overrides, world_size=world_size)
    assert check_recipe(recipe, world_size) == []
    assert f"World {world_size}:" in path.read_text(), "its comment says how many ranks it is for"


def test_problems_read_as_a_list() -> None:
    problem = Problem(field="seed", value=-1, rule="must be 0 or more", remedy="set 0")
    assert str(problem) == "seed: -1: must be 0 or more; set 0"
    error = RecipeError([problem, Problem(field="model", value=None, rule="is required", remedy="set it")], "r.yaml")
    assert str(error) == (
        "r.yaml: 2 problems\n"
        "  seed: -1\n      rule:   must be 0 or more\n      remedy: set 0\n"
        "  model (not set)\n      rule:   is required\n      remedy: set it"
    )


def test_values_are_shown_as_yaml_on_one_line() -> None:
    shown = [show(value) for value in ("text", 4, (0.9, 1e-8), {"a": None}, True, "x" * 200)]
    assert shown == ["text", "4", "[0.9, 1.0e-08]", "{a: null}", "true", "x" * 100 + " ..."]


if __name__ == "__main__":  # write the tables into the docs
    for marks, render in ((MARKS, render_table), (VERL_MARKS, render_verl_defaults)):
        before, _, after = _split_docs(marks)
        DOCS.write_text(before + marks[0] + render() + marks[1] + after, encoding="utf-8")
