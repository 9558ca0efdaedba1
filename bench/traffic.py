"""What one rank sends to other ranks in a training step, counted as it is sent, by purpose, beside the least it must.

    parameters   FSDP's gathers
    gradients    FSDP's reductions into shards
    replicas     HSDP's all-reduces of those
    rows         tokens to their experts and back
    runs         tensor parallelism: positions gathered, and summed into runs
    heads        context parallelism and linear attention: positions for heads, and back
    loss         the vocabulary-parallel loss
    other        how many rows will come, loss tokens, the norm

What CPU ranks send point to point, and all-to-all, is counted as it is. How a backend's own collective travels is its
affair: it counts as a ring does it, (n - 1) / n of the whole for a gather or a reduction into shards, twice that for an
all-reduce.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from bench.bounds import Step, count_rows, least_bytes, least_rows
from moesaic.data.batch import Batch
from moesaic.meshes import Meshes
from moesaic.ops import runs
from moesaic.parallel import gloo_exchange
from moesaic.parallel.apply import ParallelOptions
from moesaic.parallel.experts import expert_parallel, find_expert_modules
from moesaic.train.step import train_step

PURPOSES = ("parameters", "gradients", "replicas", "rows", "runs", "heads", "loss", "other")
SENDS = {
    gloo_exchange.GATHER_TAG: "parameters",
    gloo_exchange.REDUCE_TAG: "gradients",
    runs.GATHER_TAG: "runs",
    runs.REDUCE_TAG: "runs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one rank's step by purpose.

    Attributes:
        sent: counted.
        least: must be sent; nothing for ``other``.
        pairs: of the rows, if one is sent for each (token, expert) pair whose expert is on another rank.
    """

    sent: dict[str, int]
    least: dict[str, float]
    pairs: int


class CountBytes(TorchDispatchMode):
    """Adds up what collectives and sends inside give away, of CPU ranks."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        self.sent = Counter[str]()
        replicas = (meshes.dense["mp_replicate"], meshes.unsplit["mp_replicate"], meshes.expert["edp"])
        self._replicas = {mesh.get_group().group_name for mesh in replicas}
        self._tp = meshes.dense["tp"].get_group().group_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, operator = func._schema.name.partition("::")
        if "c10d" in namespace and operator not in ("recv_", "wait_tensor"):
            purpose, num_bytes = self._measure(operator, args)
            self.sent[purpose] += num_bytes
        return func(*args, **(kwargs or {}))

    def _measure(self, operator: str, args: Any) -> tuple[str, int]:
        if operator == "send":
            (tensor,), tag = args[0], args[3]
            return SENDS[tag], tensor.nbytes
        if operator == "all_to_all_single":
            rows, splits, group = args[0], args[2], _resolve_process_group(args[3])
            others = sum(splits) - splits[group.rank()]
            return "rows" if rows.is_floating_point() else "other", others * rows[:1].nbytes if others else 0
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        size = group.size()
        if operator == "alltoall_base_":
            assert not args[4], "equal parts"
            return "heads", args[1].nbytes * (size - 1) // size
        if operator == "_allgather_base_":
            return "parameters", args[1].nbytes * (size - 1)
        if operator == "_reduce_scatter_base_":
            return "gradients", args[0].nbytes * (size - 1)
        assert operator == "allreduce_", f"a step shouldn't need {operator}"
        (tensor,) = args[0]
        num_bytes = 2 * tensor.nbytes * (size - 1) // size
        if tensor.numel() == 1:
            return "other", num_bytes
        is_loss = group.group_name == self._tp
        assert is_loss != (group.group_name in self._replicas), f"{tensor.shape} over {group.group_name}"
        return "loss" if is_loss else "replicas", num_bytes


def measure_step(model: PreTrainedModel, meshes: Meshes, options: ParallelOptions, batches: Sequence[Batch]) -> Traffic:
    """Two steps that move nothing: one to see the routing (and to build communicators), one to count. Every rank calls.

    Args:
        batches: the rank's micro-batches, whole for the ranks that share them.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    routes: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(partial(_note_route, routes), with_kwargs=True)
        for module in find_expert_modules(model).values()
    ]
    train_step(model, batches, optimizer, None, meshes, None)
    for handle in handles:
        handle.remove()
    with CountBytes(meshes) as counter:
        train_step(model, batches, optimizer, None, meshes, None)
    step = Step(
        shapes={name: param.shape for name, param in model.named_parameters()},
        config=model.config.get_text_config(),
        sizes=meshes.sizes,
        options=options,
        batches=batches,
        cp_rank=meshes.data.get_local_rank("cp"),
    )
    least = least_bytes(step)
    least["rows"], pairs = _measure_rows(model, meshes, step, routes)
    return Traffic(
        sent={purpose: counter.sent[purpose] for purpose in PURPOSES},
        least={purpose: least.get(purpose, 0.0) for purpose in PURPOSES},
        pairs=pairs,
    )


def _note_route(routes: list[Tensor], module: Any, args: Any, kwargs: Any) -> None:
    if not expert_parallel(module).load.paused:  # not when it is computed again
        routes.append(args[1] if len(args) > 1 else kwargs["top_k_index"])


def _measure_rows(model: PreTrainedModel, meshes: Meshes, step: Step, routes: Sequence[Tensor]) -> tuple[float, int]:
    """Least bytes of rows, and those of a row a pair. Every rank of the EP group must call it."""
    modules = find_expert_modules(model)
    if not modules:
        return 0.0, 0
    # Each token is routed once in each layer: on the one rank of cp and tp whose run it is in.
    own_tokens = [step.num_positions(batch) // step.sizes.tp_size for batch in step.batches for _ in modules]
    assert [route.size(0) for route in routes] == own_tokens, "tokens that were routed twice, or not at all"
    ep_mesh = meshes.expert["ep"]
    num_experts = expert_parallel(next(iter(modules.values()))).num_experts
    rows: list[Any] = [None] * ep_mesh.size()
    dist.all_gather_object(rows, count_rows(routes, num_experts, ep_mesh.size()), group=ep_mesh.get_group())
    return least_rows(step, rows, ep_mesh.get_local_rank())


def ratio(traffic: Traffic, purpose: str) -> float:
    """Sent / least; 1 where there is nothing of it, infinite where something is sent that needn't be."""
    sent, least = traffic.sent[purpose], traffic.least[purpose]
    return sent / least if least else 1.0 if sent == 0 else math.inf
