"""The two YAML examples of FSDPTurbo's integration into LLaMA-Factory, as they are: loaded, checked, and trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic.config import Recipe, RecipeError, check_recipe, load_recipe
from moesaic.train.loop import train
from tests.pool import RunRanks
from tests.unit.data_tokenizers import MARKED, build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny

TOPOLOGY = """\
cp_size: 1

dist_config:
  name: fsdpturbo
  ep_size: 16
  ep_dispatcher: eager
"""
KERNELS = """\
kernel_config:
  name: auto, flash-linear-attention
  include_kernels: chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
  chunk_size: 32
"""
# What trains each: the second names operators, so its model must have them, and it says nothing of a topology.
EXAMPLES = {"topology": ("qwen3_moe", TOPOLOGY), "kernels": ("qwen3_5_moe_text", TOPOLOGY + KERNELS)}
# Experts that sixteen ranks can share; a model of its own that four can train.
NUM_EXPERTS = 16
PASSED_OVER = "flash-linear-attention runs on cuda, npu, xpu, not on cpu"


def write_example(folder: Path, name: str) -> Path:
    """The example's recipe, with a model and samples; and the tiny model, its tokenizer and the samples themselves."""
    model_type, text = EXAMPLES[name]
    save_tiny(folder / "model", model_type, vocab_size=320, num_experts=NUM_EXPERTS)
    build_tokenizer(MARKED).save_pretrained(folder / "model")
    samples = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in samples))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"model: {folder / 'model'}\ntrain_dataset: {folder / 'train.jsonl'}\n\n{text}")
    return recipe


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_loads_and_checks_on_16_ranks(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(write_example(tmp_path, name), [f"output_dir={tmp_path / 'run'}"])
    assert check_recipe(recipe, 16) == []
    assert (recipe.ep_size, recipe.storage_dtype, recipe.compute_dtype) == (16, "bf16", "bf16")
    assert [problem.field for problem in check_recipe(recipe, 4)] == ["dist_config.ep_size"]


def test_the_kernels_alone_load_and_check_on_16_ranks(tmp_path: Path) -> None:
    path = write_example(tmp_path, "kernels")
    path.write_text(path.read_text().replace(TOPOLOGY, ""))
    recipe = load_recipe(path, [f"output_dir={tmp_path / 'run'}"])
    assert check_recipe(recipe, 16) == []
    assert (recipe.dist_config.name, recipe.kernel_config.chunk_size) == ("fsdp2", 32)


def train_on_rank(rank: int, recipe: Recipe) -> None:
    train(recipe)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_trains_on_4_ranks(name: str, run_ranks: RunRanks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["dist_config.ep_size=4", f"output_dir={run}", "max_steps=2", "cutoff_len=64", "learning_rate=1e-2"]
    recipe = load_recipe(write_example(tmp_path, name), overrides)
    assert check_recipe(recipe, 4) == []
    run_ranks(train_on_rank, 4, recipe)

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if line["kind"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses), losses
    exported = AutoModelForCausalLM.from_pretrained(run / "export")
    inputs = AutoTokenizer.from_pretrained(run / "export")("1?", return_tensors="pt")
    assert exported(**inputs).logits.isfinite().all()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=exported.dtype).state_dict()
    assert any(not value.equal(before[key]) for key, value in exported.state_dict().items()), "nothing was trained"

    kernels = json.loads((run / "environment.json").read_text())["kernels"]
    reference = {"implementation": "reference", "passed_over": PASSED_OVER, "num_modules": 1}
    operators = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule") if name == "kernels" else ()
    assert kernels == dict.fromkeys(operators, reference)


def refused_on_rank(rank: int, recipe: Recipe) -> str:
    with pytest.raises(ValueError) as caught:
        train(recipe)
    return str(caught.value)


def test_operators_that_the_model_lacks_are_refused_on_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = write_example(tmp_path, "topology")
    path.write_text(path.read_text() + KERNELS)
    recipe = load_recipe(path, ["dist_config.ep_size=2", f"output_dir={tmp_path / 'run'}"])
    for message in run_ranks(refused_on_rank, 2, recipe):
        assert "include_kernels: chunk_gated_delta_rule matches nothing" in message
        assert "Qwen3MoeForCausalLM has none" in message


def test_packing_is_refused_where_linear_attention_would_mix_samples(run_ranks: RunRanks, tmp_path: Path) -> None:
    overrides = ["dist_config.ep_size=2", f"output_dir={tmp_path / 'run'}", "packing=true"]
    path = write_example(tmp_path, "kernels")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert [problem.field for problem in caught.value.problems] == ["packing"]
    unchecked = load_recipe(path, overrides[:-1]).model_copy(update={"packing": True})
    assert "packing=true" in run_ranks(refused_on_rank, 2, unchecked)[0]
