"""The warm-up uses every group that a step uses, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.train.step import train_step
from moesaic.train.warm_up import warm_up_collectives
from tests.oracle.cells import Cell, build_batch, full, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks


class GroupsUsed(TorchDispatchMode):
    """Names of the groups on which collectives run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func) and "wait_tensor" not in str(func):
            boxed = [dist.ProcessGroup.unbox(arg).group_name for arg in args if "ProcessGroup" in str(type_of(arg))]
            self.names |= {*boxed, *(arg for arg in args if isinstance(arg, str))}
        return func(*args, **(kwargs or {}))


def type_of(arg: Any) -> str:
    return str(arg._type()) if isinstance(arg, torch.ScriptObject) else ""


def groups_warmed_and_used(rank: int, reference: Reference) -> tuple[set[str], set[str], float]:
    """Groups of the warm-up, groups of a step, and the largest change of a weight by the warm-up."""
    meshes = build_meshes("cpu", ep_size=2, mp_replicate_size=2)
    model = from_pretrained(reference.folder, meshes)
    before = {name: full(param) for name, param in model.named_parameters()}
    (batch,) = (build_batch(d, "padded") for d in share_documents(reference.documents, Cell(world_size=4), rank))
    with GroupsUsed() as warmed:
        warm_up_collectives(model, meshes)
    change = max((full(param) - before[name]).abs().max().item() for name, param in model.named_parameters())
    assert all(param.grad is None for param in model.parameters())
    with GroupsUsed() as used:
        train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1), None, meshes, max_grad_norm=1.0)
    return warmed.names, used.names, change


def test_a_step_uses_no_group_that_was_not_warmed_up(run_ranks: RunRanks, reference_root: Path) -> None:
    for warmed, used, change in run_ranks(groups_warmed_and_used, 4, load_reference(Case(), reference_root)):
        assert len(used) >= 4, used  # ep; edp or mp_replicate; mp_shard; all ranks
        assert used <= warmed, (used, warmed)
        assert change == 0.0
