"""Many equal copies as one, and the layers of a model as repeats of one: what keeps plans of large models small.

Example, the gate projections of 3 experts of (2, 4) each, which a loader copies one by one:

    source_start  target_offset                  one copy with one more dim
    (0, 0, 0)     0                              source_start (0, 0, 0), target_offset 0,
    (1, 0, 0)     16              becomes        shape (3, 2, 4), source_dims (0, 1, 2), source_steps (1, 1, 1),
    (2, 0, 0)     32                             target_strides (16, 4, 1)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from moesaic.reshard.layout import Copy, Fill, SourceTensor, TargetLayout, TargetTensor

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.|$)")
Item = TypeVar("Item", TargetTensor, SourceTensor, Copy, Fill)


def lift_copies(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Runs of copies that differ by a constant step in one dim of the source, and by another in the target, become one
    copy each, in the place of the first. The order of copies is kept: runs are looked for in it, never by sorting."""
    kept = list(copies)
    while True:
        num_before = len(kept)
        for dim in range(max((len(copy.source_start) for copy in kept), default=0)):
            kept = _lift_along(kept, dim)
        if len(kept) == num_before:
            return tuple(kept)


def _lift_along(copies: Sequence[Copy], dim: int) -> list[Copy]:
    """Along one dim of the source that the copies don't walk."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, copy in enumerate(copies):
        start = copy.source_start
        if dim < len(start) and dim not in copy.source_dims:
            groups[
                copy.source, copy.target, copy.shape, copy.source_dims, copy.source_steps, copy.target_strides,
                (*start[:dim], None, *start[dim + 1 :]),
            ].append(index)  # fmt: skip
    result: list[Copy | None] = list(copies)
    for indices in groups.values():
        for run in _find_runs([(copies[i].source_start[dim], copies[i].target_offset) for i in indices]):
            if len(run) > 1:
                first, second = copies[indices[run[0]]], copies[indices[run[1]]]
                for at in run:
                    result[indices[at]] = None
                result[indices[run[0]]] = replace(
                    first,
                    shape=(len(run), *first.shape),
                    source_dims=(dim, *first.source_dims),
                    source_steps=(second.source_start[dim] - first.source_start[dim], *first.source_steps),
                    target_strides=(second.target_offset - first.target_offset, *first.target_strides),
                )
    return [copy for copy in result if copy is not None]


def _find_runs(places: Sequence[tuple[int, int]]) -> list[range]:
    """Indices of neighbours with constant steps, both above 0."""
    runs = []
    begin = 0
    while begin < len(places):
        end = begin + 1
        while end < len(places):
            step = _subtract(places[end], places[end - 1])
            if step != _subtract(places[begin + 1], places[begin]) or min(step) <= 0:
                break
            end += 1
        runs.append(range(begin, end))
        begin = end
    return runs


def _subtract(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] - b[0], a[1] - b[1]


def replicate_layers(
    layout: TargetLayout, layers: Sequence[int], *, like: Callable[[int], int] | None = None
) -> TargetLayout:
    """A model of many layers from a trace of few: what has ``layers.N.`` in its target's name is repeated for each of
    ``layers``, its source's name likewise; the rest stays. Pure. That it names all that the engine's own model has is
    for ``require_complete`` to say.

    Args:
        layout: as traced from a model of the same config but for the number of layers; of files or resolved.
        layers: those that the engine rank has, ascending: all, or a pipeline stage's.
        like: layer -> the traced layer that it is like, for traced ones too. Default: the first.

    Raises:
        ValueError: no layer was traced, or one differs from the one that it is like, or that one wasn't traced; a layer
            is filled from another one's tensors; a source isn't numbered as its target is, and no two traced layers
            show that all read the same of it; there are two stacks of layers.
    """
    tensors, copies, fills = _group(layout.tensors), _group(layout.copies), _group(layout.fills)
    sources = _group(layout.sources)
    traced = sorted(tensors.keys() - {BEFORE, BEHIND})
    if not traced:
        raise ValueError("no target has layers.N. in its name: there is nothing to replicate; trace the whole model.")
    models = {layer: traced[0] if like is None else like(layer) for layer in layers}
    compared = {layer: traced[0] if like is None else like(layer) for layer in traced}
    unknown = sorted({*models.values(), *compared.values()} - set(traced))
    if unknown:
        raise ValueError(f"layer {unknown[0]} wasn't traced, only {traced}: like() has to name one of these.")
    for layer, other in compared.items():
        if not (
            _agree(tensors, layer, other)
            and _agree(copies, layer, other)
            and _agree(fills, layer, other)
            and _agree(sources, layer, other)
        ):
            raise ValueError(
                f"layers {other} and {layer} of the traced model differ. Say which of them each layer is like "
                "(like=...), or trace the whole model."
            )
    shown = {other for layer, other in compared.items() if layer != other}
    _require_numbered(copies, set(models.values()) - shown)
    return TargetLayout(
        tensors=_repeat(tensors, models),
        copies=_repeat(copies, models),
        fills=_repeat(fills, models),
        sources=_repeat(sources, models),
    )


def _require_numbered(copies: Mapping[int, Sequence[Copy]], alone: Collection[int]) -> None:
    """Raise ValueError where a name doesn't say what other layers read. ``alone``: layers that no other traced one
    was compared with."""
    for layer, its_copies in copies.items():
        for copy in its_copies:
            numbered = LAYER.search(copy.source) is not None
            if layer in (BEFORE, BEHIND) and numbered:
                raise ValueError(
                    f"{copy.target} is of no layer, and filled from {copy.source}: which layer's that is in another "
                    "number of layers isn't known; trace the whole model."
                )
            if layer in alone and not numbered:
                raise ValueError(
                    f"{copy.target} is filled from {copy.source}, which has no layer's number: whether other layers "
                    "read the same part of it is seen only where two layers that are alike are traced."
                )


BEFORE, BEHIND = -2, -1  # what isn't of a layer: the embedding, and what follows the last layer


def _group(items: Sequence[Item]) -> dict[int, list[Item]]:
    """By layer, in order."""
    groups: dict[int, list[Item]] = {}
    prefixes = set()
    for item in items:
        name = item.name if isinstance(item, (TargetTensor, SourceTensor)) else item.target
        found = LAYER.search(name)
        if found:
            prefixes.add(name[: found.start()])
        layer = int(found[1]) if found else BEHIND if groups.keys() - {BEFORE} else BEFORE
        groups.setdefault(layer, []).append(item)
    if len(prefixes) > 1:
        raise ValueError(f"the model has several stacks of layers ({', '.join(sorted(prefixes))}): trace all of it.")
    return groups


def _agree(groups: Mapping[int, Sequence[Item]], layer: int, other: int) -> bool:
    return [_rename(item, layer, other) for item in groups.get(layer, ())] == [*groups.get(other, ())]


def _repeat(groups: Mapping[int, Sequence[Item]], models: Mapping[int, int]) -> tuple[Item, ...]:
    items: list[Item] = list(groups.get(BEFORE, ()))
    for new, old in models.items():
        items += [_rename(item, old, new) for item in groups.get(old, ())]
    items += groups.get(BEHIND, ())
    return tuple(items)


def _rename(item: Item, old: int, new: int) -> Item:
    """As of another layer."""
    if isinstance(item, (TargetTensor, SourceTensor)):
        return replace(item, name=_renumber(item.name, old, new))
    if isinstance(item, Fill):
        return replace(item, target=_renumber(item.target, old, new))
    found = LAYER.search(item.source)
    if found and int(found[1]) != old:
        raise ValueError(f"{item.target} is filled from {item.source}, of another layer: trace the whole model.")
    return replace(item, target=_renumber(item.target, old, new), source=_renumber(item.source, old, new))


def _renumber(name: str, old: int, new: int) -> str:
    found = LAYER.search(name)
    return name if old == new or not found else f"{name[: found.start(1)]}{new}{name[found.end(1) :]}"
