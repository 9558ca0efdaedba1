"""The judge of every parity cell must itself notice what isn't equal."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle.cells import TOLERANCES, assert_within_tolerance, largest, rel_error, worst

NAN, INF = float("nan"), float("inf")


def tensors(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([1.0, value]) for name, value in values.items()}


def test_the_largest_error_is_found_wherever_it_stands() -> None:
    reference = tensors(a=2.0, b=4.0, c=2.0)
    assert worst(tensors(a=2.0, b=5.0, c=2.5), reference) == (0.25, "c")  # 1/4 in b and 0.5/2 in c: a tie, by name
    assert worst(tensors(a=2.2, b=4.0, c=2.0), reference)[1] == "a"
    assert worst(reference, reference)[0] == 0.0


@pytest.mark.parametrize("where", ["a", "b", "c"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_value_that_is_not_finite_is_an_infinite_error(where: str, value: float) -> None:
    good = tensors(a=2.0, b=4.0, c=2.0)
    bad = {**good, where: torch.tensor([1.0, value])}
    for ours, reference in ((bad, good), (good, bad), (bad, bad)):
        assert worst(ours, reference) == (INF, where)
    assert largest({"a": 1.0, "b": 0.0, "c": 2.0, where: NAN}) == (INF, where)


def test_a_tensor_on_one_side_only_is_no_equality() -> None:
    for ours, reference in ((tensors(a=1.0), tensors(a=1.0, b=1.0)), (tensors(a=1.0, b=1.0), tensors(a=1.0))):
        with pytest.raises(AssertionError, match=r"only on one side: \['b'\]"):
            worst(ours, reference)
    with pytest.raises(AssertionError, match="nothing was compared"):
        worst({}, {})


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"\(1,\), not \(3,\)"):
        rel_error(torch.ones(1), torch.ones(3))


@pytest.mark.parametrize("quantity", TOLERANCES)
@pytest.mark.parametrize("factor", [1.01, NAN, INF])
def test_each_quantity_is_judged(quantity: str, factor: float) -> None:
    errors = {key: (bound, "x") for key, bound in TOLERANCES.items()}
    assert_within_tolerance(errors)
    errors[quantity] = (factor * TOLERANCES[quantity], "x")
    with pytest.raises(AssertionError, match=f"beyond tolerance: {{'{quantity}'"):
        assert_within_tolerance(errors)
    assert math.isfinite(TOLERANCES[quantity])
