"""Commands: what they refuse, with which exit code, and what isn't imported until a recipe is known to be good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import moesaic
from moesaic import runtime
from moesaic.cli import app
from tests.unit.model_folders import write_model_folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A good recipe whose model is only a config: nothing here may load it."""
    model = tmp_path / "model"
    write_model_folder(model, {"model_type": "qwen3_moe", "num_experts": 8})
    (tmp_path / "train.jsonl").write_text("{}\n")
    path = tmp_path / "recipe.yaml"
    fields = {
        "model": str(model),
        "train_dataset": str(tmp_path / "train.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "dist_config": {"name": "moesaic", "ep_size": 2},
    }
    path.write_text(yaml.safe_dump(fields))
    return path


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_check_shows_the_sizes(recipe: Path) -> None:
    result = run("check", recipe, "--world", 4)
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()[1:]]
    assert dict(lines) == {
        "ranks": "4",
        "data": "dp 4 x cp 1 x tp 1",
        "dense": "mp_replicate 1 x mp_shard 4 x tp 1",
        "expert": "edp 1 x efsdp 2 x ep 2",
        "batch": "16 sequences = micro 2 x dp 4 x 2 micro-batches",
    }


def test_check_shows_micro_batches_by_tokens(recipe: Path) -> None:
    changes = ("micro_batch_size=1", "micro_batch_tokens=4096", "global_batch_size=30")
    result = run("check", recipe, "--world", 4, *changes)
    assert result.exit_code == 0, result.output
    assert "batch   30 samples over dp 4, in micro-batches of at most 4096 tokens" in result.stdout


def test_check_shows_the_roles(recipe: Path) -> None:
    """One that lies on the ranks in another way than the recipe is shown as it lies."""
    changes = (
        *("stage=rl", "reward.functions=exact_match", "rollout.sampling.n=8", "train_dataset=some/prompts"),
        *("algorithm.adv_estimator=gae", "algorithm.ppo_mini_batch_size=4", "algorithm.ppo_epochs=2"),
        "critic={dist: fsdp2, cp_size: 2}",
    )
    result = run("check", recipe, "--world", 4, *changes)
    assert result.exit_code == 0, result.output
    model = recipe.parent / "model"
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()[1:]]
    shown = dict(lines)
    assert shown["batch"] == "16 prompts x 8 completions a step, in 8 updates"
    assert shown["actor"] == f"dp 4 x cp 1 x tp 1, efsdp 2 x ep 2, {model}"
    assert shown["critic"] == f"dp 2 x cp 2 x tp 1, {model}"
    assert shown["rollout"] == "hf, 4 x tp 1"
    assert "ref" not in shown
    split = run("check", recipe, "--world", 4, *changes, "rollout.ep_size=2")
    assert "rollout hf, all ranks together, ep 2" in split.stdout


def test_check_takes_the_ranks_from_the_recipe_or_says_they_are_unknown(recipe: Path) -> None:
    assert "ranks   8" in run("check", recipe, "dp_size=8").stdout
    unknown = run("check", recipe)
    assert unknown.exit_code == 0 and "--world" in unknown.stdout


@pytest.mark.parametrize("command", [("check",), ("train",)])
def test_all_problems_are_reported_together_with_exit_code_2(recipe: Path, command: tuple[str, ...]) -> None:
    result = run(*command, recipe, "learning_rte=1", "dist_config.ep_size=5", "stage=dpo", "dist_config.ep_modules=x")
    assert result.exit_code == 2 and result.stdout == ""
    for field in ("learning_rte", "dist_config.ep_size", "stage", "dist_config.ep_modules"):
        assert f"  {field}" in result.stderr


def test_sizes_are_checked_for_the_processes_that_would_start(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "launch", lambda *_: pytest.fail("nothing may start"))
    result = run("train", recipe, "--nproc", 3)
    assert result.exit_code == 2 and "dist_config.ep_size" in result.stderr
    assert run("train", recipe).exit_code == 2  # 1 process can't split experts over 2


def test_a_size_problem_is_reported_with_the_others_where_the_ranks_are_only_the_default(recipe: Path) -> None:
    result = run("train", recipe, "learning_rte=1")
    assert result.exit_code == 2 and "2 problems" in result.stderr
    assert "learning_rte" in result.stderr and "dist_config.ep_size" in result.stderr


def test_train_starts_ranks_that_run_the_same_command(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []

    def launch(command: list[str], nproc: int, log_dir: Path) -> int:
        started.append((command, nproc, log_dir))
        return 130

    monkeypatch.setattr(runtime, "launch", launch)
    assert run("train", recipe, "seed=7", "--nproc", 4).exit_code == 130
    command = ["-m", "moesaic.cli", "train", str(recipe), "seed=7"]
    assert started == [(command, 4, recipe.parent / "run" / "logs")]


def test_nproc_is_refused_under_a_launcher(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = run("train", recipe, "--nproc", 4)
    assert result.exit_code == 2 and "--nproc" in result.stderr
    assert run("train", recipe, "dp_size=2").exit_code == 2  # 4 ranks were started, the recipe wants 2
    result = run("export", recipe.parent / "step-000001", recipe.parent / "out", "--nproc", 4)
    assert result.exit_code == 2 and "--nproc" in result.stderr


def test_export_refuses_what_is_no_checkpoint(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "launch", lambda *_: pytest.fail("nothing may start"))
    result = run("export", recipe.parent / "step-000001", recipe.parent / "out", "--nproc", 4)
    assert result.exit_code == 2 and "step-000001" in result.stderr


def test_upcycle_reports_what_is_wrong(tmp_path: Path) -> None:
    result = run("upcycle", tmp_path, tmp_path / "out", "--family", "nothing", "--num-experts", 0)
    assert result.exit_code == 2 and "family" in result.stderr and "num_experts" in result.stderr


def test_version() -> None:
    assert run("--version").stdout == f"moesaic {moesaic.__version__}\n"


TORCH_FREE = """
import sys
from moesaic.cli import app
try:
    app(sys.argv[1:])
except SystemExit as leaving:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print("code", leaving.code)
"""


@pytest.mark.parametrize(("args", "code"), [(("check", "--world", "4"), 0), (("train", "dist_config.ep_size=9"), 2)])
def test_a_recipe_is_checked_without_torch(recipe: Path, args: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-c", TORCH_FREE, args[0], str(recipe), *args[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == [f"code {code}"], done.stderr
