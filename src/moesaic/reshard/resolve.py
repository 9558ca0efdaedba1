"""From the files' keys, in which an engine's loader was traced, to the trained model's parameters.

Grids (``weights/tiles.py``) say which slice of which key each part of a parameter is. Here they are turned around.
Example: a loader copies rows 2..3 of ``experts.1.up_proj.weight`` [4, 3]. The parameter ``experts.gate_up_proj`` (2, 8,
3) has that key at offset (1, 4, 0), so the copy is of its ``[1, 6:8, :]``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from moesaic.reshard.coverage import count_gaps
from moesaic.reshard.layout import Copy, Shape, SourceTensor, TargetLayout
from moesaic.reshard.lift import lift_copies
from moesaic.reshard.record import holds
from moesaic.reshard.strides import meet
from moesaic.weights.tiles import Grid, Tile

Places = Sequence[tuple[str, Tile]]  # a parameter, and a part of it that holds a part of a key
Part = tuple[str, Tile, tuple[range, ...]]  # ... and the key's indices that a copy takes of it


def resolve_layout(
    layout: TargetLayout, grids: Mapping[str, Grid], shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> TargetLayout:
    """``layout`` with the trained model's tensors as sources; runs of equal copies lifted again. Pure.

    Args:
        layout: as ``trace_loader`` returns it.
        grids: parameter -> its tiles; shapes: key -> shape in the files: as ``weights.export.find_layout`` returns
            them. Of parameters that share a key (tied weights), the first that holds all of a copy is its source.
        dtypes: parameter -> dtype in the files, as ``weights.export.file_dtypes`` returns them.

    Raises:
        ValueError: the parameters don't hold a key, or not all that is copied of it, or a part of it twice; the loader
            was traced with another shape of a key, or with a dtype that doesn't hold its values: it may then round
            them where nothing was seen to be rounded.
    """
    places: dict[str, list[tuple[str, Tile]]] = defaultdict(list)
    for name, grid in grids.items():
        for tile in grid.tiles:
            places[tile.key].append((name, tile))
    traced = {source.name: source for source in layout.sources}
    for key, target in {copy.source: copy.target for copy in layout.copies}.items():
        if key not in places:
            raise ValueError(
                f"{target} is loaded from {key}, which no parameter of the trained model is exported to. Give the "
                "loader the keys that the model's export has."
            )
        _require_as_traced(key, traced.get(key), shapes[key], {name: dtypes[name] for name, _ in places[key]})
    copies: list[Copy] = []
    for copy in layout.copies:
        copies += _resolve(copy, places[copy.source])
    return replace(
        layout,
        copies=lift_copies(copies),
        sources=tuple(
            SourceTensor(name=name, shape=grids[name].shape, dtype=dtypes[name])
            for name in dict.fromkeys(copy.source for copy in copies)
        ),
    )


def _require_as_traced(key: str, traced: SourceTensor | None, shape: Shape, dtypes: Mapping[str, torch.dtype]) -> None:
    if traced is None:
        raise ValueError(f"the layout copies {key} and doesn't say its shape: resolve what trace_loader returned.")
    if traced.shape != tuple(shape):
        raise ValueError(
            f"the loader was traced with {key} of shape {traced.shape}, and the trained model's export has it as "
            f"{tuple(shape)}: what lies beyond would never arrive. Trace it with the export's shapes."
        )
    for name, dtype in dtypes.items():
        if not holds(traced.dtype, dtype):
            raise ValueError(
                f"the loader was traced with {key} as {traced.dtype}, and {name} is exported as {dtype}: what it "
                "rounds isn't known. Trace it with the export's dtypes (weights.export.file_dtypes)."
            )


def _resolve(copy: Copy, places: Places) -> list[Copy]:
    """The copy in parts, one for each tile that it meets."""
    wanted = [range(start, start + 1) for start in copy.source_start]
    for size, dim, step in zip(copy.shape, copy.source_dims, copy.source_steps, strict=True):
        if dim is not None:
            wanted[dim] = range(wanted[dim].start, wanted[dim].start + step * (size - 1) + 1, step)
    found: dict[str, list[Part]] = defaultdict(list)
    for name, tile in places:
        shared = meet(wanted, tile.source)
        if shared is not None:
            found[name].append((name, tile, shared))
    everything = [part for some in found.values() for part in some]
    # One parameter that holds all; or a key that is put together from several.
    for parts in (*found.values(), everything):
        never, often = _count(wanted, parts)
        if often:
            raise ValueError(
                f"{copy.target} is loaded from {copy.source}, of which {sorted({name for name, _, _ in parts})} hold "
                f"{often} elements twice: which of them the engine is to get isn't known. Give the trained model's "
                "parameters once."
            )
        if not never:
            return [_cut(copy, wanted, shared, name, tile) for name, tile, shared in parts]
    raise ValueError(
        f"{copy.target} is loaded from {copy.source}; the parameters {sorted({name for name, _ in places})} of the "
        f"trained model lack {never} elements of what it reads. Give the loader the shapes of the model's export."
    )


def _count(wanted: Sequence[range], parts: Sequence[Part]) -> tuple[int, int]:
    """How many of the wanted elements are in none of the parts, and how many in several."""
    if len(parts) == 1 and parts[0][2] == tuple(wanted):
        return 0, 0
    boxes = [
        [
            range(all_of.index(some[0]), all_of.index(some[-1]) + 1, some.step // all_of.step)
            for all_of, some in zip(wanted, shared, strict=True)
        ]
        for _, _, shared in parts
    ]
    return count_gaps(boxes, [len(indices) for indices in wanted])


def _cut(copy: Copy, wanted: list[range], shared: tuple[range, ...], name: str, tile: Tile) -> Copy:
    """The part of ``copy`` at the indices ``shared`` of its key, which the tile holds, in the tile's parameter."""
    start = list(tile.offset)
    walkers: dict[int, tuple[int, int]] = {}  # dim of the key -> dim of the parameter, step there
    for dim, (own, indices) in enumerate(zip(tile.dims, tile.ranges, strict=True)):
        if own is not None:
            start[dim] += (shared[own].start - indices.start) // indices.step
            walkers[own] = (dim, shared[own].step // indices.step)
    offset = copy.target_offset
    loops: list[tuple[int, int | None, int, int]] = []
    for size, own, _, stride in zip(copy.shape, copy.source_dims, copy.source_steps, copy.target_strides, strict=True):
        if own is None:
            loops.append((size, None, 1, stride))
            continue
        indices = shared[own]
        offset += (indices.start - wanted[own].start) // wanted[own].step * stride
        if len(indices) > 1:
            loops.append((len(indices), *walkers[own], indices.step // wanted[own].step * stride))
    return Copy(
        source=name,
        target=copy.target,
        shape=tuple(size for size, _, _, _ in loops),
        source_start=tuple(start),
        source_dims=tuple(dim for _, dim, _, _ in loops),
        source_steps=tuple(step for _, _, step, _ in loops),
        target_offset=offset,
        target_strides=tuple(stride for _, _, _, stride in loops),
    )


def replay(layout: TargetLayout, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets, filled as ``layout`` says from whole tensors: what any other way of moving them has to give. One
    process; values are cast to the target's dtype.

    Args:
        sources: what the copies name: tensors of the files, or whole parameters of the trained model.

    Returns:
        name -> contiguous tensor, on the device of the first source.
    """
    device = next((tensor.device for tensor in sources.values()), torch.device("cpu"))
    targets = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in layout.tensors}
    for fill in layout.fills:
        torch.as_strided(targets[fill.target], fill.shape, fill.target_strides, fill.target_offset).fill_(fill.value)
    for copy in layout.copies:
        part = cut_source(copy, sources[copy.source])
        torch.as_strided(targets[copy.target], copy.shape, copy.target_strides, copy.target_offset).copy_(part)
    return targets


def cut_source(copy: Copy, source: torch.Tensor) -> torch.Tensor:
    """The elements of a whole source that ``copy`` takes: a view of shape ``copy.shape``."""
    index: list[int | slice] = list(copy.source_start)
    walked = []
    for size, dim, step in zip(copy.shape, copy.source_dims, copy.source_steps, strict=True):
        if dim is not None:
            start = copy.source_start[dim]
            index[dim] = slice(start, start + step * (size - 1) + 1, step)
            walked.append(dim)
    part = source[tuple(index)].permute([sorted(walked).index(dim) for dim in walked])
    for at, dim in enumerate(copy.source_dims):
        part = part.unsqueeze(at) if dim is None else part
    return part.expand(copy.shape)
