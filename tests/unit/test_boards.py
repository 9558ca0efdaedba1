"""Curves beyond TensorBoard, with a stand-in for the wandb package: nothing here goes to the network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import Recipe, check_recipe
from moesaic.train.boards import TensorBoard, WandbBoard, build_boards
from moesaic.train.evaluate import HeldOut
from moesaic.train.metrics import MetricsWriter
from tests.unit.test_metrics import METRICS

# Writes down what it is asked to do, one JSON line a call.
STAND_IN = """
import json, pathlib
class Run:
    def __init__(self, id, file):
        self.id, self.file = id, file
    def note(self, *what):
        with self.file.open("a") as out:
            out.write(json.dumps(what) + "\\n")
    def log(self, scalars, step):
        self.note("log", step, scalars)
    def finish(self):
        self.note("finish")
def init(dir, config, id, resume):
    run = Run(id or "fresh", pathlib.Path(dir) / "calls.jsonl")
    run.note("init", config, id, resume)
    return run
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name that can be imported."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_curves_go_to_wandb_under_the_same_names(wandb: None, tmp_path: Path) -> None:
    boards = build_boards(("wandb", "tensorboard", "wandb"), tmp_path, {"seed": 1}, is_resumed=False)
    assert [type(board) for board in boards] == [WandbBoard, TensorBoard]
    writer = MetricsWriter(tmp_path, num_steps=5, boards=boards)
    writer.write_step(METRICS)
    writer.write_eval(3, HeldOut(sets={"eval": (2.5, 40)}))
    writer.close()
    init, step, evaluation, finish = calls(tmp_path)
    assert init == ["init", {"seed": 1}, None, None] and finish == ["finish"]
    assert step[:2] == ["log", 3] and step[2]["train/loss"] == 1.25 and step[2]["train/expert_load/layers.1"] == 2.5
    assert evaluation == ["log", 3, {"eval/loss": 2.5}]


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(wandb: None, tmp_path: Path) -> None:
    for is_resumed in (False, True, False):
        build_boards(("wandb",), tmp_path, {}, is_resumed=is_resumed)[0].close()
    assert [call[1:] for call in calls(tmp_path) if call[0] == "init"] == [
        [{}, None, None],
        [{}, "fresh", "allow"],
        [{}, None, None],
    ]


def test_no_board_is_made_that_nobody_asked_for(tmp_path: Path) -> None:
    assert build_boards((), tmp_path, {}, is_resumed=False) == []
    assert list(tmp_path.iterdir()) == []


def problems(**fields: Any) -> list[str]:
    recipe = Recipe.model_validate({"model": "m", "train_dataset": "d", **fields})
    return [str(problem) for problem in check_recipe(recipe) if problem.field == "report_to"]


def test_a_missing_package_is_a_problem_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.config.check.importlib.util.find_spec", lambda name: None)
    (problem,) = problems(report_to=["tensorboard", "wandb"])
    assert "wandb isn't installed" in problem and "moesaic[wandb]" in problem
    assert problems(report_to=["tensorboard"]) == []


def test_a_package_that_is_there_is_none(wandb: None) -> None:
    assert problems(report_to=["wandb"]) == []
