"""What must hold between fields: sizes, batches, experts, combinations; each problem with its remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.config import ParallelSizes, Problem, Recipe, check_recipe, num_micro_batches, resolve_sizes
from moesaic.config.parallel import ep_size_problem, is_legal_ep_size
from moesaic.specs.base import NUM_EXPERTS_FIELDS
from moesaic.specs.refused import REFUSED_FAMILIES
from tests.unit.model_folders import write_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model_folder(tmp_path, {"model_type": "qwen3_moe", "num_experts": 9})
    return tmp_path


def find(model: Path, fields: Mapping[str, object], world_size: int | None = None) -> dict[str, Problem]:
    defaults = {"model": str(model), "train_dataset": "some/dataset", "output_dir": str(model / "run")}
    recipe = Recipe.model_validate({**defaults, **fields})
    return {problem.field: problem for problem in check_recipe(recipe, world_size)}


def moesaic(**fields: object) -> dict[str, object]:
    return {"dist_config": {"name": "moesaic", **fields}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stage": "dpo"}, "stage"),
        ({"stage": "rm"}, "stage"),
        (moesaic(ep_dispatcher="fused"), "dist_config.ep_dispatcher"),
        (moesaic(ep_dispatcher="auto"), "dist_config.ep_dispatcher"),
    ],
)
def test_what_is_known_but_does_not_work_yet(model: Path, fields: dict[str, object], field: str) -> None:
    found = find(model, fields, world_size=4)
    assert found.keys() == {field} and found[field].rule.startswith("not yet")


@pytest.mark.parametrize(
    ("fields", "world_size", "field", "remedy"),
    [
        ({"dp_size": 4}, 8, "dp_size", "remove dp_size or set 8, or start 4 ranks"),
        ({"mp_replicate_size": 3}, 8, "mp_replicate_size", "choose one of [1, 2, 4, 8]"),
        (
            {"mp_replicate_size": 2, "mp_shard_size": 2},
            8,
            "mp_shard_size",
            "remove mp_shard_size or set 4, or start 4 ranks",
        ),
        ({"dp_size": 8, "mp_shard_size": 4}, None, "mp_shard_size", "remove mp_shard_size or set 8, or start 4 ranks"),
        (moesaic(ep_size=3), 8, "dist_config.ep_size", "with edp_size 1 choose ep_size among [1, 2, 4, 8]"),
        (moesaic(ep_size=3, edp_size=3), 8, "dist_config.edp_size", "choose one of [1, 2, 4, 8]"),
        ({"mp_replicate_size": 3, **moesaic()}, 8, "mp_replicate_size", "choose one of [1, 2, 4, 8]"),
        ({"mp_replicate_size": 2, **moesaic(ep_size=9)}, 18, None, None),
        ({"mp_replicate_size": 2, **moesaic(ep_size=9)}, 9, "mp_replicate_size", "choose one of [1, 3, 9]"),
    ],
)
def test_sizes_multiply_to_the_ranks(
    model: Path, fields: dict[str, object], world_size: int | None, field: str | None, remedy: str | None
) -> None:
    found = find(model, fields, world_size)
    assert list(found) == ([field] if field else [])
    assert [problem.remedy for problem in found.values()] == ([remedy] if remedy else [])


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"exchanged_tokens": "recompute", **moesaic()}, "exchanged_tokens", "activation_checkpointing"),
        (
            {"exchanged_tokens": "recompute", "activation_checkpointing": True},
            "exchanged_tokens",
            "exchanges no tokens",
        ),
        ({"exchanged_tokens": "recompute", "activation_checkpointing": True, **moesaic()}, None, ""),
        (moesaic(fsdp_implementation="custom"), "dist_config.fsdp_implementation", "ep_size 1"),
        (moesaic(fsdp_implementation="custom", ep_size=3), None, ""),
        (
            {
                "dist_config": {
                    "name": "fsdpturbo",
                    "ep_size": 3,
                    "fsdp_implementation": "custom",
                    "hook_modules": ["a"],
                }
            },
            "dist_config.hook_modules",
            "a block's one unit",
        ),
        ({"dist_config": {"name": "fsdpturbo", "hook_modules": ["a"]}}, None, ""),
        ({"offload": True, "gradient_accumulation": "unsharded", **moesaic()}, None, ""),
    ],
)
def test_memory_options_that_do_not_go_together(
    model: Path, fields: dict[str, object], field: str | None, part: str
) -> None:
    found = find(model, fields, world_size=3)
    assert list(found) == ([field] if field else [])
    assert all(part in problem.rule for problem in found.values())


def test_without_a_number_of_ranks_sizes_that_imply_none_are_not_checked(model: Path) -> None:
    assert find(model, moesaic(ep_size=5)) == {}
    assert find(model, {"global_batch_size": 7, "mp_replicate_size": 3}) == {}


def test_zero_ranks_are_refused(model: Path) -> None:
    assert list(find(model, {}, world_size=0)) == ["world_size"]


@pytest.mark.parametrize(("size", "remedy"), [(20, "nearest: 16 or 24"), (4, "nearest: 8"), (24, None)])
def test_the_batch_divides(model: Path, size: int, remedy: str | None) -> None:
    found = find(model, {"micro_batch_size": 2, "global_batch_size": size}, world_size=4)
    assert [problem.remedy for problem in found.values()] == ([remedy] if remedy else [])


def test_micro_batches_of_a_step() -> None:
    recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", "micro_batch_size": 2, "global_batch_size": 64})
    assert num_micro_batches(recipe, resolve_sizes(recipe, 8)) == 4
    recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", "micro_batch_size": 2})
    assert num_micro_batches(recipe, resolve_sizes(recipe, 8)) == 1


def test_nine_experts_do_not_fill_four_ranks(model: Path) -> None:
    found = find(model, moesaic(ep_size=4), world_size=4)
    assert found.keys() == {"dist_config.ep_size"}
    assert (
        found["dist_config.ep_size"].rule
        == "every rank needs an expert, and 9 experts in chunks of 3 fill only 3 of 4 ranks"
    )
    assert found["dist_config.ep_size"].remedy == "nearest legal: 3 or 5"
    write_model_folder(model, {"model_type": "qwen3_moe", "num_experts": 7})
    assert find(model, moesaic(ep_size=4), world_size=4) == {}


@given(st.integers(1, 300), st.integers(1, 320))
def test_legal_ep_sizes_are_those_that_leave_no_rank_empty(num_experts: int, ep_size: int) -> None:
    chunk = -(-num_experts // ep_size)
    experts = [min(chunk, max(0, num_experts - rank * chunk)) for rank in range(ep_size)]
    assert sum(experts) == num_experts
    assert is_legal_ep_size(num_experts, ep_size) == (min(experts) > 0)
    assert (ep_size_problem(num_experts, ep_size) is None) == (min(experts) > 0)


def test_families_without_a_spec(model: Path) -> None:
    write_model_folder(model, {"model_type": "llama"})
    assert find(model, {}) == {}, "path A takes any model"
    found = find(model, moesaic())
    assert found.keys() == {"model"}
    assert "(model_type llama) has no experts" in found["model"].rule and "fsdp2" in found["model"].remedy


@pytest.mark.parametrize("config", [{}, {"num_local_experts": 0}, {"num_experts": 8, "enable_moe_block": False}])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_family_may_be_configured_without_experts(model: Path, config: dict[str, object], is_part: bool) -> None:
    write_model_folder(model, {"model_type": "gemma4", **({"text_config": config} if is_part else config)})
    assert "has no experts" in find(model, moesaic())["model"].rule


@pytest.mark.parametrize("field", NUM_EXPERTS_FIELDS)
def test_experts_are_counted_under_every_familys_name(model: Path, field: str) -> None:
    write_model_folder(model, {"model_type": "any_at_all", field: 9})
    assert find(model, moesaic(ep_size=4)).keys() == {"dist_config.ep_size"}
    assert find(model, moesaic(ep_size=3)) == {}


@pytest.mark.parametrize("model_type", REFUSED_FAMILIES)
def test_families_that_cannot_be_trained_are_refused_by_name(model: Path, model_type: str) -> None:
    write_model_folder(model, {"model_type": model_type, "num_experts": 8})
    assert find(model, {}) == {}
    assert find(model, moesaic())["model"].rule.endswith(f": {REFUSED_FAMILIES[model_type]}")


def test_experts_may_be_counted_in_text_config(model: Path) -> None:
    write_model_folder(model, {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 9}})
    assert find(model, moesaic(ep_size=4)).keys() == {"dist_config.ep_size"}
    write_model_folder(model, {"model_type": "mixtral", "num_local_experts": 9})
    assert find(model, moesaic(ep_size=4)).keys() == {"dist_config.ep_size"}
    write_model_folder(model, {"model_type": "qwen3_5_moe", "text_config": None})
    assert find(model, moesaic()).keys() == {"model"}


@pytest.mark.parametrize(
    ("text", "rule"), [("{", "can't be read"), ("[1]", "holds no object"), (None, "has no config.json")]
)
def test_a_folder_that_is_no_model(model: Path, text: str | None, rule: str) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    assert rule in find(model, {})["model"].rule


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    problem = find(tmp_path / "none", {})["model"]
    assert problem.rule.startswith("no such folder") and "hf download" in problem.remedy


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"bf16": False, "master_dtype": "bf16"}, "master_dtype"),
        ({"eval_steps": 5}, "eval_steps"),
        ({"lr_scheduler_config": {"warmup_steps": 3, "warmup_ratio": 0.1}}, "lr_scheduler_config.warmup_ratio"),
        ({"lr_scheduler_config": {"min_lr_ratio": 0.1}}, "lr_scheduler_config.min_lr_ratio"),
        ({"lr_scheduler_config": {"warmup_steps": 4}, "max_steps": 3}, "lr_scheduler_config.warmup_steps"),
        ({"kernel_config": {"name": "liger_kernel"}}, "kernel_config.name"),
        ({"kernel_config": {"name": ","}}, "kernel_config.name"),
        ({"kernel_config": {"include_kernels": "rmsnorm"}}, "kernel_config.include_kernels"),
        ({"train_dataset": "no/such.jsonl"}, "train_dataset"),
        ({"eval_dataset": {"path": "no/such.parquet"}}, "eval_dataset"),
        ({"resume_from_checkpoint": "no/such/folder"}, "resume_from_checkpoint"),
        ({"attn_implementation": "flash_attn"}, "attn_implementation"),
        ({"attn_implementation": "a/b/c"}, "attn_implementation"),
    ],
)
def test_fields_that_do_not_go_together(model: Path, fields: dict[str, object], field: str) -> None:
    assert find(model, fields).keys() == {field}


@pytest.mark.parametrize(
    "name", ["eager", "sdpa", "flash_attention_2", "flex_attention", "owner/kernel", "owner/kernel@v1:function"]
)
def test_attention_by_transformers_names_and_from_the_hub(model: Path, name: str) -> None:
    assert find(model, {"attn_implementation": name}) == {}


def test_files_that_a_model_lacks(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "tokenizer" in find(model, {})["model"].rule
    (model / "spiece.model").touch()
    assert find(model, {}) == {}
    (model / "model.safetensors").unlink()
    assert find(model, {})["model"].rule == "lacks model.safetensors or model.safetensors.index.json"
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "1.safetensors").touch()
    assert find(model, {})["model"].rule == "lacks 2.safetensors"
    (model / "model.safetensors.index.json").write_text("[]")
    assert "readable" in find(model, {})["model"].rule


def write_checkpoints(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / ".metadata").touch()


def test_two_runs_never_mix_in_one_folder(model: Path) -> None:
    run, other = model / "run", model / "other"
    write_checkpoints(run, "step-000100", "step-000150", "step-000200")
    write_checkpoints(other, "step-000300")
    (run / "step-000250").mkdir()  # incomplete: it counts for nothing
    assert "step-000200" in find(model, {})["output_dir"].rule
    assert find(model, {"resume_from_checkpoint": "auto"}) == {}
    assert find(model, {"resume_from_checkpoint": str(run / "step-000200")}) == {}
    assert "step-000200 beyond" in find(model, {"resume_from_checkpoint": str(run / "step-000150")})["output_dir"].rule
    assert "earlier run" in find(model, {"resume_from_checkpoint": str(other / "step-000300")})["output_dir"].rule
    elsewhere = {"resume_from_checkpoint": str(run / "step-000150"), "output_dir": str(model / "new")}
    assert find(model, elsewhere) == {}
    assert list(find(model, {"resume_from_checkpoint": str(run / "step-000250")})) == ["resume_from_checkpoint"]
    (model / "new" / "export").mkdir(parents=True)
    for fields in (elsewhere, {**elsewhere, "resume_from_checkpoint": "auto"}):
        problem = find(model, fields)["output_dir"]
        assert "export" in problem.rule and "auto" not in problem.remedy


def test_ranks_that_nobody_names_are_the_callers_default(model: Path) -> None:
    recipe = Recipe.model_validate({"model": str(model), "train_dataset": "d", **moesaic(ep_size=2)})
    assert [problem.field for problem in check_recipe(recipe, default_world_size=1)] == ["dist_config.ep_size"]
    assert check_recipe(recipe, default_world_size=1, unread=frozenset({"dp_size"})) == []
    assert check_recipe(recipe.model_copy(update={"dp_size": 2}), default_world_size=1) == []


def test_resolved_sizes_follow_the_ranks_or_the_recipe() -> None:
    recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", **moesaic(ep_size=16)})
    sizes = resolve_sizes(recipe, 16)
    assert (sizes.dp_size, sizes.ep_size, sizes.efsdp_size, sizes.mp_shard_size) == (16, 16, 1, 16)
    with pytest.raises(ValueError, match="world_size"):
        resolve_sizes(recipe)
    assert resolve_sizes(recipe.model_copy(update={"dp_size": 32})).efsdp_size == 2


def test_sizes_say_all_that_is_wrong() -> None:
    sizes = ParallelSizes(world_size=8, tp_size=2, mp_replicate_size=2, ep_size=2, edp_size=2)
    assert (sizes.dp_size, sizes.mp_shard_size, sizes.efsdp_size) == (4, 2, 2)
    with pytest.raises(ValueError) as caught:
        ParallelSizes(world_size=8, mp_replicate_size=3, ep_size=5)
    assert "mp_replicate_size: 3" in str(caught.value) and "ep_size: 5" in str(caught.value)
    with pytest.raises(ValueError, match="ep_size: 0: must be at least 1"):
        ParallelSizes(world_size=8, ep_size=0)


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "samples to evaluate on"),
        ({"dump": {"steps": [2, 5]}, "max_steps": 4}, "dump.steps", "ends after max_steps: 4"),
        ({"dump": {"steps": [4]}, "max_steps": 4}, None, ""),
        ({"dump": {"steps": []}}, "dump.steps", "names nothing"),
        ({"dump": {"steps": [1], "what": []}}, "dump.what", "names nothing"),
    ],
)
def test_what_a_run_leaves_behind(model: Path, fields: dict[str, object], field: str | None, part: str) -> None:
    found = find(model, fields)
    assert list(found) == ([field] if field else [])
    assert all(part in problem.rule for problem in found.values())
