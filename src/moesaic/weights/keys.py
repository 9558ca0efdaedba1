"""Which tensors of the Hub's files hold a module's parameter, and where in it each lies. Pure arithmetic, torch-free.

Both directions use one map: a parameter is tiled by ``HubTensor``s. Loading intersects them with the blocks that a rank
holds; exporting writes each of them.

Example (qwen3_moe, 2 experts, I = 4, H = 3): ``model.layers.0.mlp.experts.gate_up_proj`` of shape (2, 8, 3) is tiled by

    key                                              offset     size
    model.layers.0.mlp.experts.0.gate_proj.weight    (0, 0, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.0.up_proj.weight      (0, 4, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.1.gate_proj.weight    (1, 0, 0)  (1, 4, 3)
    model.layers.0.mlp.experts.1.up_proj.weight      (1, 4, 0)  (1, 4, 3)

A rank that holds rows 2..5 of expert 1 reads rows 2..3 of the third and rows 0..1 of the fourth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moesaic.specs import ExpertParam, ModelSpec, match_names

if TYPE_CHECKING:  # a torch-free file: the type is only read
    from moesaic.ops.placements import Block

Layout = Literal["per_expert", "stacked"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensor:
    """One tensor of the Hub's files, and the box of a module's parameter that it fills.

    Attributes:
        key: its name in the files.
        shape: its own shape there.
        offset, size: the box; ``size`` is ``shape``, behind a leading 1 where the tensor is one expert of a stack.
    """

    key: str
    shape: Shape
    offset: Shape
    size: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One slice to read: ``local[dest] = file[key][source]``. ``dest`` may have one leading dim (of 1) more."""

    key: str
    source: tuple[slice, ...]
    dest: tuple[slice, ...]


def find_expert_param(fqn: str, spec: ModelSpec | None) -> ExpertParam | None:
    """The stacked expert parameter that ``fqn`` names, ``None`` for any other parameter."""
    if spec is None:
        return None
    module, _, name = fqn.rpartition(".")
    for param in spec.expert_params:
        if param.name == name and _matches(spec.experts, module):
            return param
    return None


def hub_name(fqn: str, spec: ModelSpec | None) -> str:
    """``fqn`` with the spec's renames: how the Hub calls it."""
    for module_part, hub_part in spec.hub_renames if spec is not None else ():
        fqn = fqn.replace(module_part, hub_part)
    return fqn


def hub_tensors(
    fqn: str, shape: Sequence[int], spec: ModelSpec | None, layout: Layout | None = None
) -> list[HubTensor]:
    """The Hub's tensors that tile parameter ``fqn`` of global ``shape``, in the order of its rows.

    Args:
        layout: how the files hold experts; default: the spec's. Has no effect on other parameters.

    Raises:
        ValueError: the parts of an expert don't divide its rows.
    """
    return list(_tile(fqn, hub_name(fqn, spec), tuple(shape), spec, layout))


def find_hub_tensors(
    fqn: str, shape: Sequence[int], spec: ModelSpec | None, available_keys: Collection[str]
) -> list[HubTensor]:
    """The tiling of ``fqn`` that ``available_keys`` hold: the spec's own, or the other expert layout, or the module's
    names without the spec's renames (both are what other tools write), or under one of the spec's other prefixes. Where
    none is complete, the one with the most keys there, the spec's own at a tie: its missing keys are what a message
    should list."""
    first: Layout = "stacked" if spec is None else spec.hub_layout
    layouts: tuple[Layout, ...] = (first, "per_expert" if first == "stacked" else "stacked")
    if find_expert_param(fqn, spec) is None:
        layouts = layouts[:1]
    best: list[HubTensor] = []
    best_num_there = -1
    names = [hub_name(fqn, spec), fqn]
    for prefix, other in spec.other_prefixes if spec is not None else ():
        names += [other + name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    for name in dict.fromkeys(names):
        for layout in layouts:
            tensors = list(_tile(fqn, name, tuple(shape), spec, layout))
            num_there = sum(tensor.key in available_keys for tensor in tensors)
            if num_there == len(tensors):
                return tensors
            if num_there > best_num_there:
                best, best_num_there = tensors, num_there
    return best


def plan_reads(tensors: Sequence[HubTensor], block: Block) -> list[Read]:
    """The slices that fill one ``block`` of a parameter tiled by ``tensors``. Together they cover it exactly once."""
    reads = []
    for tensor in tensors:
        source, dest = [], []
        for dim in range(len(block.size)):
            start = max(tensor.offset[dim], block.global_offset[dim])
            end = min(tensor.offset[dim] + tensor.size[dim], block.global_offset[dim] + block.size[dim])
            if start >= end:
                break
            source.append(slice(start - tensor.offset[dim], end - tensor.offset[dim]))
            to_local = block.local_offset[dim] - block.global_offset[dim]
            dest.append(slice(start + to_local, end + to_local))
        else:
            num_stacked = len(tensor.size) - len(tensor.shape)
            reads.append(Read(key=tensor.key, source=tuple(source[num_stacked:]), dest=tuple(dest)))
    return reads


def _tile(fqn: str, name: str, shape: Shape, spec: ModelSpec | None, layout: Layout | None) -> Iterator[HubTensor]:
    param = find_expert_param(fqn, spec)
    if spec is None or param is None or (layout or spec.hub_layout) == "stacked":
        yield HubTensor(key=name, shape=shape, offset=(0,) * len(shape), size=shape)
        return
    num_parts = len(param.hub_parts)
    if len(shape) < 2 or shape[1] % num_parts:
        raise ValueError(
            f"{fqn}: {list(shape)} can't be split into experts of {num_parts} equal parts {param.hub_parts}; "
            "an expert parameter is [experts, rows, ...] with rows a multiple of its parts. "
            "Correct ModelSpec.expert_params."
        )
    part_shape = (shape[1] // num_parts, *shape[2:])
    module = name.rpartition(".")[0]
    for expert in range(shape[0]):
        for part, part_name in enumerate(param.hub_parts):
            yield HubTensor(
                key=f"{module}.{expert}.{part_name}",
                shape=part_shape,
                offset=(expert, part * part_shape[0], *(0 for _ in shape[2:])),
                size=(1, *part_shape),
            )


def _matches(pattern: str, name: str) -> bool:
    try:
        return bool(match_names(pattern, [name]))
    except ValueError:  # how match_names says that nothing matched
        return False
