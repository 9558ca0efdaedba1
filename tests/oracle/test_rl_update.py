"""Updates by reinforcement learning compute what one process computes on whole tables, whatever the micro-batches,
their layout and the topology: every metric, every gradient, the norm, and the weights after two updates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch

from moesaic.config.rl_sections import KlEstimator, LossAggMode, LossMode
from moesaic.parallel.apply import ParallelOptions
from tests.oracle.cells import TOLERANCES, assert_within_tolerance
from tests.oracle.reference import Case, load_reference
from tests.oracle.rl_cells import RlCell, run_faulty_cell, run_rl_cell, run_scores, run_topk
from tests.oracle.rl_reference import RlCase, RlReference, compute_reference, load_plain, save_critic
from tests.pool import RunRanks

PATH_A = ParallelOptions(expert_parallel=False)
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
END_TO_END = {"micro_batch_tokens": 24}


def rows(number: int) -> dict[str, int]:
    return {"micro_batch_size": number}


CELLS: dict[str, RlCell] = {
    "one-rank-rows-of-3": RlCell(world_size=1, batches=rows(3)),
    "one-rank-end-to-end": RlCell(world_size=1, batches=END_TO_END),
    "fsdp4": RlCell(world_size=4, batches=rows(4)),
    "ep2-efsdp2": RlCell(world_size=4, sizes={"ep_size": 2}, batches=END_TO_END),
    "cp2": RlCell(world_size=2, sizes={"cp_size": 2}, batches=rows(2)),
    "tp2": RlCell(world_size=2, sizes={"tp_size": 2}, batches=END_TO_END),
    "cp2-ep4": RlCell(world_size=4, sizes={"cp_size": 2, "ep_size": 4}, batches=END_TO_END),
    "cp2-tp2-ep2": RlCell(world_size=4, sizes={"cp_size": 2, "tp_size": 2, "ep_size": 2}, batches=rows(4)),
}
MORE_CELLS: dict[str, RlCell] = {
    "one-rank-rows-of-1": RlCell(world_size=1),
    "one-rank-all-in-one": RlCell(world_size=1, batches={"micro_batch_tokens": 128}),
    "path-a-2": RlCell(world_size=2, options=PATH_A, batches=rows(2)),
    "ep4-rows": RlCell(world_size=4, sizes={"ep_size": 4}),
    "hsdp2-ep2": RlCell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2}, batches=END_TO_END),
    "ep2-unsharded": RlCell(
        world_size=4, sizes={"ep_size": 2}, batches={**END_TO_END, "gradient_accumulation": "unsharded"}
    ),
    "ep2-checkpointed": RlCell(world_size=4, sizes={"ep_size": 2}, options=CHECKPOINTED),
    "cp4-ep2": RlCell(world_size=4, sizes={"cp_size": 4, "ep_size": 2}, batches=rows(3)),
    "tp4": RlCell(world_size=4, sizes={"tp_size": 4}),
}
# Together they have each loss, each aggregation, each KL once.
SAMPLE = (
    RlCase(loss_mode="vanilla", agg="token-mean", kl="k3+", entropy_coeff=0.1),
    RlCase(loss_mode="gspo", agg="seq-mean-token-mean", kl="k2", has_weights=True, optimizer="adamw"),
    RlCase(loss_mode="cispo", agg="seq-mean-token-sum-norm", temperature=1.0),
    RlCase(loss_mode="gpg", agg="token-sum", kl="k3", entropy_coeff=0.1, optimizer="adamw"),
    RlCase(loss_mode="sapo", agg="seq-mean-token-sum"),
    RlCase(loss_mode="dppo_tv", agg="token-mean", distillation="beside", optimizer="adamw"),
)
CRITICS = (
    RlCase(role="critic", agg="seq-mean-token-mean"),
    RlCase(role="critic", agg="token-mean", optimizer="adamw"),
)
OPTIMIZERS: tuple[Literal["sgd", "adamw"], ...] = ("sgd", "adamw")
# k1 as a loss has no expected gradient, and is refused.
TRIPLES = [
    RlCase(loss_mode=loss_mode, agg=agg, kl=kl, entropy_coeff=0.1, has_weights=True, optimizer=OPTIMIZERS[number % 2])
    for number, (loss_mode, agg, kl) in enumerate(
        itertools.product(get_args(LossMode), get_args(LossAggMode), ("k2", "k3", "k3+"))
    )
]

# Run by `make test`: of one rank, the experts' two axes, and all axes together; the others by `make test-slow`.
IN_TEST = ("one-rank-rows-of-3", "one-rank-end-to-end", "ep2-efsdp2", "cp2-tp2-ep2")
SLOW = pytest.mark.slow

References = Callable[[RlCase, bool], RlReference]


@pytest.fixture(scope="module")
def reference_of(reference_root: Path) -> References:
    """What one process computes, once for all cells that share it."""

    @functools.cache
    def compute(case: RlCase, tied: bool = False) -> RlReference:
        folder = load_reference(Case(tied=tied), reference_root).folder
        if case.role == "critic":
            target = reference_root / f"{folder.name}-critic"
            folder = target if target.exists() else save_critic(folder, target)
        return compute_reference(case, folder)

    return compute


def compare(cell: RlCell, references: list[RlReference], run_ranks: RunRanks) -> None:
    per_rank = run_ranks(run_rl_cell, cell.world_size, cell, references)
    for number, reference in enumerate(references):
        for found in (results[number] for results in per_rank):
            try:
                assert_within_tolerance({**found, "sgd": (0.0, ""), "adamw": (0.0, ""), **found})
                assert found["columns"][0] <= TOLERANCES["grads"], found["columns"]
            except AssertionError as error:
                raise AssertionError(f"{reference.case}: {error}") from error
            for name, table in found["tables"].items():
                assert torch.equal(table, per_rank[0][number]["tables"][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in IN_TEST else [SLOW]) for each in CELLS])
def test_each_formula_on_each_topology(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    compare(CELLS[name], [reference_of(case, False) for case in SAMPLE], run_ranks)


@pytest.mark.parametrize("name", ["fsdp4", "cp2-tp2-ep2"])
def test_the_critic(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    compare(CELLS[name], [reference_of(case, False) for case in CRITICS], run_ranks)


@pytest.mark.parametrize("name", ["ep2-efsdp2", "cp2-tp2-ep2"])
def test_tied_embeddings_and_a_teacher_alone(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    compare(CELLS[name], [reference_of(RlCase(distillation="alone"), True)], run_ranks)


@pytest.mark.product
@pytest.mark.parametrize("loss_mode", get_args(LossMode))
@pytest.mark.parametrize("name", [*CELLS, *MORE_CELLS])
def test_every_triple(name: str, loss_mode: LossMode, run_ranks: RunRanks, reference_of: References) -> None:
    triples = [case for case in TRIPLES if case.loss_mode == loss_mode]
    compare({**CELLS, **MORE_CELLS}[name], [reference_of(case, False) for case in triples], run_ranks)


@pytest.mark.product
@pytest.mark.parametrize("name", [*CELLS, *MORE_CELLS])
def test_more_critics_and_teachers(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    cell = {**CELLS, **MORE_CELLS}[name]
    compare(cell, [reference_of(RlCase(role="critic", agg=agg), False) for agg in get_args(LossAggMode)], run_ranks)
    cases = [RlCase(distillation="alone", agg=agg, entropy_coeff=0.1) for agg in get_args(LossAggMode)]
    for tied in (False, True):
        compare(cell, [reference_of(case, tied) for case in cases], run_ranks)


@pytest.mark.parametrize(
    ("fault", "name", "case"),
    [("means-of-own-parts", "cp2", SAMPLE[1]), ("own-counts", "one-rank-rows-of-3", SAMPLE[0])],
)
def test_faults_are_found(fault: str, name: str, case: RlCase, run_ranks: RunRanks, reference_of: References) -> None:
    cell = CELLS[name]
    errors = run_ranks(run_faulty_cell, cell.world_size, fault, cell, reference_of(case, False))
    assert min(errors) > 100 * TOLERANCES["grads"]


@pytest.mark.parametrize("name", ["ep2-efsdp2", "cp2-tp2-ep2"])
def test_scores_are_those_of_the_classifier(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    """At each trajectory's last token, the environment's too; on every rank the same."""
    reference = reference_of(CRITICS[0], False)
    model = load_plain(reference.case, reference.folder)
    expected = []
    with torch.no_grad():
        for each in reference.experience.trajectories:
            ids = torch.tensor([[*each.prompt.tokens, *each.tokens]])
            expected.append(model.score(model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]))
    per_rank = run_ranks(run_scores, CELLS[name].world_size, CELLS[name], reference)
    for scores in per_rank:
        assert torch.equal(scores, per_rank[0])
        torch.testing.assert_close(scores, torch.cat(expected), rtol=0, atol=1e-5)  # fp32, values of about 1


@pytest.mark.parametrize("name", ["ep2-efsdp2", "cp2-tp2-ep2"])
def test_the_teachers_likeliest_tokens(name: str, run_ranks: RunRanks, reference_of: References) -> None:
    reference = reference_of(SAMPLE[0], False)
    mask_BT, k = reference.experience.mask_BT, 4
    per_rank = run_ranks(run_topk, CELLS[name].world_size, CELLS[name], reference, k)
    model = load_plain(reference.case, reference.folder)
    with torch.no_grad():
        for number, each in enumerate(reference.experience.trajectories):
            ids = torch.tensor([[*each.prompt.tokens, *each.tokens]])
            first = len(each.prompt.tokens) - 1
            logits = model(input_ids=ids, use_cache=False).logits[0, first:-1] / reference.case.temperature
            logs = torch.log_softmax(logits, dim=-1)[torch.tensor(each.is_model)]
            for rows_BT, ids_MK, logprobs_MK, is_in_its_mode in per_rank:
                assert is_in_its_mode and torch.equal(rows_BT >= 0, mask_BT)
                rows = rows_BT[number][rows_BT[number] >= 0]
                assert torch.equal(ids_MK[rows].long(), logs.topk(k).indices)
                torch.testing.assert_close(logprobs_MK[rows], logs.topk(k).values, rtol=0, atol=1e-5)


def test_the_sample_has_every_formula() -> None:
    assert {case.loss_mode for case in SAMPLE} == set(get_args(LossMode))
    assert {case.agg for case in SAMPLE} == set(get_args(LossAggMode))
    assert {case.kl for case in SAMPLE} == {*get_args(KlEstimator), None} - {"k1"}


def test_the_data_has_what_it_should(reference_of: References) -> None:
    for case in SAMPLE:
        reference = reference_of(case, False)
        lengths = [len(each.tokens) for each in reference.experience.trajectories]
        assert 1 in lengths and len(set(lengths)) > 3
        assert not reference.mask_BT[3].any(), "a trajectory that was rejected as a whole"
        assert any(False in each.is_model for each in reference.experience.trajectories)
        # The bounds are met, and not by all.
        assert 0 < reference.metrics.get("actor/pg_clipfrac", (0.5, 0))[0] < 1, case
