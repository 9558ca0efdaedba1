"""The format of frozen vectors: written and read back alike, and no change goes unseen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.vectors import Case, Draw, Vectors, differences, load_vectors, ragged_mask, relative_error, save_vectors


def build(seed: int = 1) -> Vectors:
    draw = Draw(seed)
    table = draw.numbers(2, 3, low=-1, high=1)
    cases = [
        Case(kind="sum", name="all", options={"dim": None}, inputs={"x": table}, outputs={"y": table.sum()}),
        Case(kind="sum", name="rows", options={"dim": 1}, inputs={"x": table}, outputs={"y": table.sum(dim=1)}),
        Case(kind="mask", name="rows", outputs={"mask": ragged_mask((1, 3), 3)}),
    ]
    return Vectors(made_by={"torch": "x"}, cases=cases)


def test_vectors_come_back_as_they_were_and_the_same_ones_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_vectors(tmp_path / name, build())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    there = load_vectors(tmp_path / "one")
    assert differences(build(), there, 0.0) == [] and there.made_by == {"torch": "x"}
    rows = there.of_kind("sum")
    # Stored once, read apart: what a test does to one doesn't reach another.
    rows["all"].inputs["x"].zero_()
    assert rows["rows"].inputs["x"].any()


CHANGED = {
    "option": (1, {"options": {"dim": 0}}, "sum/rows: options"),
    "name": (1, {"name": "columns"}, "sum/columns: not in the file"),
    "input": (0, {"inputs": {"x": Draw(2).numbers(2, 3, low=-1, high=1)}}, "sum/all: inputs.x differs"),
    "output": (
        0,
        {"outputs": {"y": build().cases[0].outputs["y"] * (1 + 1e-4)}},
        "sum/all: outputs.y differs by 1.0e-04",
    ),
    "kind of number": (2, {"outputs": {"mask": ragged_mask((1, 3), 3).int()}}, "mask/rows: outputs.mask differs"),
    "missing output": (2, {"outputs": {}}, "mask/rows: outputs []"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_every_change_is_a_difference(what: str) -> None:
    number, change, message = CHANGED[what]
    cases = list(build().cases)
    cases[number] = replace(cases[number], **change)
    found = differences(replace(build(), cases=cases), build(), 1e-7)
    assert any(message in problem for problem in found), found


def test_errors_are_relative_to_a_tensors_largest_number() -> None:
    expected = torch.tensor([1.0, 1000.0])
    assert relative_error(torch.tensor([1.5, 1000.0]), expected) == pytest.approx(5e-4)
    assert relative_error(expected[:1], expected) == relative_error(expected * torch.nan, expected) == float("inf")
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.tensor([1e-9]), torch.zeros(1)) > 1
