"""Whole runs of a tiny model: what is written, resuming, stopping on all ranks where gradients are no numbers."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic.cli import app
from moesaic.config import MoesaicConfig, Recipe, load_saved_recipe, save_recipe
from moesaic.train import loop
from moesaic.train.loop import NonFiniteError, export_checkpoint, train
from tests.unit.data_tokenizers import MARKED, build_tokenizer
from tests.unit.tiny_checkpoints import save_tiny

NUM_STEPS = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, and samples."""
    folder = tmp_path_factory.mktemp("source")
    save_tiny(folder / "model", "qwen3_moe", vocab_size=320)
    build_tokenizer(MARKED).save_pretrained(folder / "model")
    for name, numbers in (("train", range(20)), ("eval", range(90, 95))):
        samples = [
            [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in samples))
    return folder


def recipe_of(source: Path, output_dir: Path, **fields: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "model": str(source / "model"),
        "train_dataset": {"path": str(source / "train.jsonl")},
        "eval_dataset": {"path": str(source / "eval.jsonl")},
        "output_dir": str(output_dir),
        "cutoff_len": 64,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "max_steps": NUM_STEPS,
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_config": {"name": "linear", "warmup_steps": 1},
        "bf16": False,
        "dist_config": MoesaicConfig(name="moesaic", ep_size=2),
    }
    return Recipe.model_validate({**defaults, **fields})


def train_on_rank(rank: int, recipe: Recipe) -> None:
    train(recipe)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal_weights(one: Path, other: Path) -> bool:
    a, b = read_weights(one), read_weights(other)
    return len(a) > 0 and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_run_its_files_and_its_resumption(run_ranks, source: Path, tmp_path: Path) -> None:
    straight = recipe_of(source, tmp_path / "straight")
    run_ranks(train_on_rank, 4, straight)
    folder = tmp_path / "straight"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "recipe.yaml", "meshes.txt", "environment.json", "metrics.jsonl", "data_report.jsonl", "tensorboard",
        "step-000002", "step-000004", "export",
    }  # fmt: skip
    assert load_saved_recipe(folder / "recipe.yaml") == straight
    assert "efsdp" in (folder / "meshes.txt").read_text()
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 4

    steps = read_metrics(folder, "train")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2]
    assert [line["lr"] for line in steps] == pytest.approx([1e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert steps[-1]["loss"] < steps[0]["loss"] and len(steps[0]["memory_gib"]) == 4
    assert set(steps[0]["expert_load"]) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert all(1 <= load <= 4 for load in steps[0]["expert_load"].values())
    assert [line["step"] for line in read_metrics(folder, "eval")] == [2, 4]

    resumed = recipe_of(
        source, tmp_path / "resumed", resume_from_checkpoint=str(folder / "step-000002"), save_total_limit=1
    )
    run_ranks(train_on_rank, 4, resumed)
    assert equal_weights(folder / "export", tmp_path / "resumed" / "export")
    losses = [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "resumed", "train")]
    assert losses == [(line["step"], line["loss"]) for line in steps[2:]]

    # A resumption that is refused leaves the run as it was: its recipe is what its checkpoints are exported by.
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join((source / "train.jsonl").read_text().splitlines(keepends=True)[:-1]))
    other = recipe_of(source, folder, resume_from_checkpoint="auto", train_dataset=str(shorter), max_steps=5)
    assert "num_samples" in run_ranks(refuse_on_rank, 4, other)[0]
    ended = recipe_of(source, folder, resume_from_checkpoint="auto", max_steps=3)
    assert "4 steps done, and the run ends after 3" in run_ranks(refuse_on_rank, 4, ended)[0]
    assert load_saved_recipe(folder / "recipe.yaml") == straight


def held_out(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(folder, "eval")}


def test_the_best_checkpoint_is_kept_survives_a_resume_and_is_exported(run_ranks, source: Path, tmp_path: Path) -> None:
    """The learning rate is so large that the held-out loss gets worse after the first step."""
    common = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 3, "save_total_limit": 1, "max_steps": 3}
    common |= {"learning_rate": 1.0, "lr_scheduler_config": {"name": "constant"}}
    run_ranks(train_on_rank, 2, recipe_of(source, tmp_path / "straight", **common))
    losses = held_out(tmp_path / "straight")
    best = min(losses, key=losses.__getitem__)
    assert 1 <= best < 3, "the course must have its minimum before its end"
    remembered = json.loads((tmp_path / "straight" / "best.json").read_text())
    assert remembered == {"step": best, "loss": losses[best], "sets": [str(source / "eval.jsonl")]}
    kept = sorted(path.name for path in (tmp_path / "straight").glob("step-*"))
    assert kept == [f"step-{best:06d}", "step-000003"]
    run_ranks(export_on_rank, 1, recipe_of(source, tmp_path), tmp_path / "straight" / kept[0], tmp_path / "best")
    assert equal_weights(tmp_path / "straight" / "export", tmp_path / "best")

    # Stopped after the best was found: what comes later is worse, so the first part's checkpoint must win.
    stopped = recipe_of(source, tmp_path / "resumed", **{**common, "max_steps": best + 1})
    run_ranks(train_on_rank, 2, stopped)
    shutil.rmtree(tmp_path / "resumed" / "export")
    run_ranks(train_on_rank, 2, recipe_of(source, tmp_path / "resumed", **common, resume_from_checkpoint="auto"))
    assert json.loads((tmp_path / "resumed" / "best.json").read_text()) == remembered
    assert equal_weights(tmp_path / "straight" / "export", tmp_path / "resumed" / "export")


def test_a_run_dumps_what_its_recipe_names(run_ranks, source: Path, tmp_path: Path) -> None:
    dump = {"steps": [2], "params": ["*.gate.weight", "lm_head.weight"], "what": ["param"]}
    recipe = recipe_of(source, tmp_path, dump=dump, max_steps=2, save_steps=None, eval_dataset=None, eval_steps=None)
    run_ranks(train_on_rank, 2, recipe)
    (step,) = (tmp_path / "dumps").iterdir()
    names = {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)} | {"lm_head.weight"}
    assert {path.relative_to(step).as_posix() for path in step.rglob("*.safetensors")} == {
        f"param/{name}.safetensors" for name in names
    }
    exported = read_weights(tmp_path / "export")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in read_weights(step / "param").items())


def export_on_rank(rank: int, recipe: Recipe, checkpoint: Path, folder: Path) -> None:
    export_checkpoint(recipe, checkpoint, folder)


def export_and_listen(rank: int, recipe: Recipe, checkpoint: Path, folder: Path) -> list[str]:
    """What the export warns of."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.logger, "warning", lambda text, *args: messages.append(text % args))
        export_checkpoint(recipe, checkpoint, folder)
    return messages


def test_path_a_exports_what_transformers_loads_also_from_a_checkpoint(run_ranks, source: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        source, tmp_path / "run", dist_config={"name": "fsdp2"}, max_steps=1, eval_dataset=None, eval_steps=None
    )
    run_ranks(train_on_rank, 2, recipe)
    bare = tmp_path / "bare"  # an export needs neither the weights that training began with, nor their place
    shutil.copytree(source / "model", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    moved = recipe.model_copy(update={"model": str(bare), "attn_implementation": "flash_attention_2"})
    ((warning,),) = run_ranks(export_and_listen, 1, moved, tmp_path / "run" / "step-000001", tmp_path / "again")
    assert warning.startswith(f"{bare}: the weights that training began with aren't there.")
    assert equal_weights(tmp_path / "run" / "export", tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    assert model(**tokenizer("1?", return_tensors="pt")).logits.isfinite().all()
    assert not equal_weights(source / "model", tmp_path / "again")


def run_program(folder: Path, *args: object) -> str:
    """What ``python -m ...`` in ``folder`` prints; it must end well."""
    command = [sys.executable, "-m", *map(str, args)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def export_by_command(rank: int, folder: Path, args: list[str]) -> None:
    with contextlib.chdir(folder):
        app(args, standalone_mode=False)


def test_the_command_starts_ranks_runs_under_torchrun_and_exports(run_ranks, source: Path, tmp_path: Path) -> None:
    few = {"max_steps": 1, "save_steps": None, "eval_dataset": None, "eval_steps": None}
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    save_recipe(recipe_of(source, run, model="model", **few), recipe)
    said = run_program(source, "moesaic.cli", "train", recipe, "--nproc", 2, "--verbose")
    assert said.count("model.layers.1.mlp.experts.gate_up_proj") == 1  # rank 0's table of FSDP units
    first = run.rename(tmp_path / "first")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "moesaic.cli")
    run_program(source, *torchrun, "train", recipe)
    assert equal_weights(run / "export", first / "export")
    assert json.loads((run / "environment.json").read_text())["world_size"] == 2
    # In another working directory: the run knows where its model was.
    run_ranks(export_by_command, 1, tmp_path, ["export", "first/step-000001", "again"])
    assert equal_weights(tmp_path / "again", first / "export")
    assert not equal_weights(source / "model", first / "export")


def diverge_on_rank(rank: int, recipe: Recipe) -> str:
    with pytest.raises(NonFiniteError) as caught:
        train(recipe)
    return str(caught.value)


def test_all_ranks_stop_at_the_same_step_and_save_nothing(run_ranks, source: Path, tmp_path: Path) -> None:
    recipe = recipe_of(source, tmp_path / "run", learning_rate=1e38, max_grad_norm=None, save_steps=3, eval_steps=None)
    messages = run_ranks(diverge_on_rank, 2, recipe)
    assert messages[0] == messages[1] and messages[0].startswith("step 2: the gradient norm is ")
    assert not list((tmp_path / "run").glob("step-*")) and not (tmp_path / "run" / "export").exists()


def refuse_on_rank(rank: int, recipe: Recipe) -> str:
    with pytest.raises(ValueError) as caught:
        train(recipe)
    return str(caught.value)


def test_an_earlier_run_in_the_way_is_refused_and_left_alone(run_ranks, source: Path, tmp_path: Path) -> None:
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000009" / ".metadata").touch()
    message = run_ranks(refuse_on_rank, 2, recipe_of(source, tmp_path))[1]
    assert "output_dir" in message and "step-000009" in message and "resume_from_checkpoint" in message
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004" / ".metadata").touch()
    resumed = recipe_of(source, tmp_path, resume_from_checkpoint=str(tmp_path / "step-000004"))
    messages = run_ranks(refuse_on_rank, 2, resumed)
    assert messages[0] == messages[1] and "holds step-000009 beyond step-000004" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000009"]


def test_every_bad_sample_is_named_in_the_runs_folder(run_ranks, source: Path, tmp_path: Path) -> None:
    good = (source / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(good + '{"messages": []}\n' * 25)
    recipe = recipe_of(
        source, tmp_path / "run", train_dataset={"path": str(tmp_path / "train.jsonl")}, max_steps=1, save_steps=None
    )
    run_ranks(train_on_rank, 2, recipe)
    lines = [json.loads(line) for line in (tmp_path / "run" / "data_report.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(20, 45))
    assert {line["dataset"] for line in lines} == {"train_dataset"} and all(line["reason"] for line in lines)
