"""Strided memory as boxes: what a chain of views of a tensor walks, and where two of them meet. Pure integers.

A ``Walk`` is a loop nest that steps through two memories at once. Example: the transpose of rows 1..2 of a (4, 3)
tensor, written to memory of its own,

    Walk(a=3, b=0, dims=((3, 1, 2), (2, 3, 1)))     element (i, j): a[3 + 1 * i + 3 * j] and b[0 + 2 * i + 1 * j]

and as a box of the tensor behind ``a``: rows range(1, 3), which step by 1 in ``b``; columns range(0, 3), by 2. One walk
may be several boxes: elements 2..7 of the same tensor, flattened, are the end of row 0, row 1, and the start of row 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Loop = tuple[int, int, int]  # (count, stride in a, stride in b)


@dataclass(frozen=True, slots=True)
class Walk:
    """Element (i, j, ...) of the loops is ``a + i * stride_a + ...`` in one memory and ``b + ...`` in the other."""

    a: int
    b: int
    dims: tuple[Loop, ...]

    @property
    def num_elements(self) -> int:
        """How many pairs of elements."""
        return math.prod(count for count, _, _ in self.dims)

    def swap(self) -> Walk:
        """The same with the two memories' names exchanged."""
        return Walk(self.b, self.a, tuple((count, b, a) for count, a, b in self.dims))


@dataclass(frozen=True, slots=True)
class Box:
    """A walk whose ``a`` side is a box of a contiguous tensor.

    Attributes:
        ranges: indices along each dim of that tensor; not empty.
        b: where the box's first element lies in the other memory.
        strides: in the other memory, for each dim of the tensor, per element of its range.
        repeats: (count, stride in the other memory): the whole box once more, that much further on.
    """

    ranges: tuple[range, ...]
    b: int
    strides: Shape
    repeats: tuple[tuple[int, int], ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of the other memory."""
        return math.prod(map(len, self.ranges)) * math.prod(count for count, _ in self.repeats)

    def moved(self, b: int) -> Box:
        """The same, ``b`` elements further on in the other memory."""
        return Box(self.ranges, self.b + b, self.strides, self.repeats) if b else self

    def cut(self, ranges: Sequence[range]) -> Box:
        """The part at ``ranges``, each contained in this box's."""
        b = self.b
        strides = []
        for own, kept, stride in zip(self.ranges, ranges, self.strides, strict=True):
            b += (kept.start - own.start) // own.step * stride
            strides.append(kept.step // own.step * stride if len(kept) > 1 else 0)
        return Box(tuple(ranges), b, tuple(strides), self.repeats)

    def walk(self, shape: Shape) -> Walk:
        """Back: in ``a``, the contiguous tensor of ``shape``."""
        units = contiguous_strides(shape)
        loops = [
            (len(indices), unit * indices.step, stride)
            for indices, unit, stride in zip(self.ranges, units, self.strides, strict=True)
            if len(indices) > 1
        ]
        first = sum(indices.start * unit for indices, unit in zip(self.ranges, units, strict=True))
        return Walk(first, self.b, (*((count, 0, stride) for count, stride in self.repeats), *loops))

    def without(self, ranges: Sequence[range]) -> Iterator[Box]:
        """Boxes that cover, once, what isn't at ``ranges``, each contained in this box's."""
        left = list(self.ranges)
        for dim, (own, taken) in enumerate(zip(self.ranges, ranges, strict=True)):
            first, stride = (taken.start - own.start) // own.step, taken.step // own.step
            last = first + stride * (len(taken) - 1)
            between = [own[first + phase : last : stride] for phase in range(1, stride)]
            for rest in (own[:first], *between, own[last + 1 :]):
                if rest:
                    yield self.cut([*left[:dim], rest, *left[dim + 1 :]])
            left[dim] = taken


def meet(first: Sequence[range], second: Sequence[range]) -> tuple[range, ...] | None:
    """The indices that two boxes of one tensor share: in each dim a range with a step; None where there is none."""
    shared = []
    for x, y in zip(first, second, strict=True):
        both = _meet(x, y)
        if not both:
            return None
        shared.append(both)
    return tuple(shared)


def _meet(x: range, y: range) -> range:
    if x.step == y.step == 1:
        return range(max(x.start, y.start), min(x.stop, y.stop))
    if not x or not y:
        return range(0)
    common = math.gcd(x.step, y.step)
    if (y.start - x.start) % common:
        return range(0)
    step = x.step // common * y.step
    # Chinese remainder: the element of x, in steps from its start, that is one of y's too.
    modulus = y.step // common
    found = x.start + x.step * ((y.start - x.start) // common * pow(x.step // common, -1, modulus) % modulus)
    start = found - (found - max(x.start, y.start)) // step * step  # the first that isn't before either start
    return range(start, min(x[-1], y[-1]) + 1, step)


class Boxes:
    """Splits walks into boxes, and remembers: the experts of a model are the same walk many times over."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[Loop, ...], Shape], tuple[Box, ...]] = {}

    def split(self, walk: Walk, shape: Shape) -> list[Box]:
        """``walk`` as boxes of the contiguous tensor of ``shape`` that its memory ``a`` is; each element once."""
        key = (walk.a, walk.dims, shape)
        if key not in self._known:
            self._known[key] = tuple(_split(Walk(walk.a, 0, walk.dims), shape))
        return [box.moved(walk.b) for box in self._known[key]]

    def join(self, read: Sequence[Box], written: Walk, shape: Shape) -> tuple[list[Walk], list[Box]]:
        """What ``read`` takes of a memory that was written to, in part.

        Args:
            read: boxes of the memory, which know where they are read to.
            written: a: the memory, b: where it was written from. Writes no element twice.
            shape: of the memory, as a contiguous tensor.

        Returns:
            Walks with a: where it was written from, b: where it is read to; and what was read but not written.
        """
        return _join(read, self.split(written, shape))


def _join(read: Sequence[Box], written: Sequence[Box]) -> tuple[list[Walk], list[Box]]:
    joined = []
    left = list(read)
    for source in written:
        rest: list[Box] = []
        for box in left:
            shared = meet(box.ranges, source.ranges)
            if shared is None:
                rest.append(box)
                continue
            rest += box.without(shared)
            to, of = box.cut(shared), source.cut(shared)
            dims = [
                (len(indices), stride_a, stride_b)
                for indices, stride_a, stride_b in zip(shared, of.strides, to.strides, strict=True)
                if len(indices) > 1
            ]
            joined.append(Walk(of.b, to.b, (*((count, 0, stride) for count, stride in to.repeats), *dims)))
        left = rest
    return joined, left


def infer_shape(num_elements: int, strides: Sequence[int]) -> Shape:
    """A shape for a memory in which views of ``strides`` are likely to be boxes: (16, 1) of 128 elements is (8, 16).
    Any shape of that many elements is right; a worse one only makes more boxes."""
    shape: list[int] = []
    whole = num_elements
    for stride in sorted({stride for stride in strides if stride > 0}, reverse=True):
        if whole % stride == 0 and stride < whole:
            shape.append(whole // stride)
            whole = stride
    if whole > 1 or not shape:
        shape.append(whole)
    return tuple(shape)


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Row-major."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _split(walk: Walk, shape: Shape) -> Iterator[Box]:
    """Walks to do, one after the other, each split until it is a box."""
    memory = contiguous_strides(shape)
    todo = [walk]
    while todo:
        current = todo.pop()
        parts = _refine(current, shape, memory)
        if parts is None:
            yield _box(current, shape, memory)
        else:
            todo += reversed(parts)


def _refine(walk: Walk, shape: Shape, memory: Shape) -> list[Walk] | None:
    """Simpler walks that do the same; None where the walk is a box already."""
    walkers: dict[int, int] = {}  # dim of the tensor -> the loop that walks it
    for at, (count, stride, _) in enumerate(walk.dims):
        if count == 1:
            return [_put(walk, at)]
        if stride == 0:
            continue
        dim = _find_dim(stride, shape, memory)
        if dim is None:
            return _unroll(walk, at)
        if dim in walkers:
            return _merge(walk, walkers[dim], at)
        walkers[dim] = at
    for dim, at in walkers.items():
        count, stride, stride_b = walk.dims[at]
        step = stride // memory[dim]
        start = walk.a // memory[dim] % shape[dim]
        if start + step * (count - 1) < shape[dim]:
            continue
        in_row = -(-(shape[dim] - start) // step)  # up to the end of the row
        if start == 0 and shape[dim] % step == 0 and count % in_row == 0:
            outer = (count // in_row, stride * in_row, stride_b * in_row)
            return [_put(walk, at, outer, (in_row, stride, stride_b))]
        whole = count // in_row * in_row if start == 0 and shape[dim] % step == 0 and count > in_row else in_row
        rest = Walk(walk.a + whole * stride, walk.b + whole * stride_b, walk.dims)
        return [
            _put(walk, at, (whole, stride, stride_b)),
            _put(rest, at, (count - whole, stride, stride_b)),
        ]
    return None


def _find_dim(stride: int, shape: Shape, memory: Shape) -> int | None:
    """The dim that a stride steps along; None where it steps along several at once."""
    for dim, unit in enumerate(memory):
        if shape[dim] > 1 and unit <= stride:
            return dim if stride % unit == 0 else None
    return None


def _merge(walk: Walk, first: int, second: int) -> list[Walk]:
    """Two loops along one dim: one loop, where the inner's end is the outer's next; otherwise one walk for each
    iteration of the shorter."""
    outer, inner = sorted((walk.dims[first], walk.dims[second]), key=lambda loop: -loop[1])
    if outer[1] == inner[0] * inner[1] and outer[2] == inner[0] * inner[2]:
        merged = _put(walk, first, (outer[0] * inner[0], inner[1], inner[2]))
        return [_put(merged, second)]
    return _unroll(walk, first if walk.dims[first][0] <= walk.dims[second][0] else second)


def _unroll(walk: Walk, at: int) -> list[Walk]:
    count, stride, stride_b = walk.dims[at]
    return [_put(Walk(walk.a + i * stride, walk.b + i * stride_b, walk.dims), at) for i in range(count)]


def _put(walk: Walk, at: int, *loops: Loop) -> Walk:
    """With other loops, or none, in place of one."""
    return Walk(walk.a, walk.b, (*walk.dims[:at], *loops, *walk.dims[at + 1 :]))


def _box(walk: Walk, shape: Shape, memory: Shape) -> Box:
    starts = [walk.a // unit % size for unit, size in zip(memory, shape, strict=True)]
    ranges = [range(start, start + 1) for start in starts]
    strides = [0] * len(shape)
    repeats = []
    for count, stride, stride_b in walk.dims:
        if stride == 0:
            repeats.append((count, stride_b))
            continue
        dim = _find_dim(stride, shape, memory)
        assert dim is not None
        step, start = stride // memory[dim], ranges[dim].start
        ranges[dim] = range(start, start + step * (count - 1) + 1, step)
        strides[dim] = stride_b
    return Box(tuple(ranges), walk.b, tuple(strides), tuple(repeats))
