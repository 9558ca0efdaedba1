"""The gate behind a trace: every element of every parameter is written once, and no parameter is left out, or the plan
would be wrong in silence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.record import Memory, Origin
from moesaic.reshard.strides import Box, Boxes, meet

Entry = tuple[Origin, Box]  # the box: of the parameter; its other memory: where the values are from


def settle(memory: Memory, boxes: Boxes) -> list[Entry]:
    """What a parameter holds in the end, in the order of writing: constants, or copies, that something else overwrote
    are cut away.

    Raises:
        ValueError: elements were never written; or copied from the files twice, so that the order would matter.
    """
    entries = [(part.origin, box) for part in memory.parts for box in boxes.split(part.walk.swap(), memory.shape)]
    never, often = count_gaps([box.ranges for _, box in entries], memory.shape)
    if often:
        entries = _cut_overwritten(memory, entries)
        never, often = count_gaps([box.ranges for _, box in entries], memory.shape)
    assert not often, memory.name
    if never:
        raise ValueError(
            f"the loader leaves {never} of {math.prod(memory.shape)} elements of the engine's {memory.name} unwritten"
            f"{_list_keys(entries)}. A loader skips keys that it doesn't know: give the files' names that it takes."
        )
    return entries


def _cut_overwritten(memory: Memory, entries: Sequence[Entry]) -> list[Entry]:
    """Without what a later entry writes to."""
    kept: list[list[Entry]] = []
    later: list[Entry] = []
    for origin, whole in reversed(entries):
        left = [whole]
        for other_origin, other in later:
            rest = []
            for box in left:
                shared = meet(box.ranges, other.ranges)
                if shared is None:
                    rest.append(box)
                    continue
                if origin.key is not None and other_origin.key is not None:
                    raise ValueError(
                        f"the loader writes elements of the engine's {memory.name} twice, from {origin.key} and from "
                        f"{other_origin.key} of the files. Leave out the key that it shouldn't read."
                    )
                rest += box.without(shared)
            left = rest
        kept.append([(origin, box) for box in left])
        later.append((origin, whole))
    return list(itertools.chain.from_iterable(reversed(kept)))


def require_complete(layout: TargetLayout, targets: Mapping[str, torch.Tensor]) -> None:
    """The layout has every parameter that an engine rank has, in its shape and dtype, and no other: what wasn't planned
    would silently stay as it was. Pure.

    Args:
        layout: of the rank; for one that ``replicate_layers`` made, the only check that it has all layers.
        targets: ``named_parameters()`` of the engine's real model, in its layout while weights are loaded; also on
            meta. One that shares an earlier one's memory (tied weights) may be missing.

    Raises:
        ValueError: otherwise; it names a parameter.
    """
    planned = {tensor.name: tensor for tensor in layout.tensors}
    seen: set[object] = set()
    missing = []
    for name, tensor in targets.items():
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape))
        if name not in planned:
            missing += [name] if place not in seen and tensor.numel() else []
        elif (planned[name].shape, planned[name].dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ValueError(
                f"the layout has {name} as {planned[name].shape} of {planned[name].dtype}, and the engine as "
                f"{tuple(tensor.shape)} of {tensor.dtype}: trace a model of the engine's config."
            )
        seen.add(place)
    unknown = [name for name in planned if name not in targets]
    if missing or unknown:
        raise ValueError(
            f"the layout lacks {len(missing)} of the engine's {len(targets)} parameters ({', '.join(missing[:3])}), "
            f"and has {len(unknown)} that the engine hasn't ({', '.join(unknown[:3])}): replicate all of this rank's "
            "layers."
        )


def count_gaps(boxes: Sequence[Sequence[range]], shape: Sequence[int]) -> tuple[int, int]:
    """How many elements of a tensor of ``shape`` are in none of the boxes, and how many in several. A box is indices
    along each dim. Counted on cells: between neighbouring edges of boxes, all elements are alike."""
    cells = [_find_edges([ranges[dim] for ranges in boxes], size) for dim, size in enumerate(shape)]
    places = [{edge: at for at, edge in enumerate(edges)} for edges in cells]
    counts: npt.NDArray[np.int32] = np.zeros([len(edges) - 1 for edges in cells], dtype=np.int32)
    for ranges in boxes:
        if all(indices.step == 1 for indices in ranges):
            where = zip(places, ranges, strict=True)
            counts[tuple(slice(place[indices.start], place[indices.stop]) for place, indices in where)] += 1
            continue
        chosen = []
        for place, indices in zip(places, ranges, strict=True):
            if indices.step == 1:
                chosen.append(list(range(place[indices.start], place[indices.stop])))
            else:
                chosen.append([place[index] for index in indices])
        counts[np.ix_(*chosen)] += 1
    num_elements = np.ones([], dtype=np.int64)
    for edges in cells:
        num_elements = num_elements[..., None] * np.array([b - a for a, b in itertools.pairwise(edges)], dtype=np.int64)
    return int(num_elements[counts == 0].sum()), int(num_elements[counts > 1].sum())


def _find_edges(ranges: Sequence[range], size: int) -> list[int]:
    """Where boxes begin and end along a dim."""
    edges = {0, size}
    for indices in set(ranges):
        for part in (indices,) if indices.step == 1 else (range(index, index + 1) for index in indices):
            edges |= {part.start, part.stop}
    return sorted(edges)


def _list_keys(entries: Sequence[Entry]) -> str:
    keys = dict.fromkeys(origin.key for origin, _ in entries if origin.key is not None)
    return f" (it copies {', '.join(list(keys)[:3])}{', ...' if len(keys) > 3 else ''} there)" if keys else ""
