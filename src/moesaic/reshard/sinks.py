"""Where an engine rank takes its tensors: opened for writing, closed when every element has come."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from moesaic.reshard.layout import Fill, Piece, TargetRegion, TargetTensor
from moesaic.reshard.packing import copy_rounded, select
from moesaic.reshard.transfers import ProcessView


class Sink(Protocol):
    """Where an engine rank takes its tensors, in their layout while weights are loaded."""

    def open(self, name: str) -> Tensor:
        """The memory to write the tensor to. Called once in a run, before its first element comes."""

    def close(self, name: str) -> None:
        """Every element of it has come. Called once in a run."""


class TensorSink:
    """Plain tensors as they are.

    Attributes:
        tensors: name -> tensor.
        closed: names of those that are complete, in that order; of all runs.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.closed: list[str] = []

    def open(self, name: str) -> Tensor:
        """The tensor itself."""
        return self.tensors[name]

    def close(self, name: str) -> None:
        """Note that it is complete."""
        self.closed.append(name)


class Openings:
    """The target's tensors: opened when first needed, closed when every element has come.

    What doesn't travel (constants, pieces of this process's own shards) is written right after opening, so that no more
    tensors are open than those that messages under way belong to.
    """

    def __init__(self, view: ProcessView, source: Mapping[str, Tensor], target: Sink, max_bytes: int) -> None:
        self.source, self.target, self.max_bytes = source, target, max_bytes
        self.described = {tensor.name: tensor for tensor in view.tensors}
        self.missing = {tensor.name: math.prod(tensor.shape) for tensor in view.tensors}
        self.opened: dict[str, Tensor] = {}
        self.fills: defaultdict[str, list[Fill]] = defaultdict(list)
        self.local: defaultdict[str, list[Piece]] = defaultdict(list)
        for fill in view.fills:
            self.fills[fill.target].append(fill)
        for piece in view.local:
            self.local[piece.target.name].append(piece)
        self.received = {piece.target.name for message in view.receives for piece in message.pieces}

    def make_unreceived(self) -> None:
        """All tensors that no message has a part of."""
        for name in self.described:
            if name not in self.received:
                self._open(name)

    def write(self, piece: Piece, values: Tensor) -> None:
        """Put a piece where it belongs. ``values``: [the source's shape], repeated where the target's is larger."""
        name = piece.target.name
        if name not in self.opened:
            self._open(name)
        self._region(piece.target).copy_(values)
        self._wrote(name, math.prod(piece.target.shape))

    def assert_all_closed(self) -> None:
        """Nothing is missing."""
        missing = {name: num_elements for name, num_elements in self.missing.items() if num_elements}
        assert not missing and not self.opened, f"the plan leaves elements unwritten: {missing}"

    def _open(self, name: str) -> None:
        tensor = self.target.open(name)
        check_target(tensor, self.described[name])
        self.opened[name] = tensor
        for fill in self.fills[name]:
            offset = tensor.storage_offset() + fill.target_offset
            tensor.as_strided(fill.shape, fill.target_strides, offset).fill_(fill.value)
            self.missing[name] -= math.prod(fill.shape)
        for piece in self.local[name]:
            values = select(self.source[piece.source.name], piece).expand(piece.target.shape)
            copy_rounded(self._region(piece.target), values, piece.wire_dtype, self.max_bytes)
            self.missing[name] -= values.numel()
        self._wrote(name, 0)

    def _region(self, region: TargetRegion) -> Tensor:
        tensor = self.opened[region.name]
        return tensor.as_strided(region.shape, region.strides, tensor.storage_offset() + region.offset)

    def _wrote(self, name: str, num_elements: int) -> None:
        self.missing[name] -= num_elements
        assert self.missing[name] >= 0, f"the plan writes more than {name} has"
        if not self.missing[name]:
            del self.opened[name]
            self.target.close(name)


def check_target(tensor: Tensor, described: TargetTensor) -> None:
    """Whether a tensor is as the plan takes it to be.

    Raises:
        ValueError: another shape or dtype, or not contiguous.
    """
    if tuple(tensor.shape) != described.shape or tensor.dtype != described.dtype or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
        raise ValueError(
            f"target: {described.name} is {tuple(tensor.shape)} {tensor.dtype}{layout}; the plan needs "
            f"{described.shape} {described.dtype}, contiguous: plan from the engine's layout while it loads weights."
        )
