"""Ratios to axes: each row of the module's table, and what no size explains."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moesaic.config import ParallelSizes
from moesaic.verify import explain
from moesaic.verify.compare import Measured

# dp 4, mp_replicate 2, mp_shard 8, edp 1, efsdp 4, ep 4, cp 4: 16 ranks.
SIZES = ParallelSizes(world_size=16, cp_size=4, mp_replicate_size=2, ep_size=4)
EXPERTS = ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj")
DENSE = "model.layers.0.self_attn.q_proj.weight"


def measured(name: str = DENSE, **changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "error": 1.0,
        "ratio": 1.0,
        "cosine": 1.0,
        "power": 1.0,
        "reference_power": 1.0,
        "rank": 0,
        "placements": "mp_shard: S(0)",
    }
    return Measured(name=name, **{**fields, **changes})


@pytest.mark.parametrize(
    ("ratio", "cosine", "is_expert", "kind", "axes"),
    [
        (4.0, 1.0, True, explain.COUNTED, ("ep", "efsdp", "dp", "cp")),
        (4.0, 1.0, False, explain.COUNTED, ("dp", "cp")),
        (2.0, 1.0, False, explain.COUNTED, ("mp_replicate",)),
        (1 / 8, 1.0, False, explain.DIVIDED, ("mp_shard",)),
        (
            1 / 16,
            1.0,
            True,
            explain.DIVIDED,
            ("ep * efsdp", "ep * dp", "ep * cp", "efsdp * dp", "efsdp * cp", "dp * cp"),
        ),
        (1 / 2, 0.6, False, explain.UNREDUCED, ("mp_replicate",)),
        (1 / 2, 0.6, True, explain.OTHER, ()),
        (1.37, 1.0, False, explain.COUNTED, ()),
        (0.97, 0.98, False, explain.OTHER, ()),
        (2.001, 1.0, False, explain.COUNTED, ()),
    ],
)
def test_kinds_and_axes(ratio: float, cosine: float, is_expert: bool, kind: str, axes: tuple[str, ...]) -> None:
    assert explain.classify(measured(ratio=ratio, cosine=cosine), is_expert, SIZES) == (kind, axes)


def test_a_gradient_that_is_not_there() -> None:
    zero = measured(ratio=0.0, cosine=None, power=0.0)
    assert explain.classify(zero, False, SIZES) == (explain.DETACHED, ())
    assert explain.classify(measured(ratio=0.0, cosine=0.0), False, SIZES)[0] == explain.OTHER


def test_values_that_are_not_finite_have_no_ratio() -> None:
    assert explain.classify(measured(error=math.inf, ratio=math.nan, cosine=math.nan), False, SIZES)[0] == explain.OTHER


def test_an_axis_that_shards_a_parameter_has_reduced_it() -> None:
    sizes = ParallelSizes(world_size=4, mp_replicate_size=2)
    part = measured(ratio=0.5, cosine=0.7)
    assert explain.classify(part, False, sizes) == (explain.UNREDUCED, ("mp_replicate", "mp_shard"))


def test_alike_findings_are_one() -> None:
    wrong = [measured(name, ratio=4.0) for name in EXPERTS] + [measured(ratio=1 / 8)]
    findings = explain.explain_gradients(wrong, EXPERTS, SIZES)
    assert [(one.kind, one.names, one.count) for one in findings] == [
        (explain.COUNTED, ("model.layers.*.mlp.experts.down_proj",), 2),
        (explain.DIVIDED, ("model.layers.*.self_attn.q_proj.weight",), 1),
    ]
    assert "4 times the reference's" in findings[0].text and "ep" in findings[0].text
    assert all(one.look_at == explain.LOOK_AT[one.kind] for one in findings)


def test_a_norm_in_which_one_group_counts_twice() -> None:
    gradients = [measured(power=9.0, reference_power=9.0), measured(EXPERTS[0], power=16.0, placements="ep: S(0)")]
    found = explain.explain_norm(math.sqrt(2 * 9 + 16), 5.0, gradients, EXPERTS, SIZES)
    assert found.axes == ("mp_replicate",) and "the dense gradients counted 2 times" in found.text
    found = explain.explain_norm(math.sqrt(9 + 4 * 16), 5.0, gradients, EXPERTS, SIZES)
    assert set(found.axes) == {"dp", "cp", "efsdp", "ep"} and "the experts' gradients" in found.text


def test_a_norm_of_wrong_gradients_is_not_the_cause() -> None:
    found = explain.explain_norm(10.0, 5.0, [measured(power=100.0, reference_power=25.0)], (), SIZES)
    assert not found.axes and found.look_at == "the gradients first"


def test_causes_come_first() -> None:
    kinds = [explain.CHECKPOINT, explain.OTHER, explain.NORM, explain.LOAD, explain.COUNTED]
    ordered = explain.in_order(explain.finding(kind, "name", "text") for kind in kinds)
    assert [one.kind for one in ordered] == [
        explain.LOAD, explain.COUNTED, explain.NORM, explain.OTHER, explain.CHECKPOINT,
    ]  # fmt: skip
    assert set(explain.ORDER) == set(explain.LOOK_AT)
