"""The command ``moesaic verify`` as a user runs it, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

from moesaic.cli import UNREAD_BY_VERIFY, app
from moesaic.config import load_recipe
from moesaic.verify.compare import Comparison, Measured
from moesaic.verify.plan import save_plan
from moesaic.verify.run import _worst_of_ranks
from tests.pool import RunRanks
from tests.unit.tiny_checkpoints import save_tiny


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe without any data, of a model without a tokenizer."""
    save_tiny(tmp_path / "model", "qwen3_moe")
    path = tmp_path / "recipe.yaml"
    fields = {
        "model": str(tmp_path / "model"),
        "output_dir": str(tmp_path / "run"),
        "dist_config": {"name": "moesaic", "ep_size": 2},
    }
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.mark.slow  # starts the command, and by it four processes that import everything
def test_the_command_proves_a_recipe_on_a_shrunken_copy(recipe: Path) -> None:
    command = ["-m", "moesaic.cli", "verify", str(recipe), "--world", "2", "--shrink", "always", "--json"]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["is_proven"] and not report["findings"]
    assert report["facts"]["topology"].startswith("2 ranks") and "shrunken copy" in " ".join(report["notes"])
    folder = recipe.parent / "run" / "verify"
    assert json.loads((folder / "report.json").read_text()) == report
    assert not list(folder.rglob("*.safetensors")) and not (folder / "checkpoints").exists()


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, args)])


def test_a_recipe_that_is_wrong_starts_nothing(recipe: Path) -> None:
    assert run(recipe, "--world", 2, "dist_config.ep_size=3").exit_code == 2
    unknown = run(recipe)
    assert unknown.exit_code == 2 and "--world" in unknown.output
    assert run(recipe, "--world", 2, "--against", "others").exit_code == 2
    assert not (recipe.parent / "run").exists()


def test_a_model_that_does_not_fit_is_refused_where_it_may_not_shrink(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.verify.plan.free_memory_bytes", lambda kind: 1000)
    refused = run(recipe, "--world", 2, "--shrink", "never")
    assert refused.exit_code == 2 and "shrink=never: one process would need" in refused.output


def compare(rank: int, path: Path) -> list[Measured]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    whole = torch.arange(1.0, 11).reshape(5, 2)
    one = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    # Each replica has a part of its own, as if nothing had summed over them.
    part = DTensor.from_local(
        one.to_local() * (0.3 if rank < 2 else 0.7), mesh, one.placements, shape=one.shape, stride=(2, 1)
    )
    broken = whole.clone()
    broken[4, 1] = torch.nan if rank == 3 else 10
    ours = {"equal": one, "part": part, "double": 2 * one, "broken": broken, "more": torch.ones(3)}
    return Comparison(path, "gradient").measure(ours, {**ours, "missing": one})


def test_comparison_of_shards(run_ranks: RunRanks, tmp_path: Path) -> None:
    whole = torch.arange(1.0, 11).reshape(5, 2)
    names = ("equal", "part", "double", "broken", "missing")
    save_file({f"gradient/{name}": whole.clone() for name in names}, tmp_path / "reference.safetensors")
    results = run_ranks(compare, 4, tmp_path / "reference.safetensors")
    assert all(result == results[0] for result in results[1:])
    by_name = {one.name: one for one in results[0]}
    assert set(by_name) == {*names, "more"}
    equal, part, double = by_name["equal"], by_name["part"], by_name["double"]
    assert (equal.error, equal.ratio, equal.rank) == (0, 1, 0) and equal.cosine == pytest.approx(1)
    assert equal.power == equal.reference_power == whole.square().sum().item()
    assert part.ratio == pytest.approx(0.5) and part.error == pytest.approx(0.7) and part.cosine < 0.95
    assert (double.error, double.ratio) == (1, 2) and double.placements == "replica: R; shard: S(0)"
    assert by_name["broken"].error == float("inf")
    assert (by_name["missing"].error, by_name["missing"].ratio, by_name["missing"].power) == (1, 0, 0)
    assert by_name["more"].error > 1e29 and by_name["more"].ratio is None


def test_a_model_without_weights_is_a_copy(recipe: Path) -> None:
    """What is checked before a terabyte is downloaded."""
    for path in (recipe.parent / "model").glob("*.safetensors*"):
        path.unlink()
    loaded = load_recipe(recipe, [], world_size=2, ignored=UNREAD_BY_VERIFY)
    plan = save_plan(loaded, recipe.parent / "plan", world_size=2)
    assert plan.is_shrunk and any("has no weights" in note for note in plan.notes)
    with pytest.raises(ValueError, match="shrink=never: the model's folder has no weights"):
        save_plan(loaded, recipe.parent / "plan", shrink="never", world_size=2)


def test_more_ranks_than_the_machine_has_room_for(recipe: Path) -> None:
    done = run(recipe, "--world", 4096)
    assert done.exit_code == 2 and "4096 ranks would start here" in done.output


def numbers_of_ranks(rank: int) -> dict[str, float]:
    return _worst_of_ranks({"norm": 2.0 if rank == 1 else 1.0, "loss": 1.0}, {"norm": 1.0, "loss": 1.0})


def test_a_number_that_one_rank_has_wrong_counts(run_ranks: RunRanks) -> None:
    assert run_ranks(numbers_of_ranks, 2) == [{"norm": 2.0, "loss": 1.0}] * 2
