"""Records what a loader does to tensors, without doing it: every element of memory keeps the name of where it is from.

A ``Memory`` is one storage: a tensor of the files, a parameter of the engine, or something in between (``torch.cat``,
``contiguous``, a buffer that is filled piece by piece). What was written to it is a list of ``Part``, a later one over
an earlier. Nothing is ever copied: reading from a memory joins the parts with the view that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from moesaic.reshard.strides import Boxes, Shape, Walk, infer_shape


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values are from, and how they were rounded on the way.

    Attributes:
        key: a tensor of the files; None for one constant.
        dtype: of that tensor, or of a cast that lost something since.
        lossy: whether there was such a cast.
        value: the constant.
    """

    key: str | None
    dtype: torch.dtype
    lossy: bool = False
    value: float = 0.0

    def cast(self, dtype: torch.dtype) -> Origin:
        """As values of ``dtype``.

        Raises:
            ValueError: they have been rounded before, and this would round them again: no single cast does the same.
        """
        if self.key is None:
            value = float(torch.tensor(self.value, dtype=torch.float64).to(dtype))
            return replace(self, dtype=dtype, value=value)
        if holds(dtype, self.dtype):
            return self
        if self.lossy:
            raise ValueError(f"{self.key} is rounded twice, to {self.dtype} and to {dtype}")
        return replace(self, dtype=dtype, lossy=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that were written together: ``walk`` from the origin's memory (``a``) to another (``b``)."""

    origin: Origin
    walk: Walk


@dataclass(slots=True)
class Memory:
    """One storage, or the part of one that a parameter of the engine is.

    Attributes:
        kind: what is there under the parts. ``source``: the tensor of the files itself; ``target``, ``unset``: nothing;
            ``real``: values, in ``tensor``.
        tensor: kept, so that the storage isn't freed and its address used again.
        shape: of the memory, as a contiguous tensor of ``start .. start + numel`` in the storage.
    """

    kind: Literal["source", "target", "unset", "real"]
    name: str
    tensor: torch.Tensor
    shape: Shape
    start: int = 0
    parts: list[Part] = field(default_factory=list)

    def describe(self) -> str:
        """For messages."""
        if self.kind == "source":
            return f"{self.name} of the files"
        if self.kind == "target":
            return f"the engine's {self.name}"
        keys = dict.fromkeys(part.origin.key for part in self.parts if part.origin.key is not None)
        return f"a tensor made from {', '.join(list(keys)[:3]) or 'nothing'}"


class Ledger:
    """All memories that a loader touches."""

    def __init__(self) -> None:
        self.boxes = Boxes()
        self._memories: dict[int, list[Memory]] = {}
        self.overwritten: set[str] = set()
        """Files' tensors that the loader read after it had written to them itself."""

    def add(self, memory: Memory) -> None:
        """Watch a memory. Those of one storage don't overlap."""
        self._memories.setdefault(_identity(memory.tensor), []).append(memory)

    def find(self, tensor: torch.Tensor) -> Memory | None:
        """The watched memory that ``tensor`` is a view of.

        Raises:
            ValueError: it reaches over the edge of it, or takes its bytes for another dtype.
        """
        memories = self._memories.get(_identity(tensor))
        if memories is None:
            return None
        if any(memory.tensor.dtype != tensor.dtype for memory in memories):
            raise ValueError(f"{memories[0].describe()} is viewed as {tensor.dtype}")
        begin = int(tensor.storage_offset())
        if len(memories) == 1 and memories[0].kind != "target":
            return memories[0]
        end = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for memory in memories:
            stop = memory.start + memory.tensor.numel()
            if memory.start <= begin and end < stop:
                return memory
            if begin < stop and memory.start <= end:
                raise ValueError(f"a view reaches beyond {memory.describe()}")
        return None

    def read(self, tensor: torch.Tensor, offset: int, strides: Sequence[int], dtype: torch.dtype) -> list[Part]:
        """Where the elements of ``tensor`` are from, to be written as ``dtype`` to ``offset`` and ``strides`` of
        another memory.

        Raises:
            ValueError: that can't be said.
        """
        loops = tuple(zip(tensor.shape, tensor.stride(), strides, strict=True))
        memory = self.find(tensor)
        if memory is None:
            return _read_constant(tensor, offset, strides, dtype)
        read = Walk(int(tensor.storage_offset()) - memory.start, offset, loops)
        if memory.kind == "source":
            if not memory.parts:
                return [Part(Origin(memory.name, tensor.dtype).cast(dtype), read)]
            self.overwritten.add(memory.name)
        return self._compose(memory, read, dtype)

    def _compose(self, memory: Memory, read: Walk, dtype: torch.dtype) -> list[Part]:
        """The parts of ``memory`` that ``read`` meets, the latest first, then what is under them."""
        found: list[Part] = []
        left = self.boxes.split(read, memory.shape)
        for part in reversed(memory.parts):
            if not left:
                break
            walks, left = self.boxes.join(left, part.walk.swap(), memory.shape)
            origin = part.origin.cast(dtype) if walks else part.origin
            found += [Part(origin, walk) for walk in walks]
        for box in left:
            walk = box.walk(memory.shape)
            if memory.kind == "source":
                found.append(Part(Origin(memory.name, memory.tensor.dtype).cast(dtype), walk))
            elif memory.kind == "real":
                view = torch.as_strided(
                    memory.tensor,
                    [count for count, _, _ in walk.dims],
                    [stride for _, stride, _ in walk.dims],
                    memory.start + walk.a,
                )
                found += _read_constant(view, walk.b, [stride for _, _, stride in walk.dims], dtype)
            else:
                raise ValueError(f"elements of {memory.describe()} are read before anything is written to them")
        return found

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """``tensor.copy_(value)``.

        Raises:
            ValueError: where the values are from can't be said.
        """
        if tensor.numel() == 0:
            return
        memory = self.watch(tensor)
        offset = int(tensor.storage_offset()) - memory.start
        source = value.expand(tensor.shape)
        memory.parts += self.read(source, offset, _written_strides(tensor), tensor.dtype)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """``tensor.fill_(value)``."""
        if tensor.numel() == 0:
            return
        memory = self.watch(tensor)
        origin = Origin(None, tensor.dtype, value=value).cast(tensor.dtype)
        loops = tuple((size, 0, stride) for size, stride in zip(tensor.shape, _written_strides(tensor), strict=True))
        memory.parts.append(Part(origin, Walk(0, int(tensor.storage_offset()) - memory.start, loops)))

    def watch(self, tensor: torch.Tensor) -> Memory:
        """The memory of ``tensor``, from now on a watched one."""
        memory = self.find(tensor)
        if memory is None:
            num_elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            whole = torch.as_strided(tensor.detach(), (num_elements,), (1,), 0)
            kind: Literal["unset", "real"] = "unset" if tensor.is_meta else "real"
            memory = Memory(kind, "", whole, infer_shape(num_elements, tensor.stride()))
            self.add(memory)
        return memory

    def describe(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """The first of ``tensors`` that is watched, for messages; None where none is."""
        for tensor in tensors:
            for memory in self._memories.get(_identity(tensor), ()):
                return memory.describe()
        return None


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    if wide == narrow or narrow == torch.bool:
        return True
    if wide.is_floating_point and narrow.is_floating_point:
        a, b = torch.finfo(wide), torch.finfo(narrow)
        return a.eps <= b.eps and a.max >= b.max and a.smallest_normal * a.eps <= b.smallest_normal * b.eps
    if wide.is_floating_point or narrow.is_floating_point or wide.is_complex or narrow.is_complex or wide == torch.bool:
        return False
    return torch.iinfo(wide).min <= torch.iinfo(narrow).min and torch.iinfo(wide).max >= torch.iinfo(narrow).max


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_strides(tensor: torch.Tensor) -> Shape:
    """Strides, of a tensor that is to be written to."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ValueError("an expanded tensor is written to: its elements lie on one another")
    return tuple(tensor.stride())


def _read_constant(tensor: torch.Tensor, offset: int, strides: Sequence[int], dtype: torch.dtype) -> list[Part]:
    """A tensor that isn't watched: not from the files, so it has to be one value everywhere."""
    if tensor.is_meta:
        raise ValueError("a tensor on meta is read that isn't made from the files")
    first = tensor[(0,) * tensor.dim()]
    if not bool(torch.where(first.isnan(), tensor.isnan(), tensor == first).all()):
        raise ValueError("values are copied that are neither from the files nor all equal")
    origin = Origin(None, tensor.dtype, value=float(first)).cast(dtype)
    loops = tuple((size, 0, stride) for size, stride in zip(tensor.shape, strides, strict=True))
    return [Part(origin, Walk(0, offset, loops))]
