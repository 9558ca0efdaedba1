"""Checkpoints that resume exactly: weights, optimizer, schedule, data position, step, each rank's random generators.

A checkpoint is one folder of torch's distributed checkpoint (DCP), ``step-000123``, to which every rank writes its own
blocks (``ops/block_planner.py``). It is written as ``step-000123.tmp`` and renamed when all ranks are done, and renamed
to ``step-000123.old`` before it is deleted, so a folder without an ending is whole. All ranks must see the same file
system.

A run may train several models: the first is in the folder itself, each other in a folder of its name below, written one
after another, so that only one at a time has to be in memory::

    step-000123/          the first model with optimizer and schedule; data position, step, random states, plain values
    step-000123/critic/   another model with optimizer and schedule

On the same topology a resumed run equals one that never stopped, bit for bit. On another, DCP cuts the tensors anew;
ranks that the saved run didn't have keep the random state they started with.
"""

from __future__ import annotations

import logging
import pickle
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moesaic.config.run_folder import checkpoint_folder, find_checkpoints, is_complete
from moesaic.ops.block_planner import BlockLoadPlanner, BlockSavePlanner
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


class Stateful(Protocol):
    """What remembers something in plain values (what ``pickle`` takes); equal on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Remember that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that is trained. ``model`` is sharded, ``optimizer`` built on it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState(Trained):
    """All that a run has to remember, beside its recipe.

    Attributes:
        data: how far the data has been read.
        others: further models that are trained, by name: a folder's name.
        plain: whatever else, by name.
    """

    data: Position
    others: Mapping[str, Trained] = field(default_factory=dict)
    plain: Mapping[str, Stateful] = field(default_factory=dict)


# Told whose tensors are read or written next: None is the first model's.
Turn = Callable[[str | None], None]


def _same_turn(name: str | None) -> None:
    """All of them are there."""


def save_checkpoint(output_dir: Path, state: TrainState, step: int, turn: Turn = _same_turn) -> Path:
    """Write ``output_dir/step-<step>``. Every rank must call it.

    Args:
        step: optimizer steps done.
        turn: called before each model is read, to bring it into memory.

    Returns:
        The checkpoint's folder, complete on return.

    Raises:
        RuntimeError: a rank couldn't write; no folder of that name is there, or the former one is.
    """
    folder = checkpoint_folder(output_dir, step)
    scratch = folder.with_name(folder.name + ".tmp")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(scratch, ignore_errors=True)  # what an interrupted run left
        scratch.mkdir(parents=True)
    dist.barrier()
    turn(None)
    _save(scratch, _tensors(state) | _rest(state, step))
    for name, other in state.others.items():
        turn(name)
        _save(scratch / name, _tensors(other) | {"scheduler": other.scheduler.state_dict()})
    dist.barrier()
    if is_first:
        replaced = _set_aside(folder) if folder.exists() else None
        scratch.rename(folder)
        if replaced is not None:
            shutil.rmtree(replaced)
    dist.barrier()
    return folder


def _save(folder: Path, values: dict[str, Any]) -> None:
    with _plain_errors(RuntimeError, f"checkpoint {folder}: can't be written"):
        dcp.save(values, checkpoint_id=folder, planner=BlockSavePlanner())


def delete_old_checkpoints(output_dir: Path, newest: Path, keep: int, best: Path | None = None) -> None:
    """Delete checkpoints so that ``keep`` remain, and ``best`` beside them. By rank 0; every rank must call it.

    Args:
        newest: the one written last; it is kept, and of the others those with the most steps.
        keep: at least 1.
        best: kept whatever its age, without counting.
    """
    if dist.get_rank() == 0:
        others = [path for path in find_checkpoints(output_dir) if path not in (newest, best)]
        for old in others[: max(0, len(others) - (keep - 1))]:
            shutil.rmtree(_set_aside(old))
    dist.barrier()


def load_checkpoint(folder: Path, state: TrainState, turn: Turn = _same_turn) -> int:
    """Bring ``state``, and this rank's random generators, to where they were saved. Every rank must call it.

    Args:
        turn: called before each model is read, to bring it into memory.

    Returns:
        Optimizer steps done.

    Raises:
        ValueError: ``folder`` holds no complete checkpoint; it is another model's, or has not all of the models; the
            data isn't the saved run's.
    """
    _refuse_incomplete(folder)
    _compare_names(folder, state)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _load_position(folder, saved, state.data)
    for name, other in state.others.items():
        turn(name)
        values = _tensors(other) | {"scheduler": other.scheduler.state_dict()}
        _load(folder / name, values)
        _take(other, values)
    turn(None)
    tensors, rest = _tensors(state), _rest(state, step=0)
    del rest["data"]
    if "plain" in rest and "plain" not in saved:
        raise ValueError(f"checkpoint {folder}: it is of a run that had no {', '.join(state.plain)}; name another.")
    if _rng_key() not in {key.partition(".")[0] for key in saved}:
        log.warning("checkpoint %s was saved on fewer ranks: this rank keeps its random state", folder)
        del rest[_rng_key()]
    values = tensors | rest
    _load(folder, values)
    _take(state, values)
    for name, its in pickle.loads(values["plain"]).items() if "plain" in values else ():
        if name in state.plain:
            state.plain[name].load_state_dict(its)
    if _rng_key() in values:
        _set_rng_state(values[_rng_key()])
    return int(values["step"])


def _load(folder: Path, values: dict[str, Any]) -> None:
    """Fill ``values`` in place."""
    with _plain_errors(ValueError, f"checkpoint {folder}: can't be loaded"):
        dcp.load(values, checkpoint_id=folder, planner=BlockLoadPlanner())


def _take(trained: Trained, values: Mapping[str, Any]) -> None:
    trained.model.load_state_dict(values["model"])
    set_optimizer_state_dict(trained.model, trained.optimizer, values["optimizer"])
    trained.scheduler.load_state_dict(values["scheduler"])


def _compare_names(folder: Path, state: TrainState) -> None:
    saved = {path.name for path in folder.iterdir() if is_complete(path)}
    lost = sorted(state.others.keys() - saved)
    if lost:
        raise ValueError(f"checkpoint {folder}: has no {', '.join(lost)}; name one of a run that trained it, too.")
    if unused := sorted(saved - state.others.keys()):
        log.warning("checkpoint %s: its %s isn't trained any more, and is left out", folder, ", ".join(unused))


def _load_position(folder: Path, saved: Iterable[str], data: Position) -> None:
    """By the saved names, not by those that ``data`` has now: where they differ, it can say what of the data does.

    Before the weights, so that it says so at once.
    """
    prefix = "data."
    values = {"data": {key.removeprefix(prefix): 0 for key in saved if key.startswith(prefix)}}
    _load(folder, values)
    data.load_state_dict(values["data"])


def load_model(folder: Path, model: nn.Module) -> None:
    """Only the (first model's) weights of a checkpoint, into a sharded model of any topology. Every rank must call it.

    Raises:
        ValueError: as ``load_checkpoint``.
    """
    _refuse_incomplete(folder)
    weights = {"model": model.state_dict()}
    _load(folder, weights)
    model.load_state_dict(weights["model"])


@contextmanager
def _plain_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """DCP tells every rank what failed on any of them, in an exception that is no ``Exception``: whoever ends a run on
    errors would miss it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        raise kind(f"{what}: {cause} (rank {rank})") from error


def _set_aside(folder: Path) -> Path:
    """Take a checkpoint's name away at once, so that one half deleted is never taken for a whole one."""
    aside = folder.with_name(folder.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)  # what an interrupted run left
    return folder.rename(aside)


def _refuse_incomplete(folder: Path) -> None:
    if not is_complete(folder):
        raise ValueError(f"checkpoint {str(folder)!r}: is not complete (no .metadata in it); name one that is.")


def _tensors(state: Trained) -> dict[str, Any]:
    return {
        "model": state.model.state_dict(),
        # By parameter names; makes the (zero) moments first where the optimizer hasn't stepped yet.
        "optimizer": get_optimizer_state_dict(state.model, state.optimizer),
    }


def _rest(state: TrainState, step: int) -> dict[str, Any]:
    """Equal on every rank but the random state, which is under each rank's own key."""
    # In one piece: its names and lengths may be others when it is loaded.
    plain = {"plain": pickle.dumps({name: each.state_dict() for name, each in state.plain.items()})}
    return (plain if state.plain else {}) | {
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
