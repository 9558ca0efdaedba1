"""Adapter to transformers' own rules of how files name and store a model's tensors: no other file touches those.

transformers describes each family by renamings and converters, objects that it runs on tensors, forwards to load and
backwards to save. Here the same objects are run on ``Grid``s: every operation that occurs in a family at the experts
seam moves whole ranges along single dims, so which slice of which file fills what follows without any data.

Everything is asked of a twin: a model of the same classes, as they were before FSDP derived others from them, with the
same names and global shapes on meta, and nothing else. So a parallelized model and one on meta give the same answers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping

from moesaic.weights.agree import plain_name
from moesaic.weights.tiles import Grid, MisfitError, Shape, concatenate, interleave, stack

# Families whose files on the Hub hold experts stacked, though transformers would write them one by one.
STACKED_ON_HUB = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})

Grids = dict[str, list[Grid]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """What a set of tensors is to a model.

    Attributes:
        grids: parameter or buffer (under each of its names) -> the tiles that fill it.
        unused: key that fills nothing -> its name by the model's renamings.
        problems: what doesn't fit, a line each.
        broken: names that a problem speaks of.
    """

    grids: dict[str, Grid]
    unused: dict[str, str]
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Group:
    """The tensors that one converter (or none) makes one parameter of: source pattern -> tensors in their order."""

    converter: loading.WeightConverter | None
    parts: Grids


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class of a module before FSDP derived one of its own from it."""
    return cast(type[nn.Module], next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)))


def derive_grids(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> Derivation:
    """What tensors of these keys and ``shapes`` fill in ``model``, by transformers' own mapping of it; keys under the
    module's own names are taken as well. Pure: the same on every rank. Seconds for 100,000 keys."""
    twin = build_twin(model)
    transforms = get_model_conversion_mapping(twin)
    renamings = [transform for transform in transforms if isinstance(transform, loading.WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, loading.WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    state, prefix = twin.state_dict(), twin.base_model_prefix
    derivation = Derivation(grids={}, unused={})
    groups: dict[str, _Group] = {}
    for key in sorted(shapes, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            derivation.unused[key] = name
            continue
        converter = None if pattern is None else converter_of[pattern]
        group = groups.setdefault(name, _Group(converter, defaultdict(list)))
        if group.converter is not converter or (converter is None and group.parts):
            other = next(iter(group.parts.values()))[0].tiles[0].key
            derivation.problems.append(f"twice: {key} fills {name}, and so does {other}")
            derivation.broken.add(name)
            continue
        group.parts[pattern or key].append(Grid.whole(key, shapes[key]))
    for name, group in groups.items():
        _fill(name, group, twin, derivation)
    return derivation


def derive_default_grids(
    model: PreTrainedModel, names: Iterable[str], *, is_per_expert: bool = False
) -> tuple[dict[str, Grid], dict[str, Shape]]:
    """How an export holds the tensors ``names`` of ``model``: grids, and the shapes of the files' tensors. As
    transformers would write a model made as this one was, but stacked where the Hub's files are.

    Args:
        is_per_expert: expert by expert wherever the family's mapping has names for that, whatever the Hub's files hold.

    Raises:
        ValueError: the tensors that would be written don't give the model back.
    """
    twin = build_twin(model)
    conversions = vars(model).get("_weight_conversions")  # of a model that transformers loaded
    if is_per_expert:
        conversions = None
    elif conversions is None and model.config.model_type in STACKED_ON_HUB:
        conversions = [each for each in get_model_conversion_mapping(twin, add_legacy=False) if _is_kept_stacked(each)]
    if conversions is not None:
        cast(Any, twin)._weight_conversions = conversions
    chosen = set(names)
    state = {name: tensor for name, tensor in twin.state_dict().items() if name in chosen}
    shapes = {key: tuple(t.shape) for key, t in loading.revert_weight_conversion(twin, state).items()}
    derivation = derive_grids(model, shapes)
    wrong = [*derivation.problems, *(f"{key} fills nothing" for key in derivation.unused)]
    wrong += [f"nothing fills {name}" for name in state if name not in derivation.grids]
    if wrong:
        raise ValueError(
            f"{type(model).__name__} can't be exported: read back, what transformers' mapping for "
            f"model_type={model.config.model_type!r} writes doesn't fit. Correct that mapping. " + "; ".join(wrong[:5])
        )
    return derivation.grids, shapes


def has_mapping(model: PreTrainedModel) -> bool:
    """Whether transformers knows how files name the tensors of this model: it is one of its own, or someone registered
    a mapping for it (``transformers.conversion_mapping.register_checkpoint_conversion_mapping``)."""
    twin = build_twin(model)
    model_type = twin.config.model_type
    if any(get_checkpoint_conversion_mapping(name) is not None for name in (type(twin).__name__, model_type)):
        return True
    # Without a mapping, one of transformers' own has its modules' names in its files.
    return not twin.is_custom_code() and type(twin).config_class.model_type == model_type


def build_twin(model: PreTrainedModel) -> PreTrainedModel:
    """``model``'s classes, names and global shapes, on meta; it can't compute."""
    twin = _bare(model)
    for name, module in model.named_modules():
        if plain_name(name) and isinstance(module, PreTrainedModel):
            _attach(twin, plain_name(name), _bare(module))
    for name, tensor in model.state_dict(keep_vars=True).items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        _attach(twin, plain_name(name), nn.Parameter(empty, requires_grad=False))
    return twin


def _bare(model: PreTrainedModel) -> PreTrainedModel:
    cls = cast(Any, original_class(model))
    bare: PreTrainedModel = cls.__new__(cls)
    nn.Module.__init__(bare)
    bare.config = model.config
    return bare


def _attach(root: nn.Module, path: str, value: nn.Module | nn.Parameter) -> None:
    *parents, last = path.split(".")
    module = root
    for name in parents:
        if name not in module._modules:
            setattr(module, name, nn.Module())
        module = cast(nn.Module, module._modules[name])
    setattr(module, last, value)


def _is_kept_stacked(transform: loading.WeightTransform) -> bool:
    """Not a converter that stacks experts, and not a prefix that only some folders have."""
    if isinstance(transform, loading.WeightConverter):
        return not any(isinstance(operation, loading.MergeModulelist) for operation in transform.operations)
    return not isinstance(transform, loading.PrefixChange)


def _fill(name: str, group: _Group, twin: PreTrainedModel, derivation: Derivation) -> None:
    """Run the group's converter and add what it gives, or the problem."""
    problems: list[str] = []
    result: dict[str, Grid] = {}
    if group.converter is None:
        result[name] = next(iter(group.parts.values()))[0]
    else:
        problems = _number_problems(name, group, twin)
        try:
            if not problems:
                result = _convert(name, group, twin)
        except MisfitError as error:
            problems = [f"shape: {error}, for {name} {list(twin.get_parameter(name).shape)}"]
    for target, grid in result.items():
        shape = tuple(twin.get_parameter(target).shape)
        if grid.shape == shape:
            grid.assert_covered()
            derivation.grids[target] = grid
            continue
        key = grid.tiles[0].key
        many = f" of {len(grid.tiles)} parts" if len(grid.tiles) > 1 else ""
        problems.append(f"shape: {key} is {list(grid.shape)}{many}, {target} needs {list(shape)}")
        derivation.broken.add(target)
    derivation.problems.extend(problems)
    derivation.broken.update([name] if problems else [])


def _number_problems(name: str, group: _Group, twin: PreTrainedModel) -> list[str]:
    """Experts that are missing, or of another shape than the rest. transformers takes them in the order of their
    numbers, whatever these are; here they must be 0, 1, 2, ... up to what the parameter holds."""
    assert group.converter is not None
    first = group.converter.operations[0]
    match first:
        case loading.MergeModulelist(dim=dim):
            expected = twin.get_parameter(name).shape[dim]
        case loading.ErnieFuseAndSplitTextVisionExperts(stack_dim=dim):
            targets = group.converter.target_patterns
            names = [name.replace(targets[0], target) for target in targets]
            expected = sum(twin.get_parameter(each).shape[dim] for each in names)
        case _:
            return []
    problems = []
    is_uniform = isinstance(first, loading.MergeModulelist)  # Ernie's text and vision experts differ in size
    for pattern, parts in group.parts.items():
        usual = Counter(part.shape for part in parts).most_common(1)[0][0]
        keys = [part.tiles[0].key for part in parts]
        problems += [
            f"shape: {key} is {list(part.shape)}, {name} needs {list(usual)}"
            for key, part in zip(keys, parts, strict=True)
            if is_uniform and part.shape != usual
        ]
        for absent in set(group.converter.source_patterns) - set(group.parts):
            end, other_end = (each.rpartition("*")[2].replace("\\", "") for each in (pattern, absent))
            others = [f"{key.removesuffix(end)}{other_end}" for key in keys]
            problems += [f"missing: {key} {list(usual)} (for {name})" for key in others]
        template, numbers = _numbers(keys)
        lost = [number for number in range(expected) if number not in numbers]
        problems += [f"missing: {template.format(number)} {list(usual)} (for {name})" for number in lost]
        extra = [number for number in numbers if number >= expected]
        problems += [f"unknown: {template.format(number)} {list(usual)} fills nothing" for number in extra]
    return problems


def _numbers(keys: Sequence[str]) -> tuple[str, list[int]]:
    """``a.{}.b`` and [0, 2] of ``a.0.b``, ``a.2.b``. The last number of a key that stands alone is the expert's."""
    split = [key.split(".") for key in keys]
    differing = [i for i, values in enumerate(zip(*split, strict=False)) if len(set(values)) > 1]
    places = differing or [i for i, value in enumerate(split[0]) if value.isdigit()][-1:]
    if len(places) != 1 or not all(parts[places[0]].isdigit() for parts in split):
        return "{}", list(range(len(keys)))
    place = places[0]
    return ".".join([*split[0][:place], "{}", *split[0][place + 1 :]]), [int(parts[place]) for parts in split]


def _convert(name: str, group: _Group, twin: PreTrainedModel) -> dict[str, Grid]:
    """Run the converter's operations; the results under their full names, as transformers spells them out."""
    assert group.converter is not None
    grids: Grids = dict(group.parts)
    for operation in group.converter.operations:
        grids = _run(operation, grids, group.converter, twin, name)
    before, _, after = next(name.partition(key) for key in grids if key in name)
    return {before + key + after: parts[0] for key, parts in grids.items()}


def _run(
    operation: loading.ConversionOps,
    grids: Grids,
    converter: loading.WeightConverter,
    twin: PreTrainedModel,
    name: str,
) -> Grids:
    """What one operation's ``convert`` gives, under the patterns that it would choose."""
    sources, targets = converter.source_patterns, converter.target_patterns
    first = next(iter(grids.values()))[0]
    match operation:
        case loading.MergeModulelist(dim=dim):
            return {(targets[0] if len(grids) == 1 else key): [stack(parts, dim)] for key, parts in grids.items()}
        case loading.Concatenate(dim=dim):
            return {targets[0]: [concatenate([part for source in sources for part in grids.get(source, [])], dim)]}
        case loading.Chunk(dim=dim):
            size = -(-first.shape[dim] // len(targets))
            return _cut(first, dim, targets, [size] * len(targets))
        case loading.Split(dim=dim):
            whole = [twin.get_parameter(name.replace(targets[0], target)) for target in targets]
            return _cut(first, dim, targets, [part.shape[dim] for part in whole])
        case loading.Interleave(dim=dim, inverse=inverse):
            return {targets[0]: [interleave(first, dim, inverse=inverse)]}
        case loading.Transpose(dim0=a, dim1=b, check_dims=check_dims):
            as_it_is = check_dims and first.shape == tuple(twin.get_parameter(name).shape)
            key = targets[0] if len(targets) == 1 else sources[0]
            return {key: [first if as_it_is else first.transpose(a, b)]}
        case loading.ErnieFuseAndSplitTextVisionExperts(stack_dim=stack_dim, concat_dim=concat_dim):
            halves = {source: operation.split_list_into_chunks(grids[source], len(targets)) for source in sources}
            return {
                target: [concatenate([stack(halves[source][i], stack_dim) for source in sources], concat_dim)]
                for i, target in enumerate(targets)
            }
        case loading.PermuteForRope():
            return {
                operation.get_target_pattern(key, sources, targets): [_permute_for_rope(operation, key, parts[0], twin)]
                for key, parts in grids.items()
            }
    raise MisfitError(f"transformers converts {first.tiles[0].key} by {type(operation).__name__}, which isn't known")


def _cut(grid: Grid, dim: int, targets: Sequence[str], sizes: Sequence[int]) -> Grids:
    result, start = {}, 0
    for target, size in zip(targets, sizes, strict=True):
        end = min(start + size, grid.shape[dim])
        result[target] = [grid.cut(dim, range(start, end))]
        start = end
    return result


def _permute_for_rope(operation: loading.PermuteForRope, key: str, grid: Grid, twin: PreTrainedModel) -> Grid:
    """Rows of each head from pairs to halves, or back."""
    names = operation.permute_layer_names
    if names is not None and not any(name in key for name in names):
        return grid
    config = twin.config if operation.subconfig_key is None else getattr(twin.config, operation.subconfig_key)
    size = grid.shape[0] // config.num_attention_heads
    heads = [grid.cut(0, range(start, start + size)) for start in range(0, grid.shape[0], size)]
    return concatenate([interleave(head, 0, inverse=operation.inverse) for head in heads], 0)
