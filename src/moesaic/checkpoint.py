"""Checkpoints that resume exactly: weights, optimizer, schedule, data position, step, each rank's random generators.

A checkpoint is one folder of torch's distributed checkpoint (DCP), ``step-000123``, to which every rank writes its own
shards. It is written as ``step-000123.tmp`` and renamed when all ranks are done, and renamed to ``step-000123.old``
before it is deleted, so a folder without an ending is whole. All ranks must see the same file system.

On the same topology a resumed run equals one that never stopped, bit for bit. On another, DCP cuts the tensors anew;
ranks that the saved run didn't have keep the random state they started with.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moesaic.config.run_folder import find_checkpoints, is_complete
from moesaic.ops.placements import shard_dim
from moesaic.runtime import device_type

log = logging.getLogger(__name__)


class Position(Protocol):
    """What knows how far the data has been read; equal on every rank."""

    def state_dict(self) -> dict[str, int]:
        """Where the next step starts."""
        ...

    def load_state_dict(self, state: Mapping[str, int], /) -> None:
        """Go on from there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """All that a run has to remember, beside its recipe. ``model`` is sharded, ``optimizer`` built on it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    data: Position


def save_checkpoint(output_dir: Path, state: TrainState, step: int, keep: int | None = None) -> Path:
    """Write ``output_dir/step-<step>`` and delete older ones so that ``keep`` remain. Every rank must call it.

    Args:
        step: optimizer steps done.
        keep: checkpoints to keep, at least 1: this one, and of the others those with the most steps; None keeps all.

    Returns:
        The checkpoint's folder, complete on return.

    Raises:
        ValueError: a parameter is laid out in a way that DCP would describe wrongly.
    """
    refuse_strided(state.model)
    folder = output_dir / f"step-{step:06d}"
    scratch = folder.with_name(folder.name + ".tmp")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(scratch, ignore_errors=True)  # what an interrupted run left
        scratch.mkdir(parents=True)
    dist.barrier()
    dcp.save(_tensors(state) | _rest(state, step), checkpoint_id=scratch)
    dist.barrier()
    if is_first:
        replaced = _set_aside(folder) if folder.exists() else None
        scratch.rename(folder)
        if replaced is not None:
            shutil.rmtree(replaced)
        if keep is not None:
            others = [path for path in find_checkpoints(output_dir) if path != folder]
            for old in others[: max(0, len(others) - (keep - 1))]:
                shutil.rmtree(_set_aside(old))
    dist.barrier()
    return folder


def load_checkpoint(folder: Path, state: TrainState) -> int:
    """Bring ``state``, and this rank's random generators, to where they were saved. Every rank must call it.

    Returns:
        Optimizer steps done.

    Raises:
        ValueError: ``folder`` holds no complete checkpoint; DCP can't describe the parameters' layout; the data isn't
            that of the saved run.
    """
    refuse_strided(state.model)
    _refuse_incomplete(folder)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors, rest = _tensors(state), _rest(state, step=0)
    if _rng_key() not in {key.partition(".")[0] for key in saved}:
        log.warning("checkpoint %s was saved on fewer ranks: this rank keeps its random state", folder)
        del rest[_rng_key()]
    values = tensors | rest
    dcp.load(values, checkpoint_id=folder)
    state.model.load_state_dict(values["model"])
    set_optimizer_state_dict(state.model, state.optimizer, values["optimizer"])
    state.scheduler.load_state_dict(values["scheduler"])
    state.data.load_state_dict(values["data"])
    if _rng_key() in values:
        _set_rng_state(values[_rng_key()])
    return int(values["step"])


def load_model(folder: Path, model: nn.Module) -> None:
    """Only the weights of a checkpoint, into a sharded model of any topology. Every rank must call it.

    Raises:
        ValueError: as ``load_checkpoint``.
    """
    refuse_strided(model)
    _refuse_incomplete(folder)
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=folder)
    model.load_state_dict(weights["model"])


def _set_aside(folder: Path) -> Path:
    """Take a checkpoint's name away at once, so that one half deleted is never taken for a whole one."""
    aside = folder.with_name(folder.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)  # what an interrupted run left
    return folder.rename(aside)


def _refuse_incomplete(folder: Path) -> None:
    if not is_complete(folder):
        raise ValueError(f"checkpoint {str(folder)!r}: is not complete (no .metadata in it); name one that is.")


def _tensors(state: TrainState) -> dict[str, Any]:
    return {
        "model": state.model.state_dict(),
        # By parameter names; makes the (zero) moments first where the optimizer hasn't stepped yet.
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer),
    }


def _rest(state: TrainState, step: int) -> dict[str, Any]:
    """Equal on every rank but the random state, which is under each rank's own key."""
    return {
        "scheduler": state.scheduler.state_dict(),
        "data": state.data.state_dict(),
        "step": step,
        _rng_key(): _rng_state(),
    }


def _rng_key() -> str:
    return f"rng-{dist.get_rank():05d}"


def _rng_state() -> dict[str, Any]:
    kind = device_type()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(),
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        torch.get_device_module(device_type()).set_rng_state(state["device"])


def _is_sharded_twice(param: DTensor) -> bool:
    """Whether two axes shard one dim. It doesn't depend on the rank, as whether its rows lie apart would."""
    dims = [dim for placement in param.placements if (dim := shard_dim(placement)) is not None]
    return len(set(dims)) < len(dims)


def refuse_strided(model: nn.Module) -> None:
    """Refuse a model that can't be checkpointed; ask before training it.

    DCP takes a ``_StridedShard``'s rows, which lie apart, for one contiguous chunk, and would mix them up.

    Raises:
        ValueError: a parameter has one dim sharded by two axes.
    """
    strided = [
        name for name, param in model.named_parameters() if isinstance(param, DTensor) and _is_sharded_twice(param)
    ]
    if strided:
        raise ValueError(
            f"{strided[0]} ({len(strided)} parameters in all): can't be checkpointed, two axes shard one of its dims "
            "(_StridedShard). Choose sizes with which the expert-FSDP axis divides another dim of the experts."
        )
