"""Comparing folders of tensors: what differs and by how much, what only one side has, exit codes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.verify.diff import Difference, diff
from moesaic.verify.stores import SafetensorsStore, open_store

NAN, INF = math.nan, math.inf


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["diff", *(str(arg) for arg in args)])


def compare(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> Difference:
    (found,) = diff(write(tmp_path / "a", {"x": a}), write(tmp_path / "b", {"x": b})).differences
    return found


@pytest.mark.parametrize(
    ("a", "b", "rel", "max_abs", "same_bits"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0, True),
        ([1.0, 3.0], [1.0, -4.0], 7 / 4, 7, False),
        ([NAN, 1.0], [NAN, 1.0], 0, 0, True),
        ([NAN, 1.0], [1.0, 1.0], INF, INF, False),
        ([1.0, 1.0], [NAN, 1.0], INF, INF, False),
        ([INF, 1.0], [INF, 2.0], 0, 1, False),
        ([1.0, 1.0], [INF, 1.0], INF, INF, False),
        ([0.0, 0.0], [-0.0, 0.0], 0, 0, False),
        ([1e-9, 0.0], [0.0, 0.0], INF, 1e-9, False),
        ([], [], 0, 0, True),
    ],
)
def test_differences_are_what_the_formula_says(
    tmp_path: Path, a: list[float], b: list[float], rel: float, max_abs: float, same_bits: bool
) -> None:
    found = compare(tmp_path, torch.tensor(a), torch.tensor(b))
    assert (found.rel, found.max_abs, found.same_bits) == (rel, pytest.approx(max_abs), same_bits)


def test_a_late_difference_in_a_large_tensor_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.verify.diff.NUM_CHUNK_VALUES", 4)
    b = torch.arange(1.0, 12.0)
    a = b.clone()
    a[10] += 5.5
    assert compare(tmp_path, a, b).rel == 0.5


def test_shapes_and_dtypes_that_differ_are_told(tmp_path: Path) -> None:
    shapes = compare(tmp_path, torch.ones(2, 3), torch.ones(3, 2))
    assert (shapes.rel, shapes.mismatch) == (INF, "[2, 3] float32 / [3, 2] float32")
    dtypes = compare(tmp_path, torch.ones(2), torch.ones(2).bfloat16())
    assert (dtypes.rel, dtypes.same_bits, dtypes.mismatch) == (0, False, "[2] float32 / [2] bfloat16")
    assert run(tmp_path / "a", tmp_path / "b", "--tol", 1).exit_code == 1


def test_the_worst_comes_first_and_one_sided_names_are_listed(tmp_path: Path) -> None:
    ones = torch.ones(2)
    write(tmp_path / "a", {"same": ones, "far": ones * 3, "near": ones * 1.5, "new": ones * 4})
    write(tmp_path / "b", {name: ones.clone() for name in ("same", "far", "near", "old")})
    result = run(tmp_path / "a", tmp_path / "b", "--rows", 2)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["far", "near"] and lines[1].split()[1] == "2.00e+00"
    assert lines[3:] == [
        f"only in {tmp_path / 'a'}: new",
        f"only in {tmp_path / 'b'}: old",
        "3 tensors on both sides, 2 not bit-equal",
    ]


def test_exit_codes(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": torch.tensor([1.0, 2.0])})
    b = write(tmp_path / "b", {"x": torch.tensor([1.0, 2.02])})
    assert run(a, a).exit_code == 0
    assert run(a, b).exit_code == 1 and run(a, b, "--tol", 0.009).exit_code == 1
    assert run(a, b, "--tol", 0.0100).exit_code == 0
    nothing = run(a, tmp_path / "none")
    assert nothing.exit_code == 2 and "none" in nothing.stderr


def test_a_signed_zero_counts_only_where_every_bit_does(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": torch.tensor([0.0, 1.0])})
    b = write(tmp_path / "b", {"x": torch.tensor([-0.0, 1.0])})
    assert run(a, b).exit_code == 1 and run(a, b, "--tol", 1e-9).exit_code == 0


def test_folders_below_give_their_names(tmp_path: Path) -> None:
    write(tmp_path / "a" / "grad", {"x": torch.ones(1)})
    write(tmp_path / "a" / "param", {"x": torch.ones(2)})
    assert {name: facts.shape for name, facts in open_store(tmp_path / "a").facts.items()} == {
        "grad/x": (1,),
        "param/x": (2,),
    }


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x": torch.ones(1)})
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"x is in model.safetensors and in other.safetensors"):
        SafetensorsStore(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_compared_under_the_modules_own_names(tmp_path: Path) -> None:
    weights = {"model.norm.weight": torch.arange(4.0), "head.weight": torch.ones(2, 3, dtype=torch.bfloat16)}
    moments = {"state": {"head.weight": {"exp_avg": torch.zeros(2, 3)}}}
    dcp.save({"model": weights, "optimizer": moments, "step": 3}, checkpoint_id=tmp_path / "step-000003")
    write(tmp_path / "param", weights)
    report = diff(tmp_path / "step-000003", tmp_path / "param")
    assert [(found.name, found.same_bits) for found in report.differences] == [
        ("head.weight", True),
        ("model.norm.weight", True),
    ]
    assert report.only_a == report.only_b == ()
    dcp.save({"model": weights, "step": 3}, checkpoint_id=tmp_path / "step-000004")
    report = diff(tmp_path / "step-000003", tmp_path / "step-000004")
    assert report.only_a == ("optimizer.state.head.weight.exp_avg",) and report.only_b == ()
