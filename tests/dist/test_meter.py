"""What is measured over several ranks: tokens, loss, memory, expert load, and the held-out loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moesaic.data.batch import IGNORE_INDEX, Batch
from moesaic.meshes import Meshes, build_meshes
from moesaic.parallel.experts import ExpertLoad, ExpertParallel
from moesaic.train.evaluate import evaluate
from moesaic.train.flops import ModelFlops
from moesaic.train.metrics import Meter, gather_expert_load
from moesaic.train.step import StepResult


class FakeExperts(nn.Module):
    """Has what the counters are read from: a weight, and the state that expert parallelism puts on the module."""

    def __init__(self, meshes: Meshes, num_experts: int, local_tokens: list[int] | None) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(1))
        load = ExpertLoad()
        load.tokens = None if local_tokens is None else torch.tensor(local_tokens)
        self.expert_parallel = ExpertParallel(None, meshes.expert["ep"], num_experts, load)  # type: ignore[arg-type]


def load_on_rank(rank: int) -> list[dict[str, float]]:
    meshes = build_meshes(ep_size=2)
    model = nn.ModuleDict(
        {
            "even": FakeExperts(meshes, 4, [[6, 2], [4, 4]][rank]),
            "uneven_ep": FakeExperts(meshes, 3, [[1, 1], [4]][rank]),  # 3 experts on 2 ranks: 2 and 1
            "idle": FakeExperts(meshes, 4, None),
        }
    )
    return [gather_expert_load(model), gather_expert_load(model)]


def test_expert_load_is_max_over_mean_of_all_ranks_and_starts_anew(run_ranks) -> None:
    first, second = run_ranks(load_on_rank, 2)[0]
    assert first == {"even": 1.5, "uneven_ep": 2.0, "idle": 1.0}
    assert second == {"even": 1.0, "uneven_ep": 1.0, "idle": 1.0}


def replicated_load_on_rank(rank: int) -> dict[str, float]:
    meshes = build_meshes(ep_size=2)  # efsdp 2: ranks 0, 2 hold the same experts and count other tokens
    return gather_expert_load(nn.ModuleDict({"layer": FakeExperts(meshes, 2, [rank])}))


def test_ranks_with_the_same_experts_add_up(run_ranks) -> None:
    assert run_ranks(replicated_load_on_rank, 4)[3] == {"layer": 4 * 2 / 6}  # expert 0: 0 + 2, expert 1: 1 + 3


def batch_of(lengths: tuple[int, ...], row_len: int, num_loss: int) -> Batch:
    """Packed: documents and padding, which positions alone don't tell from one another."""
    ids = torch.zeros(1, row_len, dtype=torch.int64)
    labels = torch.full((1, row_len), IGNORE_INDEX)
    labels[0, :num_loss] = 1
    positions = [t for length in (*lengths, row_len - sum(lengths)) for t in range(length)]
    return Batch(input_ids=ids, labels=labels, position_ids=torch.tensor([positions]), document_lengths=lengths)


def measure_on_rank(rank: int) -> dict[str, Any]:
    meshes = build_meshes()
    meter = Meter(nn.Linear(1, 1), meshes, ModelFlops(per_token=1e6, per_pair=1e3))
    meter.count([batch_of((3, 2 + rank), 10, 2), batch_of((1,), 10, 1)])
    meter.count([batch_of((3,), 10, 2), batch_of((), 10, 0)])
    result = StepResult(torch.tensor(1.0 + rank), grad_norm=0.5, num_tokens=torch.tensor(7), is_finite=True)
    metrics = meter.measure(4, 2, 1e-3, result)
    return {"tokens": metrics.tokens_per_s * metrics.step_time_s * 2, "metrics": metrics}


def test_metrics_are_global_and_equal_on_all_ranks(run_ranks) -> None:
    results = run_ranks(measure_on_rank, 2)
    assert results[0]["metrics"] == results[1]["metrics"]
    metrics = results[0]["metrics"]
    assert results[0]["tokens"] == pytest.approx(9 + 10)  # tokens/s is exact arithmetic of the same elapsed time
    assert (metrics.step, metrics.epoch, metrics.loss, metrics.lr, metrics.num_loss_tokens) == (4, 2, 3.0, 1e-3, 7)
    pairs = (6 + 3 + 1 + 6) + (6 + 6 + 1 + 6)
    elapsed_s = metrics.step_time_s * 2
    assert metrics.tflops_per_rank == pytest.approx((19 * 1e6 + pairs * 1e3) / elapsed_s / 2 / 1e12)
    assert metrics.mfu is None and len(metrics.memory_gib) == 2 and metrics.expert_load == {}


class ConstantModel(nn.Module):
    """Logits that don't depend on the input: token 1 has a known probability."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))


def evaluate_on_rank(rank: int) -> tuple[float, int, bool]:
    model = ConstantModel()
    batches = [batch_of((4,), 4, 3), batch_of((4,), 4, 1 if rank else 0)]  # rank 0's last has no loss at all
    return *evaluate(model, batches, build_meshes()), model.training  # type: ignore[arg-type, return-value]


def test_held_out_loss_is_a_sum_over_global_tokens(run_ranks) -> None:
    for loss, num_tokens, is_training in run_ranks(evaluate_on_rank, 2):
        assert num_tokens == 7 and is_training
        assert loss == pytest.approx(torch.log(torch.tensor(8.0)).item(), rel=1e-6)
