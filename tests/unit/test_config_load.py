"""Reading a recipe: YAML, overrides, names and types; and that one wrong line never hides another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.config import MoesaicConfig, Problem, Recipe, RecipeError, check_recipe, load_recipe
from tests.unit.model_folders import write_model_folder

Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a recipe's text, completed with a model of 16 experts and a dataset."""
    write_model_folder(tmp_path, {"model_type": "qwen3_moe", "num_experts": 16})
    (tmp_path / "train.jsonl").touch()
    base = f"model: {tmp_path}\ntrain_dataset: {tmp_path}/train.jsonl\noutput_dir: {tmp_path}/run\n"

    def load_text(text: str, *overrides: str, world_size: int | None = None, base: str = base) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(base + text)
        return load_recipe(path, overrides, world_size=world_size)

    return load_text


def problems_of(load: Load, text: str, *overrides: str, **options: object) -> dict[str, Problem]:
    """Problems by field; fails where one field has two."""
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides, **options)
    by_field = {problem.field: problem for problem in caught.value.problems}
    assert len(by_field) == len(caught.value.problems), str(caught.value)
    return by_field


# The two examples of FSDPTurbo's integration into LLaMA-Factory, as they are.
TOPOLOGY = """
cp_size: 1

dist_config:
  name: fsdpturbo
  ep_size: 16
  ep_dispatcher: eager
"""
KERNELS = """
kernel_config:
  name: auto, flash-linear-attention
  include_kernels: chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
  chunk_size: 32
"""


def test_fsdpturbo_examples_load_and_check_at_ep_16(load: Load) -> None:
    recipe = load(TOPOLOGY + KERNELS, world_size=16)
    assert check_recipe(recipe, 16) == []
    assert (recipe.ep_size, recipe.kernel_config.chunk_size, recipe.storage_dtype) == (16, 32, "bf16")
    assert load(TOPOLOGY, "dist_config.ep_size=4", world_size=4).ep_size == 4


def test_fsdpturbo_takes_all_of_its_fields(load: Load) -> None:
    load(TOPOLOGY + "  fsdp_ignored_modules: [model.embed_tokens]\n  hook_modules: []\n  fsdp_implementation: native\n")


def test_defaults_are_path_a(load: Load) -> None:
    recipe = load("")
    assert (recipe.dist_config.name, recipe.stage, recipe.max_grad_norm) == ("fsdp2", "sft", 1.0)
    assert load("kernel_config:\ndist_config:\n") == recipe, "an empty section is an absent one"


def test_numbers_without_a_dot_are_numbers(load: Load) -> None:
    recipe = load("learning_rate: 1e-4\noptim_config: {eps: 1.5e2, weight_decay: 1}", "max_grad_norm=5E-1")
    assert recipe.learning_rate == 1e-4
    assert (recipe.optim_config.eps, recipe.optim_config.weight_decay) == (150.0, 1.0)
    assert recipe.max_grad_norm == 0.5


def test_overrides_reach_into_sections(load: Load) -> None:
    recipe = load(
        "dist_config: {name: fsdpturbo, ep_size: 16}\nmax_steps: 3",
        "dist_config.name=moesaic",
        "dist_config.ep_size=4",
        "optim_config.betas=[0.5, 0.6]",
        "max_steps=",
        "train_dataset.format=alpaca",
    )
    assert recipe.dist_config == MoesaicConfig(name="moesaic", ep_size=4)
    assert recipe.optim_config.betas == (0.5, 0.6)
    assert recipe.max_steps is None
    (dataset,) = recipe.train_dataset
    assert (dataset.format, Path(dataset.path).name) == ("alpaca", "train.jsonl")
    assert load("dist_config: {name: moesaic, ep_size: 4}", "dist_config={name: fsdp2}").ep_size == 1


def test_bad_overrides_are_problems_like_others(load: Load) -> None:
    found = problems_of(load, "seed: 1", "bare", "no_such=1", "seed.inner=2", "max_steps={", "cutoff_len=short")
    assert found.keys() == {"override", "no_such", "seed.inner", "max_steps", "cutoff_len"}
    assert found["seed.inner"].rule == "seed holds 1, which has no fields inside"


def test_unknown_keys_name_what_was_meant(load: Load) -> None:
    found = problems_of(
        load,
        """
leaning_rate: 1e-4
weight_decay: 0.1
ep_size: 4
flash_attn: sdpa
zzz: 1
optim_config: {betas_: [0.9, 0.99]}
""",
    )
    remedies = {field: problem.remedy for field, problem in found.items()}
    assert remedies.pop("flash_attn").startswith("write attn_implementation")
    assert remedies == {
        "leaning_rate": "did you mean learning_rate?",
        "weight_decay": "did you mean optim_config.weight_decay?",
        "ep_size": "did you mean dist_config.ep_size?",
        "zzz": "remove it; known fields: those of docs/recipe.md",
        "optim_config.betas_": "did you mean optim_config.betas?",
    }
    assert found["leaning_rate"].value == 1e-4


@pytest.mark.parametrize("field", ["dp_size", "cp_size", "mp_replicate_size", "mp_shard_size", "dist_timeout"])
def test_topology_does_not_go_into_dist_config(load: Load, field: str) -> None:
    found = problems_of(load, f"dist_config: {{name: fsdpturbo, ep_size: 4, {field}: 8}}", world_size=8)
    assert found.keys() == {f"dist_config.{field}"}
    assert found[f"dist_config.{field}"].remedy == f"move it to the top level: `{field}: 8`"


def test_the_spec_decides_which_modules_hold_experts(load: Load) -> None:
    found = problems_of(load, "ep_modules: [a]\ndist_config: {name: fsdpturbo, ep_modules: [a], ep_fsdp_modules: [b]}")
    assert found.keys() == {"ep_modules", "dist_config.ep_modules", "dist_config.ep_fsdp_modules"}
    assert all("spec decides" in problem.rule for problem in found.values())


def test_a_field_of_another_name_is_refused(load: Load) -> None:
    found = problems_of(load, "dist_config: {name: moesaic, ep_size: 4, hook_modules: []}", "dist_config.name=fsdp2")
    assert (
        found["dist_config.ep_size"].rule
        == "dist_config.name: fsdp2 has no such field; it belongs to moesaic and fsdpturbo"
    )
    assert (
        found["dist_config.hook_modules"].rule == "dist_config.name: fsdp2 has no such field; it belongs to fsdpturbo"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("moesiac", "did you mean moesaic?"),
        ("deepspeed", "`moesaic` for"),
        ("[1]", "`moesaic` for"),
        ("", "`moesaic` for"),
    ],
)
def test_an_unknown_name_hides_nothing(load: Load, name: str, remedy: str) -> None:
    found = problems_of(load, f"dist_config: {{name: {name}, ep_size: 3, ep_dispacher: eager}}", world_size=8)
    assert found["dist_config.name"].remedy.startswith(remedy)
    assert found.keys() == {"dist_config.name", "dist_config.ep_size", "dist_config.ep_dispacher"}


def test_bad_values_say_type_and_default(load: Load) -> None:
    found = problems_of(
        load,
        """
micro_batch_size: "2"
bf16: 1
seed: true
cp_mode: ring
max_grad_norm: .inf
dist_config: fsdp2
optim_config: {betas: [0.9, 1.0]}
kernel_config: {chunk_size: 33}
init_config: init_on_meta
""",
    )
    assert {field: problem.rule for field, problem in found.items()} == {
        "micro_batch_size": "must be a valid integer",
        "bf16": "must be a valid boolean",
        "seed": "must be a valid integer",
        "cp_mode": "must be 'ulysses'",
        "max_grad_norm": "must be a finite number",
        "dist_config": "must be a section",
        "optim_config.betas": "must be less than 1",
        "kernel_config.chunk_size": "must be 16, 32 or 64",
        "init_config": "must be a section",
    }
    assert found["micro_batch_size"].remedy == "set it by its type (integer), or remove it for the default 1"
    assert found["optim_config.betas"].value == [0.9, 1.0]


def test_missing_fields_are_named(load: Load) -> None:
    found = problems_of(load, "eval_dataset: {split: test}", base="")
    assert found.keys() == {"model", "train_dataset", "eval_dataset.path"}
    assert {problem.rule for problem in found.values()} == {"is required"}


def test_a_required_field_under_another_name_is_reported_once(load: Load) -> None:
    found = problems_of(load, "model_name_or_path: m\ndataset: d\n", base="")
    assert found.keys() == {"model_name_or_path", "dataset"}
    assert found["dataset"].rule == "is no field at the top level; here it is called train_dataset"


def test_everything_is_reported_together(load: Load) -> None:
    found = problems_of(
        load,
        """
learning_rate: fast
leaning_rate: 1e-4
stage: dpo
micro_batch_size: 2
global_batch_size: 24
mp_shard_size: 3
eval_steps: 5
dist_config:
  name: fsdpturbo
  ep_size: 6
  dp_size: 4
  ep_modules: [experts]
kernel_config: {name: "auto, liger", chunk_size: 48}
""",
        "no_equals_sign",
        world_size=16,
    )
    assert found.keys() == {
        "override",
        "learning_rate",
        "leaning_rate",
        "stage",
        "global_batch_size",
        "mp_shard_size",
        "eval_steps",
        "dist_config.ep_size",
        "dist_config.dp_size",
        "dist_config.ep_modules",
        "kernel_config.name",
        "kernel_config.chunk_size",
    }


def test_a_bad_field_is_not_blamed_twice(load: Load) -> None:
    """Checks that need an unread field are left out: its default would make up problems."""
    found = problems_of(
        load, "micro_batch_size: two\nglobal_batch_size: 9\nmp_replicate_size: x\nmp_shard_size: 4", world_size=8
    )
    assert found.keys() == {"micro_batch_size", "mp_replicate_size"}


def test_a_key_given_twice_is_a_problem(load: Load) -> None:
    found = problems_of(load, "seed: 1\nseed: 2\noptim_config: {eps: 1, eps: 2}\n")
    assert found["seed"].rule == "is given twice, the second time in line 5"
    assert found.keys() == {"seed", "eps"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("- a list", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: [", "must be YAML"),
        ("a: 2024-99-99", "must be YAML"),
    ],
)
def test_a_file_that_is_no_recipe(load: Load, text: str, rule: str) -> None:
    found = problems_of(load, text, base="")
    assert list(found) == ["recipe"] and found["recipe"].rule.startswith(rule)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="must be a readable UTF-8 file"):
        load_recipe(tmp_path / "none.yaml")
