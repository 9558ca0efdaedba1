"""``moesaic verify`` proves topologies that are right, and finds planted faults where they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moesaic.verify import explain
from moesaic.verify.report import TOLERANCES, Report
from tests.oracle import faults
from tests.oracle.reference import Case
from tests.oracle.verifications import Fault, Verification, prepare_folder, verify
from tests.pool import RunRanks

EP2 = {"dist_config": {"name": "moesaic", "ep_size": 2}}
EP4 = {"dist_config": {"name": "moesaic", "ep_size": 4}}
HSDP = {"mp_replicate_size": 2, **EP2}
AUX = {"router_config": {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}}
EXPERTS = {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"}
GATE = "model.layers.*.mlp.gate.weight"

PLAIN = Verification(name="ep4", world_size=4, fields=EP4)
REPLICAS = Verification(name="hsdp", world_size=4, fields=HSDP)
BALANCED = Verification(name="aux", world_size=2, fields={**EP2, **AUX})
# 7 experts, of which ep has 4 and 3, and efsdp shards these: their widths aren't divisible by 3.
STRIDED = Verification(name="strided", world_size=6, fields=EP2, case=Case(num_experts=7))
WHOLE_NORM = Verification(
    name="whole-norm",
    world_size=4,
    fields={"dist_config": {"name": "moesaic", "ep_size": 2, "fsdp_ignored_modules": ["model.norm"]}},
)
SPLIT_ROWS = Verification(name="cp", world_size=4, fields={**EP2, **AUX, "cp_size": 2, "packing": True})

SPLIT_HEADS = Verification(name="tp", world_size=4, fields={**EP2, "tp_size": 4})

RIGHT = (
    PLAIN,
    REPLICAS,
    BALANCED,
    STRIDED,
    WHOLE_NORM,
    Verification(name="single", world_size=2, fields={**EP2, **AUX}, against="single"),
    SPLIT_HEADS,
    SPLIT_ROWS,
    Verification(
        name="moved-biases",
        world_size=2,
        fields={**EP2, "router_config": {"bias_update_rate": 0.01}},
        case=Case(family="deepseek_v3", is_listed=True),
    ),
    Verification(name="path-a", world_size=2, fields={"max_grad_norm": None}),
    Verification(
        name="packed-accumulated-checkpointed",
        world_size=2,
        fields={
            **EP2,
            "packing": True,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "activation_checkpointing": True,
            "frozen_modules": ["model.layers.0.self_attn"],
        },
    ),
)


# Run by `make test`; the others by `make test-slow`.
SAMPLE = {"aux", "single", "tp", "cp", "moved-biases"}


@pytest.mark.parametrize(
    "verification",
    [pytest.param(one, marks=[] if one.name in SAMPLE else [pytest.mark.slow], id=one.name) for one in RIGHT],
)
def test_right_topologies_are_proven(verification: Verification, run_ranks: RunRanks, reference_root: Path) -> None:
    folder = prepare_folder(verification, reference_root, run_ranks)
    reports = run_ranks(verify, verification.world_size, folder)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report.is_proven and not report.findings, [check for check in report.checks if not check.is_passed]
    assert {check.what for check in report.checks} == set(TOLERANCES)


def found(
    verification: Verification, fault: Fault, run_ranks: RunRanks, root: Path
) -> tuple[Report, list[explain.Finding]]:
    folder = prepare_folder(verification, root, run_ranks)
    report = run_ranks(verify, verification.world_size, folder, fault)[0]
    assert not report.is_proven and report.findings
    return report, list(report.findings)


def failed(report: Report, what: str) -> set[str]:
    return {
        explain.layers_as_stars(check.name) for check in report.checks if check.what == what and not check.is_passed
    }


def test_a_wrong_divide_factor(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(STRIDED, faults.wrong_divide_factor, run_ranks, reference_root)
    assert failed(report, "gradient") == EXPERTS == set(first.names)
    assert (first.kind, first.axes) == (explain.DIVIDED, ("efsdp",))
    assert first.ratio == pytest.approx(1 / 3, rel=1e-5)


def test_experts_left_unwrapped_at_efsdp_1(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(PLAIN, faults.unwrapped_experts, run_ranks, reference_root)
    assert failed(report, "gradient") == EXPERTS == set(first.names)
    assert (first.kind, first.axes[0]) == (explain.COUNTED, "ep")
    assert first.ratio == pytest.approx(4, rel=1e-5)


def test_a_dense_parameter_that_is_not_reduced_over_mp_shard(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(WHOLE_NORM, faults.unreduced_modules, run_ranks, reference_root)
    assert failed(report, "gradient") == {"model.norm.weight"} == set(first.names)
    assert (first.kind, first.axes[0]) == (explain.UNREDUCED, "mp_shard")
    assert first.ratio == pytest.approx(1 / 4, rel=1e-5)


def test_replicas_that_are_not_reduced(run_ranks: RunRanks, reference_root: Path) -> None:
    _, (first, *others) = found(REPLICAS, faults.unreduced_replicas, run_ranks, reference_root)
    assert (first.kind, first.axes[0]) == (explain.UNREDUCED, "mp_replicate")
    assert "lm_head.weight" in first.names and first.ratio == pytest.approx(1 / 2, rel=1e-5)
    # What follows from it: copies of the weights part, and a checkpoint holds one of them.
    assert [one.kind for one in others] == [explain.NORM, explain.UPDATE, explain.CHECKPOINT]


def test_dense_parameters_that_are_not_reduced_over_cp(run_ranks: RunRanks, reference_root: Path) -> None:
    _, (first, *_) = found(SPLIT_ROWS, faults.unreduced_over_cp, run_ranks, reference_root)
    assert (first.kind, first.axes[0]) == (explain.UNREDUCED, "cp")
    assert "lm_head.weight" in first.names and first.ratio == pytest.approx(1 / 2, rel=1e-5)


def test_tokens_dispatched_twice_under_tp(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(SPLIT_HEADS, faults.dispatched_by_each_tp_rank, run_ranks, reference_root)
    assert failed(report, "gradient") == EXPERTS == set(first.names)
    assert (first.kind, first.axes[0]) == (explain.COUNTED, "tp")
    assert first.ratio == pytest.approx(4, rel=1e-5)


def test_a_strided_shard_skipped_at_load(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(STRIDED, faults.skipped_strided_shard, run_ranks, reference_root)
    assert first.kind == explain.LOAD and set(first.names) == failed(report, "start") <= EXPERTS
    assert "_StridedShard" in first.text or "_S(" in first.text, first.text


def test_a_detached_router(run_ranks: RunRanks, reference_root: Path) -> None:
    _, (first, *_) = found(PLAIN, faults.detached_router, run_ranks, reference_root)
    assert (first.kind, first.names) == (explain.DETACHED, (GATE,))


def test_an_auxiliary_loss_per_rank(run_ranks: RunRanks, reference_root: Path) -> None:
    report, findings = found(BALANCED, faults.aux_loss_per_rank, run_ranks, reference_root)
    assert failed(report, "loss") == {"aux_loss"}
    assert findings[0].kind == explain.ROUTER and findings[0].names == ("aux_loss",)
    (gradients,) = (one for one in findings if one.kind == explain.OTHER)
    assert gradients.names[0] == GATE


def test_a_replica_counted_twice_in_the_norm(run_ranks: RunRanks, reference_root: Path) -> None:
    report, (first, *_) = found(REPLICAS, faults.replicas_counted_in_the_norm, run_ranks, reference_root)
    assert not failed(report, "gradient")
    assert (first.kind, first.axes[0]) == (explain.NORM, "mp_replicate")
    assert first.ratio == pytest.approx(math.sqrt(2), rel=1e-5)
