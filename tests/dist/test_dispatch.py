"""The dispatcher by itself: where rows go, that they come back, and that two runs give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dispatch import build_dispatcher
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.train.losses import token_loss_sum
from tests.oracle.cells import Cell, build_batch, full, largest, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks


def documented_example(rank: int) -> tuple[list[float], list[int]]:
    """The example of dispatch/eager.py: rank 0 as there, rank 1 with one token for experts 2 and 0."""
    experts_TK = torch.tensor([[3, 0], [0, 1]]) if rank == 0 else torch.tensor([[2, 0]])
    x_TH = torch.tensor([[0.0], [1.0]]) if rank == 0 else torch.tensor([[10.0]])
    dispatcher = build_dispatcher("eager", dist.group.WORLD, chunk_size=2)
    rows, offsets, _ = dispatcher.dispatch(x_TH, experts_TK, torch.ones_like(experts_TK, dtype=torch.float32), 2)
    return rows.flatten().tolist(), offsets.tolist()


def test_rows_arrive_grouped_by_expert(run_ranks: RunRanks) -> None:
    first, second = run_ranks(documented_example, 2)
    assert first == ([0.0, 1.0, 10.0, 1.0], [3, 4])  # expert 0: t0 t1 of rank 0, then rank 1's; expert 1: t1
    assert second == ([10.0, 0.0], [1, 2])  # expert 2: rank 1's; expert 3: t0


def round_trip(rank: int, num_experts: int) -> dict[str, float]:
    """Each expert multiplies by its number + 1; ranks hold 4, 0, 7, 1 tokens. Errors against the local computation."""
    size = dist.get_world_size()
    chunk = -(-num_experts // size)
    generator = torch.Generator().manual_seed(rank)
    num_tokens = (4, 0, 7, 1)[rank]
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights_TK, experts_TK = scores.topk(2)
    x = torch.randn(num_tokens, 3, generator=generator, requires_grad=True)
    weights = weights_TK.clone().requires_grad_()
    local_experts = torch.arange(rank * chunk, min((rank + 1) * chunk, num_experts))

    dispatcher = build_dispatcher("eager", dist.group.WORLD, chunk)
    rows, offsets, receipt = dispatcher.dispatch(x, experts_TK, weights, len(local_experts))
    counts = torch.diff(offsets, prepend=torch.zeros(1, dtype=offsets.dtype))
    factors = (local_experts + 1.0).repeat_interleave(counts)
    out = dispatcher.combine(rows * factors.unsqueeze(-1), receipt)
    out.square().sum().backward()

    x_local, w_local = x.detach().clone().requires_grad_(), weights_TK.clone().requires_grad_()
    expected = x_local * (w_local * (experts_TK + 1.0)).sum(dim=1, keepdim=True)
    expected.square().sum().backward()
    assert x.grad is not None and weights.grad is not None

    def error(a: Tensor, b: Tensor | None) -> float:
        assert b is not None and a.shape == b.shape
        return (a - b).abs().max().item() if a.numel() else 0.0

    return {"out": error(out, expected), "x": error(x.grad, x_local.grad), "w": error(weights.grad, w_local.grad)}


@pytest.mark.parametrize("num_experts", [8, 7, 4])
def test_there_and_back_with_uneven_and_no_tokens(run_ranks: RunRanks, num_experts: int) -> None:
    for errors in run_ranks(round_trip, 4, num_experts):
        assert largest(errors)[0] <= 1e-4, errors  # products of numbers up to 8 * 8, summed in fp32


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"ep_dispatcher='quick'.*eager"):
        build_dispatcher("quick", None, 1)  # type: ignore[arg-type]


def gradients_twice(rank: int, checkpointing: bool, reference: Reference) -> list[str]:
    """Names of gradients that differ in any bit between two runs on the same weights and batch."""
    meshes = build_meshes("cpu", ep_size=2)
    model = from_pretrained(reference.folder, meshes, options=ParallelOptions(activation_checkpointing=checkpointing))
    (batch,) = (build_batch(d, "padded") for d in share_documents(reference.documents, Cell(world_size=4), rank))
    runs: list[dict[str, Tensor]] = []
    for _ in range(2):
        token_loss_sum(model(**batch.model_inputs()).logits, batch.labels).backward()
        runs.append({name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None})
        model.zero_grad()
    assert runs[0].keys() == runs[1].keys() and len(runs[0]) == len(reference.grads)
    return [name for name, grad in runs[0].items() if not torch.equal(grad, runs[1][name])]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_runs_give_the_same_bits(run_ranks: RunRanks, reference_root: Path, checkpointing: bool) -> None:
    for different in run_ranks(gradients_twice, 4, checkpointing, load_reference(Case(), reference_root)):
        assert not different, different
