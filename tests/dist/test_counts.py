"""What one training step sends, and how often it makes the host wait: counted, because cost is the claim."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from moesaic.meshes import build_meshes
from moesaic.ops import host
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.gloo_exchange import AllGather, GlooAllGather, GlooReduceScatter, ReduceScatter
from moesaic.parallel.units import list_units
from moesaic.train.step import train_step
from tests.oracle.cells import Cell, build_batch, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

NUM_LAYERS = 2
KINDS = ("experts", "block", "root")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one rank did in one step.

    Attributes:
        calls: ``operator what @ ranks`` -> number, see ``CountCalls``.
        num_sends: messages that its gathers and reductions were made of.
        ranks: axis -> ranks of this rank's group along it, e.g. ``0 2``.
    """

    calls: dict[str, int]
    num_sends: int
    ranks: dict[str, str]
    num_int_reads: int
    num_float_reads: int


class CountCalls(TorchDispatchMode):
    """Counts collectives, each by what it carries and between which ranks, and top-k.

    A gather or a reduction carries one FSDP unit: blocks, experts and root differ in how many numbers a rank holds, so
    that one gather too many of one kind can't stand for a missing one of another.
    """

    def __init__(self, units: dict[int, str]) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_sends = 0
        self.num_int_reads = 0
        self._units = units

    def counting(self, kind: str, comm: type[AllGather] | type[ReduceScatter]) -> Any:
        """A patch of an FSDP communication that counts its calls as ``kind``."""
        exchange = comm.__call__

        def counted(
            this: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
        ) -> Any:
            num_local = min(output_tensor.numel(), input_tensor.numel())
            self.calls[f"{kind} {self._units[num_local]} @ {ranks_of(group)}"] += 1
            return exchange(this, output_tensor, input_tensor, group, **options)

        return mock.patch.object(comm, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "topk" in name:
            self.calls["topk"] += 1
        elif name.startswith("moesaic.copy_to_host"):
            self.num_int_reads += 1
        elif name.startswith("c10d.send"):
            self.num_sends += 1
        elif "c10d" in name and "wait_tensor" not in name and not name.startswith("c10d.recv_"):
            self.calls[self._describe(name.split(".")[1], args)] += 1
        return func(*args, **(kwargs or {}))

    def _describe(self, operator: str, args: Any) -> str:
        if operator == "all_to_all_single":
            what = "rows" if args[0].is_floating_point() else "counts"
            return f"{operator} {what} @ {ranks_of(_resolve_process_group(args[3]))}"
        assert operator == "allreduce_", f"a step shouldn't need {operator}"
        shard = args[0][0]
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        if shard.numel() == 1:
            what = "norm" if shard.is_floating_point() else "tokens"
        else:
            what = self._units[shard.numel()]
        return f"{operator} {what} @ {ranks_of(group)}"


def ranks_of(group: dist.ProcessGroup) -> str:
    return " ".join(map(str, dist.get_process_group_ranks(group)))


def name_units(model: PreTrainedModel) -> dict[int, str]:
    """Numbers in a rank's shard of each FSDP unit -> its kind."""
    kinds: dict[int, str] = {}
    for unit, rows in itertools.groupby(list_units(model), key=lambda row: row.unit):
        own = list(rows)
        kind = "experts" if ".experts." in own[0].name else "block" if unit else "root"
        num_local = sum(math.prod(row.local_shape) for row in own)
        assert kinds.setdefault(num_local, kind) == kind, "two kinds of the same size can't be told apart"
    return kinds


def count_step(rank: int, cell: Cell, reference: Reference) -> Counts:
    """The second step's (the first builds communicators)."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes, options=cell.options)
    units = name_units(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [build_batch(documents, cell.layout) for documents in share_documents(reference.documents, cell, rank)]
    train_step(model, batches, optimizer, None, meshes, 1.0, gradient_accumulation=cell.accumulation)
    with (
        CountCalls(units) as counter,
        counter.counting("gather", GlooAllGather),
        counter.counting("reduce-scatter", GlooReduceScatter),
        mock.patch.object(host, "read_float", wraps=host.read_float) as read_float,
    ):
        train_step(model, batches, optimizer, None, meshes, 1.0, gradient_accumulation=cell.accumulation)
    axes = [(view, axis) for view in (meshes.dense, meshes.expert) for axis in view.mesh_dim_names or ()]
    ranks = {axis: ranks_of(view.get_group(axis)) for view, axis in axes}
    return Counts(dict(counter.calls), counter.num_sends, ranks, counter.num_int_reads, read_float.call_count)


@pytest.fixture
def reference(reference_root: Path) -> Reference:
    return load_reference(Case(num_documents=16), reference_root)


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_of_a_step(run_ranks: RunRanks, reference: Reference, ep_size: int, reshard: bool) -> None:
    cell = Cell(world_size=4, sizes={"ep_size": ep_size}, options=ParallelOptions(reshard_after_forward=reshard))
    num_gathers = NUM_LAYERS * (2 if reshard else 1)  # again in backward where resharded
    for counts in run_ranks(count_step, 4, cell, reference):
        ep, efsdp, mp_shard = (counts.ranks[axis] for axis in ("ep", "efsdp", "mp_shard"))
        assert mp_shard == "0 1 2 3" and len(ep.split()) == ep_size
        experts = {  # one rank gathers from nobody
            f"gather experts @ {efsdp}": num_gathers,
            f"reduce-scatter experts @ {efsdp}": NUM_LAYERS,
        }
        assert counts.calls == {
            f"all_to_all_single counts @ {ep}": NUM_LAYERS,
            f"all_to_all_single rows @ {ep}": NUM_LAYERS * (2 + 2),  # there and back; the same in backward
            f"gather block @ {mp_shard}": num_gathers,
            f"reduce-scatter block @ {mp_shard}": NUM_LAYERS,
            f"gather root @ {mp_shard}": 1,  # it keeps its own for backward
            f"reduce-scatter root @ {mp_shard}": 1,
            **(experts if ep_size < 4 else {}),
            "allreduce_ norm @ 0 1 2 3": 2,  # one for each of two meshes
            "allreduce_ tokens @ 0 1 2 3": 1,
            "topk": NUM_LAYERS,
        }
        # To each other rank of the group its part, once.
        peers = {"block": 3, "root": 3, "experts": 4 // ep_size - 1}
        parts = [
            (call.split()[1], number) for call, number in counts.calls.items() if call.startswith(("gather", "red"))
        ]
        assert counts.num_sends == sum(number * peers[unit] for unit, number in parts)
        assert (counts.num_int_reads, counts.num_float_reads) == (NUM_LAYERS, 1)  # split sizes; the norm


@pytest.mark.parametrize("ep_size", [2, 4])
def test_checkpointing_neither_routes_nor_sends_again(run_ranks: RunRanks, reference: Reference, ep_size: int) -> None:
    """Nor does it gather again: recomputation finds the units that backward has gathered."""
    plain, checkpointed = (
        run_ranks(count_step, 4, Cell(world_size=4, sizes={"ep_size": ep_size}, options=options), reference)
        for options in (ParallelOptions(), ParallelOptions(activation_checkpointing=True))
    )
    for without, counts in zip(plain, checkpointed, strict=True):
        assert counts.calls == without.calls
        num_gathers = sum(number for call, number in counts.calls.items() if call.startswith("gather"))
        assert num_gathers == (9 if ep_size == 2 else 5)  # (2 blocks + 2 experts, or 2 blocks) twice, and the root
        assert (counts.num_int_reads, counts.num_float_reads) == (NUM_LAYERS, 1)  # what was read is kept too


@pytest.mark.parametrize("ep_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tokens_that_are_not_kept_are_sent_again_and_nothing_else_is(
    run_ranks: RunRanks, reference: Reference, ep_size: int
) -> None:
    plain, resent = (
        run_ranks(count_step, 4, Cell(world_size=4, sizes={"ep_size": ep_size}, options=options), reference)
        for options in (
            ParallelOptions(),
            ParallelOptions(activation_checkpointing=True, exchanged_tokens="recompute"),
        )
    )
    for without, counts in zip(plain, resent, strict=True):
        rows = f"all_to_all_single rows @ {counts.ranks['ep']}"
        assert counts.calls == {**without.calls, rows: NUM_LAYERS * (2 + 2 + 2)}  # there and back once more
        assert (counts.num_int_reads, counts.num_float_reads) == (NUM_LAYERS, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"ep_size": 2}, marks=pytest.mark.slow, id="efsdp2"),
        pytest.param({"ep_size": 2, "mp_replicate_size": 2}, id="hsdp"),
    ],
)
def test_whole_gradients_are_reduced_once_a_step(
    run_ranks: RunRanks, reference: Reference, sizes: dict[str, int]
) -> None:
    """Of 4 micro-batches, the sharded way reduces each; everything else is the same."""
    sharded, whole = (
        run_ranks(
            count_step,
            4,
            Cell(world_size=4, sizes=sizes, num_micro_batches=4, accumulation=accumulation),
            reference,
        )
        for accumulation in ("sharded", "unsharded")
    )
    for each, once in zip(sharded, whole, strict=True):
        reductions = {call for call in each.calls if call.startswith("reduce-scatter")}
        reductions |= {call for call in each.calls if call.startswith("allreduce_") and call.split()[1] in KINDS}
        assert len(reductions) >= 3
        for call, number in each.calls.items():
            assert once.calls[call] == (number // 4 if call in reductions else number), call
        assert once.calls.keys() == each.calls.keys()


def test_hooks_around_the_experts_change_no_collective(run_ranks: RunRanks, reference: Reference) -> None:
    plain, hooked = (
        run_ranks(count_step, 4, Cell(world_size=4, sizes={"ep_size": 2}, options=options), reference)
        for options in (ParallelOptions(), ParallelOptions(hook_modules=("model.layers.*.mlp",)))
    )
    assert [counts.calls for counts in hooked] == [counts.calls for counts in plain]


def test_replicas_add_one_all_reduce_per_unit(run_ranks: RunRanks, reference: Reference) -> None:
    cell = Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2})
    for counts in run_ranks(count_step, 4, cell, reference):
        all_reduces = {call: number for call, number in counts.calls.items() if call.startswith("allreduce_")}
        assert all_reduces == {
            f"allreduce_ block @ {counts.ranks['mp_replicate']}": NUM_LAYERS,
            f"allreduce_ root @ {counts.ranks['mp_replicate']}": 1,
            f"allreduce_ experts @ {counts.ranks['edp']}": NUM_LAYERS,
            "allreduce_ norm @ 0 1 2 3": 2,
            "allreduce_ tokens @ 0 1 2 3": 1,
        }
