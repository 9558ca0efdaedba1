"""Engine ``hf``: where new weights go in a transformers model, and how its memory is given back and taken again.

The model may be whole, or parallelized (DTensors): this process's part of it is meant. Its tensors are those of
``state_tensors``: parameters and persistent buffers, tied ones once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.ops.parking import Parking, build_tier, local_tensor
from moesaic.ops.placements import Block, local_blocks
from moesaic.reshard.layout import Copy, TargetLayout, TargetTensor
from moesaic.reshard.run import local_shards
from moesaic.weights.agree import state_tensors, tied_names
from moesaic.weights.export import find_layout
from moesaic.weights.load import order_dims
from moesaic.weights.tiles import Grid, Shape, plan_reads


def describe_target(model: PreTrainedModel) -> TargetLayout:
    """This process's part of the model, filled from whole tensors of the same names."""
    tensors, copies = [], []
    local = local_shards(model)
    for name, tensor in state_tensors(model).items():
        mine = local[name]
        tensors.append(TargetTensor(name=name, shape=tuple(mine.shape), dtype=mine.dtype))
        num_dims = mine.ndim
        for block in _blocks(tensor):
            offsets = zip(block.local_offset, mine.stride(), strict=True)
            copies.append(
                Copy(
                    source=name,
                    target=name,
                    shape=block.size,
                    source_start=block.global_offset,
                    source_dims=tuple(range(num_dims)),
                    source_steps=(1,) * num_dims,
                    target_offset=sum(offset * stride for offset, stride in offsets),
                    target_strides=tuple(mine.stride()),
                )
            )
    return TargetLayout(tensors=tuple(tensors), copies=tuple(copies), fills=())


def _blocks(tensor: Tensor) -> tuple[Block, ...]:
    if isinstance(tensor, DTensor):
        return local_blocks(tensor.shape, tensor.device_mesh, tensor.placements)
    origin = (0,) * tensor.ndim
    return (Block(origin, origin, tuple(tensor.shape)),) if tensor.numel() else ()


class Update:
    """New weights on their way into the model: what has come, and whether that is all.

    As a ``Sink`` of planned transfers (``open``, ``close``), or filled with whole tensors under the keys of files
    (``fill``: the hub's, those of the folder that the model came from, or the modules' own).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._places: dict[str, list[tuple[str, Grid]]] = {}
        self._shapes: dict[str, Shape] = {}
        self._local: dict[str, Tensor] = {}
        self._blocks: dict[str, tuple[Block, ...]] = {}
        self._missing: dict[str, int] = {}
        self._came: set[str] = set()

    def restart(self) -> None:
        """Nothing has come."""
        self._local = local_shards(self._model)
        self._blocks = {name: _blocks(tensor) for name, tensor in state_tensors(self._model).items()}
        self._missing = {name: tensor.numel() for name, tensor in self._local.items()}
        self._came = set()

    def open(self, name: str) -> Tensor:
        """This process's part of the tensor, to be written."""
        return self._local[name]

    def close(self, name: str) -> None:
        """It has been, altogether."""
        self._missing[name] = 0

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy from whole tensors, cast to the model's dtypes.

        Raises:
            ValueError: a key that the model has no place for or that came before, or a shape that isn't its.
        """
        if not self._places:
            self._find_places()
        for key, values in tensors:
            if key not in self._places:
                raise ValueError(f"{key}: the model has no place for it; send the keys of its own files.")
            if tuple(values.shape) != tuple(self._shapes[key]):
                raise ValueError(f"{key}: {tuple(values.shape)} came, the model's is {tuple(self._shapes[key])}.")
            if key in self._came:
                raise ValueError(f"{key}: it came twice in this update.")
            self._came.add(key)
            for name, grid in self._places[key]:
                for read in (read for block in self._blocks[name] for read in plan_reads(grid, block)):
                    part = self._local[name][read.dest]
                    index = tuple(slice(each.start, each.stop, each.step) for each in read.source)
                    part.copy_(order_dims(values[index], read.dims))
                    self._missing[name] -= part.numel()

    def require_complete(self) -> None:
        """Raise where some element has not come, or has come under two keys.

        Raises:
            ValueError: with the tensors.
        """
        wrong = [f"{name} ({count} of {self._local[name].numel()})" for name, count in self._missing.items() if count]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(f"not filled exactly once, elements that didn't come: {', '.join(wrong[:5])}{more}.")

    def _find_places(self) -> None:
        """By key of a file: the tensors that it has a part in, with the tile that is its."""
        state = state_tensors(self._model)
        grids, shapes = find_layout(self._model, state)
        places: dict[str, list[tuple[str, Grid]]] = defaultdict(list)
        for name, grid in grids.items():
            for tile in grid.tiles:
                places[tile.key].append((name, Grid(grid.shape, (tile,))))
        own = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in places}
        places |= {name: [(name, Grid.whole(name, shape))] for name, shape in own.items()}
        # A tied tensor is filled under its first name; what comes under the others is the same, and not used.
        further = {name: first for first, names in tied_names(self._model).items() for name in names}
        places |= {name: [] for name in further if name not in places}
        self._shapes = {**shapes, **own, **{name: tuple(state[first].shape) for name, first in further.items()}}
        self._places = dict(places)


class Memory:
    """Takes the memory of a model's tensors away and brings it back, the tensors being the same throughout.

    Args:
        folder: for what is kept of a model on the CPU, see ``build_tier``.
    """

    def __init__(self, model: PreTrainedModel, folder: str | Path | None = None) -> None:
        self._model = model
        self._parking = Parking(build_tier(model.device.type, folder))

    @torch.no_grad()
    def take(self, *, keep: bool) -> None:
        """``keep``: the values too come back with the memory.

        Raises:
            OSError: there is no room to keep them; the model has them still.
        """
        tensors = state_tensors(self._model).values()
        for tensor in tensors:
            if not local_tensor(tensor).untyped_storage().resizable():  # a mapped file's, which can't be given back
                assert not isinstance(tensor, DTensor), "a DTensor in mapped memory"
                tensor.data = tensor.detach().clone()
        self._parking.park(tensors, keeps=keep)

    def give_back(self) -> None:
        """As large as before; with what was kept, else with anything."""
        self._parking.bring_back()

    def close(self) -> None:
        """Forget what was taken."""
        self._parking.close()
