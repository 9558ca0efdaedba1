"""Other trainers' files: every field gets a line, every target is a field of the recipe, nothing is dropped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.config import load_recipe
from moesaic.config.fields import list_fields
from moesaic.config.foreign import TOOLS, Translation, translate
from moesaic.config.foreign.llamafactory import LLAMAFACTORY, LLAMAFACTORY_V1
from moesaic.config.foreign.table import NoEquivalent, Tool, Unknown
from moesaic.config.foreign.verl import SFT
from moesaic.config.foreign.verl_ppo import PPO
from tests.unit.model_folders import write_model_folder

LF = """
### model
model_name_or_path: {folder}/model
flash_attn: fa2
### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
### dataset
dataset: identity,demo
dataset_dir: {folder}/data
template: qwen3_nothink
cutoff_len: 4096
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: {folder}/saves
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""

LF_V1 = """
model: {folder}/model
model_class: llm
kernel_config:
  name: auto, flash-linear-attention
  include_kernels: chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
  chunk_size: 64
dist_config:
  name: fsdpturbo
  ep_size: 4
  ep_dispatcher: eager
cp_size: 1
init_config:
  name: init_on_meta
train_dataset: {folder}/data/v1.yaml
output_dir: {folder}/out
micro_batch_size: 1
cutoff_len: 256
learning_rate: 1.0e-4
bf16: true
max_steps: 5
enable_activation_checkpointing: false
sample_backend: hf
max_new_tokens: 128
"""

VERL_SFT = """
data:
  train_batch_size: 256
  micro_batch_size: null
  micro_batch_size_per_gpu: 4
  train_files: {folder}/data/train.parquet
  val_files: {folder}/data/train.parquet
  prompt_key: prompt
  response_key: completion
  max_length: 1024
  truncation: error
  balance_dp_token: False
  chat_template: null
  custom_cls: {{path: null, name: null}}
model:
  partial_pretrain: {folder}/model
  fsdp_config:
    model_dtype: fp32
    wrap_policy: {{min_num_params: 0}}
    cpu_offload: False
    offload_params: False
  external_lib: null
  enable_gradient_checkpointing: False
  trust_remote_code: False
  lora_rank: 0
  lora_alpha: 16
  target_modules: all-linear
  use_liger: False
optim:
  lr: 1e-5
  betas: [0.9, 0.95]
  weight_decay: 0.01
  warmup_steps_ratio: 0.1
  clip_grad: 1.0
  lr_scheduler: cosine
ulysses_sequence_parallel_size: 1
use_remove_padding: False
trainer:
  default_local_dir: {folder}/${{trainer.project_name}}/${{trainer.experiment_name}}
  default_hdfs_dir: null
  project_name: gsm8k-sft
  experiment_name: test
  total_epochs: 4
  total_training_steps: null
  logger: ['console']
  seed: 1
  save_freq: -1
  test_freq: 20
  nnodes: 1
  n_gpus_per_node: 8
  max_ckpt_to_keep: null
  resume_mode: disable
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of four experts, and data under the names of the files above."""
    write_model_folder(tmp_path / "model", {"model_type": "qwen3_moe", "num_experts": 4})
    data = tmp_path / "data"
    data.mkdir()
    for name in ("identity.json", "demo.jsonl", "train.parquet"):
        (data / name).touch()
    infos = {"identity": {"file_name": "identity.json"}, "demo": {"file_name": "demo.jsonl", "formatting": "sharegpt"}}
    (data / "dataset_info.json").write_text(json.dumps(infos))
    listed = {"identity": {"file_name": "data/identity.json", "converter": "alpaca"}}
    listed["demo"] = {"file_name": "data/demo.jsonl"}
    (data / "v1.yaml").write_text(yaml.safe_dump(listed, sort_keys=False))
    return tmp_path


def read(tool: str, text: str, **options: Any) -> Translation:
    return translate(tool, yaml.safe_load(text), **options)


def outcomes(translation: Translation, kind: type) -> set[str]:
    return {line.field for line in translation.lines if isinstance(line.outcome, kind)}


@pytest.mark.parametrize("tool", [LLAMAFACTORY, LLAMAFACTORY_V1, SFT, PPO], ids=lambda tool: tool.name)
def test_every_target_is_a_field_of_the_recipe(tool: Tool) -> None:
    fields = {field.path for field in list_fields()}
    targets = {target for rule in tool.rules.values() for target in rule.targets}
    assert targets and targets <= fields
    assert all(tool.rule(name) is not None for name in tool.defaults)


def test_first_generation(folder: Path) -> None:
    translation = read("llamafactory", LF.format(folder=folder), world_size=8)
    assert translation.is_complete, translation.table()
    recipe = translation.recipe()
    assert recipe["train_dataset"] == [
        {"path": f"{folder}/data/identity.json"},
        {"path": f"{folder}/data/demo.jsonl", "format": "sharegpt"},
    ]
    assert (recipe["micro_batch_size"], recipe["global_batch_size"]) == (2, 2 * 4 * 8)
    assert recipe["activation_checkpointing"] is True  # its default
    assert recipe["lr_scheduler_config"] == {"name": "cosine", "warmup_ratio": 0.1}
    assert recipe["num_train_epochs"] == 3 and recipe["dist_config"] == {"name": "fsdp2"}


def test_accumulation_needs_the_ranks(folder: Path) -> None:
    translation = read("llamafactory", LF.format(folder=folder))
    assert outcomes(translation, NoEquivalent) == {"gradient_accumulation_steps"}


def test_v1(folder: Path) -> None:
    translation = read("llamafactory", LF_V1.format(folder=folder))
    assert translation.tool == "LLaMA-Factory v1" and translation.is_complete, translation.table()
    recipe = translation.recipe()
    assert recipe["train_dataset"][0] == {"path": f"{folder}/data/identity.json", "format": "alpaca"}
    assert recipe["dist_config"] == {"name": "fsdpturbo", "ep_size": 4, "ep_dispatcher": "eager"}
    assert recipe["activation_checkpointing"] is False


def test_a_dataset_info_that_says_more_is_not_dropped(folder: Path) -> None:
    (folder / "data" / "v1.yaml").write_text("a: {file_name: data/a.jsonl, weight: 2.0, num_samples: 500}")
    translation = read("llamafactory", LF_V1.format(folder=folder))
    assert outcomes(translation, NoEquivalent) == {"train_dataset"} and "num_samples, weight" in translation.table()


def test_verl_sft(folder: Path) -> None:
    translation = read("verl", VERL_SFT.format(folder=folder))
    assert translation.is_complete, translation.table()
    recipe = translation.recipe()
    assert recipe["output_dir"] == f"{folder}/gsm8k-sft/test"
    assert (recipe["global_batch_size"], recipe["micro_batch_size"], recipe["dp_size"]) == (256, 4, 8)
    assert recipe["optim_config"] == {"betas": [0.9, 0.95], "weight_decay": 0.01}
    assert recipe["learning_rate"] == 1e-5 and "save_steps" not in recipe and recipe["eval_steps"] == 20


@pytest.mark.parametrize(
    ("tool", "values", "field"),
    [
        ("llamafactory", {"model_name_or_path": "m", "finetuning_type": "lora"}, "finetuning_type"),
        ("llamafactory", {"model_name_or_path": "m"}, "finetuning_type"),  # its default
        ("llamafactory", {"model_name_or_path": "m", "packing": True}, "packing"),
        ("llamafactory", {"model_name_or_path": "m", "dataset": "nowhere"}, "dataset"),
        ("llamafactory", {"model_name_or_path": "m", "mask_history": True}, "mask_history"),
        ("llamafactory", {"model": "m", "peft_config": {"name": "lora", "r": 8}}, "peft_config.r"),
        ("llamafactory", {"model": "m", "batching_strategy": "dynamic_batching"}, "batching_strategy"),
        ("verl", {"model": {"lora_rank": 32}}, "model.lora_rank"),
        ("llamafactory", {"model": "m", "batching_strategy": "padding_free"}, "batching_strategy"),  # how many ranks?
        ("verl", {"data": {"use_dynamic_bsz": True}}, "data.use_dynamic_bsz"),
        ("verl", {"data": {"truncation": "left"}}, "data.truncation"),
        ("verl", {"data": {"prompt_key": "question"}}, "data.prompt_key"),
        ("verl", {"model": {"trust_remote_code": True}}, "model.trust_remote_code"),
        ("verl", {"engine": {"fsdp_size": 4}}, "engine.fsdp_size"),  # of how many ranks?
        ("verl", {"engine": {"fsdp_size": 3}, "trainer": {"n_gpus_per_node": 8}}, "engine.fsdp_size"),
        ("verl", {"engine": {"dtype": "float16"}}, "engine.dtype"),
        ("verl", {"engine": {"mixed_precision": {"reduce_dtype": "bf16"}}}, "engine.mixed_precision.reduce_dtype"),
    ],
)
def test_what_has_no_equivalent_says_so(tool: str, values: dict[str, Any], field: str) -> None:
    translation = translate(tool, values)
    assert field in outcomes(translation, NoEquivalent) and not translation.is_complete


@pytest.mark.parametrize(
    ("tool", "values", "field"),
    [
        ("llamafactory", {"model": "m", "max_steps": "auto"}, "max_steps"),
        ("llamafactory", {"model": "m", "learning_rate": "${lr}"}, "learning_rate"),
        ("llamafactory", {"model": "m", "num_train_epochs": math.inf}, "num_train_epochs"),
        ("llamafactory", {"model": "m", "train_dataset": 5}, "train_dataset"),
        ("llamafactory", {"model": "m", "dist_config": {"name": ["fsdp2"]}}, "dist_config.name"),
        ("verl", {"trainer": {"n_gpus_per_node": "???"}}, "trainer.n_gpus_per_node"),
        ("verl", {"trainer": {"save_freq": "after_each_epoch"}}, "trainer.save_freq"),
        ("verl", {"trainer": {"test_freq": "${oc.select:nowhere,[}"}}, "trainer.test_freq"),
        ("verl", {"trainer": {"n_gpus_per_node": 8}, "ulysses_sequence_parallel_size": 0}, "trainer.n_gpus_per_node"),
    ],
)
def test_values_of_an_unexpected_type_are_named(tool: str, values: dict[str, Any], field: str) -> None:
    (line,) = (line for line in translate(tool, values).lines if line.field == field)
    assert line.outcome == NoEquivalent("value isn't understood")


def test_automatic_accumulation_is_no_number() -> None:
    values = {"model_name_or_path": "m", "gradient_accumulation_steps": "auto"}
    assert "gradient_accumulation_steps" in outcomes(translate("llamafactory", values, world_size=8), NoEquivalent)


@pytest.mark.parametrize("text", ["[a, b]", "", "a: [", "a: 1", "a: {b", "\x00"])
@pytest.mark.parametrize("name", ["v1.yaml", "dataset_info.json"])
def test_dataset_files_that_say_something_else_are_named(folder: Path, name: str, text: str) -> None:
    (folder / "data" / name).write_text(text)
    translation = read("llamafactory", (LF if name.endswith("json") else LF_V1).format(folder=folder), world_size=8)
    assert outcomes(translation, NoEquivalent) == {"dataset" if name.endswith("json") else "train_dataset"}
    assert f"NO EQUIVALENT: {folder}/data/{name}" in translation.table()


@pytest.mark.parametrize(
    ("tool", "values", "ours"),
    [
        ("v0", {"load_best_model_at_end": True}, {"load_best_model_at_end": True}),
        ("v0", {"report_to": "none"}, {"report_to": []}),
        ("v0", {"report_to": ["wandb"]}, {"report_to": ["wandb"]}),
        ("v0", {"report_to": "tensorboard"}, {"report_to": ["tensorboard"]}),
        ("verl", {"trainer": {"logger": ["console"]}}, {"report_to": []}),
        ("verl", {"trainer": {"logger": ["console", "wandb"]}}, {"report_to": ["wandb"]}),
        (
            "v1",
            {"report_to": ["wandb"], "eval_steps": 5, "lr_scheduler_config": {"name": "cosine", "min_lr_ratio": 0.1}},
            {"report_to": ["wandb"], "eval_steps": 5, "lr_scheduler_config": {"name": "cosine", "min_lr_ratio": 0.1}},
        ),
        (
            "v0",
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"lr_scheduler_config": {"name": "cosine", "min_lr_ratio": 0.1}},
        ),
        (
            "v1",
            {"batching_strategy": "padding_free", "micro_batch_size": 4, "cutoff_len": 512, "global_batch_size": 64},
            {"micro_batch_tokens": 2048, "global_batch_size": 64, "micro_batch_size": None, "packing": None},
        ),
        (
            "v1",
            {"batching_strategy": "padding_free", "micro_batch_size": 4, "dp_size": 8},
            {"micro_batch_tokens": 8192, "global_batch_size": 32},
        ),
        (
            "v1",
            {"batching_strategy": "dynamic_padding_free", "micro_batch_size": 4},
            {"packing": True, "micro_batch_size": 4, "micro_batch_tokens": None},
        ),
        (
            "verl",
            {
                "data": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8192, "micro_batch_size_per_gpu": 4},
                "ulysses_sequence_parallel_size": 2,
            },
            {"micro_batch_tokens": 16384, "micro_batch_size": None, "cp_size": 2},
        ),
        (
            "verl",
            {"data": {"use_dynamic_bsz": False, "max_token_len_per_gpu": 8192, "micro_batch_size_per_gpu": 4}},
            {"micro_batch_tokens": None, "micro_batch_size": 4},
        ),
        ("v0", {"deepspeed": "ds_z3_offload_config.json"}, {"offload": True, "dist_config": {"name": "fsdp2"}}),
        ("v0", {"fsdp": "full_shard auto_wrap offload"}, {"offload": True, "dist_config": {"name": "fsdp2"}}),
        ("v1", {"dist_config": {"name": "deepspeed", "config_file": "ds_z3_offload_config.json"}}, {"offload": True}),
        (
            "verl",
            {"engine": {"fsdp_size": 4}, "trainer": {"n_gpus_per_node": 8, "nnodes": 2}},
            {"mp_shard_size": 4, "mp_replicate_size": 4, "dp_size": 16},
        ),
        ("verl", {"engine": {"full_determinism": True, "seed": 7}}, {"full_determinism": True, "seed": 7}),
        ("verl", {"engine": {"full_determinism": False, "seed": 7}}, {"full_determinism": False, "seed": 1}),
        ("verl", {"engine": {"dtype": "bfloat16"}}, {"bf16": True}),
        (
            "verl",
            {"engine": {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}},
            {"bf16": False},
        ),
    ],
)
def test_fields_and_their_equivalents(tool: str, values: dict[str, Any], ours: dict[str, Any]) -> None:
    models: dict[str, dict[str, Any]] = {
        "v0": {"model_name_or_path": "m", "finetuning_type": "full"},
        "v1": {"model": "m"},
        "verl": {},
    }
    translation = translate("verl" if tool == "verl" else "llamafactory", {**models[tool], **values})
    assert translation.is_complete, translation.table()
    recipe = translation.recipe()
    assert {name: recipe.get(name) for name in ours} == ours


def test_all_ranks_in_one_shard_need_no_size() -> None:
    recipe = translate("verl", {"engine": {"fsdp_size": 8}, "trainer": {"n_gpus_per_node": 8}}).recipe()
    assert "mp_shard_size" not in recipe and "mp_replicate_size" not in recipe


@pytest.mark.parametrize("values", [{"finetuning_type": "freeze"}, {"freeze_language_model": True}])
def test_freezing_points_to_its_field(values: dict[str, Any]) -> None:
    table = translate("llamafactory", {"model_name_or_path": "m", **values}).table()
    assert "frozen_modules" in table


def test_plain_text_and_mirrors_of_a_dataset_info(folder: Path) -> None:
    infos = {
        "identity": {"file_name": "identity.json", "columns": {"prompt": "text"}},
        "demo": {"hf_hub_url": "org/demo", "ms_hub_url": "mirror/demo"},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(infos))
    text = LF.format(folder=folder)
    plain = read("llamafactory", text.replace("stage: sft", "stage: pt"), world_size=8)
    assert plain.is_complete, plain.table()
    assert plain.recipe()["train_dataset"] == [
        {"path": f"{folder}/data/identity.json", "format": "text"},
        {"path": "org/demo"},
    ]
    assert outcomes(read("llamafactory", text, world_size=8), NoEquivalent) == {"dataset"}


@pytest.mark.parametrize(("tool", "values"), [("llamafactory", {"model": "m"}), ("verl", {"data": {"max_length": 8}})])
def test_unknown_fields_are_listed(tool: str, values: dict[str, Any]) -> None:
    translation = translate(tool, {**values, "brand_new": {"inner": 1, "empty": {}}})
    assert outcomes(translation, Unknown) == {"brand_new.inner", "brand_new.empty"}
    assert "UNKNOWN" in translation.table() and not translation.is_complete


def test_packing_without_attention_between_samples() -> None:
    assert translate("llamafactory", {"model_name_or_path": "m", "neat_packing": True}).recipe()["packing"] is True


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, args)])


@pytest.mark.parametrize(
    ("tool", "text", "more"),
    [("llamafactory", LF, ("--world", 8)), ("llamafactory", LF_V1, ()), ("verl", VERL_SFT, ())],
    ids=["v0", "v1", "verl"],
)
def test_command_writes_a_recipe_that_loads(tool: str, text: str, more: tuple[object, ...], folder: Path) -> None:
    (folder / "theirs.yaml").write_text(text.format(folder=folder))
    result = run("--from", tool, folder / "theirs.yaml", *more)
    assert result.exit_code == 0, result.output
    (folder / "ours.yaml").write_text(result.stdout)
    recipe = load_recipe(folder / "ours.yaml")
    other = run("--from", tool, folder / "theirs.yaml", "--out", folder / "out.yaml", "seed=9", *more)
    assert other.exit_code == 0 and "not needed" in other.stdout
    assert load_recipe(folder / "out.yaml") == recipe.model_copy(update={"seed": 9})


def test_exit_codes(folder: Path) -> None:
    file = folder / "theirs.yaml"
    file.write_text(LF_V1.format(folder=folder) + "brand_new: 1\n")
    result = run("--from", "llamafactory", file)
    assert result.exit_code == 1 and "# brand_new: 1" in result.stdout and "UNKNOWN" in result.stderr
    assert run("--from", "llamafactory", file, "cutoff_len=1").exit_code == 2
    assert run("--from", "llamafactory", file, "--world", 3).exit_code == 2  # 4 experts' ranks on 3
    assert run("--from", "nothing", file).exit_code == 2
    assert run("--from", "verl", folder / "none.yaml").exit_code == 2
    assert run(file, "--out", folder / "out.yaml").exit_code == 2
    for there in (file, folder / "data" / "v1.yaml"):
        before = there.read_text()
        refused = run("--from", "llamafactory", file, "--out", there)
        assert refused.exit_code == 2 and "never overwritten" in refused.stderr and there.read_text() == before
    assert set(TOOLS) == {"llamafactory", "verl"}
