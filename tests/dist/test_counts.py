"""What one training step sends, and how often it makes the host wait: counted, because cost is the claim."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.meshes import build_meshes
from moesaic.ops import host
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.train.step import train_step
from tests.oracle.cells import Cell, build_batch, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

NUM_LAYERS = 2


class CountCalls(TorchDispatchMode):
    """Counts collectives and top-k by operator name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and "wait_tensor" not in name or "topk" in name:
            self.calls[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def count_step(rank: int, cell: Cell, reference: Reference) -> tuple[dict[str, int], int]:
    """Collectives of the second step (the first builds communicators), and host reads of splits."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes, options=cell.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [build_batch(documents, cell.layout) for documents in share_documents(reference.documents, cell, rank)]
    train_step(model, batches, optimizer, None, meshes, max_grad_norm=1.0)
    with CountCalls() as counter, mock.patch.object(host, "read_ints", wraps=host.read_ints) as read_ints:
        train_step(model, batches, optimizer, None, meshes, max_grad_norm=1.0)
    return dict(counter.calls), read_ints.call_count


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_of_a_step(run_ranks: RunRanks, tmp_path: Path, ep_size: int, reshard: bool) -> None:
    cell = Cell(world_size=4, sizes={"ep_size": ep_size}, options=ParallelOptions(reshard_after_forward=reshard))
    efsdp_size = 4 // ep_size
    units = NUM_LAYERS + (NUM_LAYERS if efsdp_size > 1 else 0)  # blocks, experts; one rank gathers from nobody
    gathers = units * (2 if reshard else 1) + 1  # again in backward where resharded; the root keeps its own
    for calls, num_reads in run_ranks(count_step, 4, cell, load_reference(Case(), tmp_path)):
        assert calls == {
            "all_to_all_single": NUM_LAYERS * (1 + 2 + 2),  # counts; tokens there and back; the same in backward
            "_allgather_base_": gathers,
            "_reduce_scatter_base_": units + 1,
            "allreduce_": 2 + 1,  # the norm on each of two meshes; the token count
            "topk": NUM_LAYERS,
        }
        assert num_reads == NUM_LAYERS


def test_checkpointing_neither_routes_nor_sends_again(run_ranks: RunRanks, tmp_path: Path) -> None:
    options = ParallelOptions(activation_checkpointing=True)
    cell = Cell(world_size=4, sizes={"ep_size": 4}, options=options)
    for calls, num_reads in run_ranks(count_step, 4, cell, load_reference(Case(), tmp_path)):
        assert calls["all_to_all_single"] == NUM_LAYERS * (1 + 2 + 2)
        assert calls["topk"] == NUM_LAYERS
        assert num_reads == 2 * NUM_LAYERS  # split sizes are read again, from the kept counts


def test_replicas_add_one_all_reduce_per_unit(run_ranks: RunRanks, tmp_path: Path) -> None:
    cell = Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2})
    for calls, _ in run_ranks(count_step, 4, cell, load_reference(Case(), tmp_path)):
        assert calls["allreduce_"] == 2 + 1 + (2 * NUM_LAYERS + 1)
