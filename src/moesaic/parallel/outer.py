"""The outer FSDP2: every block, then the root, over the dense mesh; and path A, FSDP2 alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.parallel.efsdp import FSDPPlan, set_gradient_sum, set_mixed_gradient_sum
from moesaic.parallel.shard_rules import ParamsOnMesh, build_even_placement_fn, build_mixed_placement_fn
from moesaic.specs import match_names


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in forward order: modules of the classes that the Hugging Face class won't split.

    Raises:
        ValueError: the model declares none, or holds none.
    """
    classes = set(model._no_split_modules or ()) if isinstance(model, PreTrainedModel) else set()
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__}: no module of the classes in _no_split_modules "
            f"({sorted(classes) or 'none declared'}); nothing would be sharded block by block. "
            "Use a Hugging Face model class that declares them."
        )
    return blocks


def find_text_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Those of ``find_blocks`` that belong to the language model: a tower's are sharded too, but no text runs them."""
    inside = set(model.get_decoder().modules())
    return [block for block in find_blocks(model) if block in inside]


def apply_outer_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: FSDPPlan,
    ignored_params: set[nn.Parameter],
    others: Sequence[ParamsOnMesh] = (),
) -> None:
    """``fully_shard`` each block, then the root, over ``mesh`` along dim 0. In place; every rank of the mesh must call.

    It must come before units of experts: FSDP doesn't look below a unit, and what is dense in there (a post-expert
    norm, or the router below one of ``hook_modules``) is the block's.

    Args:
        mesh: ``mp_shard``, or ``(mp_replicate, mp_shard)`` for HSDP; of parameters that tp doesn't split.
        ignored_params: parameters that another FSDP owns, e.g. the experts.
        others: what belongs to the blocks' and the root's units on another mesh: experts, or what tp splits. The plan
            must reduce gradients as sums.
    """
    assert plan.gradient_reduction == "sum", "the units' factors below are those of a sum"
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": plan.mp_policy, "offload_policy": plan.offload_policy}
    common["ignored_params"] = ignored_params
    for other in others:
        assert other.mesh.get_group(other.mesh.ndim - 1) is not mesh.get_group(mesh.ndim - 1), "one mesh, not two"
    if others:
        common["shard_placement_fn"] = build_mixed_placement_fn(others)
    left = {param for other in others for param in other.params}
    blocks = find_blocks(model)
    # A block within a block first; the root's parameters (embedding, final norm, head) are needed again at once in
    # backward: it keeps them.
    for module, reshards in [*((block, plan.reshard_after_forward) for block in reversed(blocks)), (model, False)]:
        own = left.intersection(module.parameters())
        unit = fully_shard(module, reshard_after_forward=reshards, **common)
        left -= own
        if own:
            set_mixed_gradient_sum(unit)
        else:
            set_gradient_sum(unit, mesh)


def replicate_modules(
    model: nn.Module,
    patterns: Sequence[str],
    device_type: str,
    plan: FSDPPlan,
    ignored_params: set[nn.Parameter] | None = None,
) -> set[nn.Parameter]:
    """Keep the modules that the globs name whole on every rank; their gradients are still summed. In place.

    They become FSDP units on a mesh of W replicas of one shard, so that dtypes, reduction and norm are those of every
    other unit. Every rank must call it.

    Args:
        ignored_params: parameters in them that are sharded all the same (experts).

    Returns:
        Their parameters, for the outer FSDP to ignore.

    Raises:
        ValueError: a glob matches nothing, or one of two tied modules, or one inside another, or one that holds experts
            or blocks, or what tp splits.
    """
    if not patterns:
        return set()
    names = dict.fromkeys(name for p in patterns for name in match_names(p, dict(model.named_modules())))
    _refuse_what_is_sharded(model, names, ignored_params or set())
    _refuse_half_of_a_tie(model, names)
    mesh = init_device_mesh(device_type, (dist.get_world_size(), 1), mesh_dim_names=("replica", "whole"))
    ignored, replicated = ignored_params or set(), set[nn.Parameter]()
    for module in map(model.get_submodule, names):
        unit = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=False,
            mp_policy=plan.mp_policy,
            offload_policy=plan.offload_policy,
            ignored_params=ignored,
        )
        set_gradient_sum(unit, mesh)
        replicated.update(set(module.parameters()) - ignored)
    return replicated


def _refuse_what_is_sharded(model: nn.Module, names: Iterable[str], experts: set[nn.Parameter]) -> None:
    """A unit hides what is below it from the units above: experts or blocks in it would be left to nobody."""
    named = list(names)
    inner = set(find_blocks(model)) | {module for module in model.modules() if experts & set(module.parameters(False))}
    for name in named:
        module = model.get_submodule(name)
        if inner & set(module.modules()) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            rule = "it is or holds experts or blocks, which are always sharded"
        elif any(isinstance(param, DTensor) for param in module.parameters()):
            rule = "tp splits it, so no rank can hold it whole"
        elif any(name.startswith(f"{other}.") for other in named):
            rule = "it is inside another module that is named"
        else:
            continue
        raise ValueError(f"fsdp_ignored_modules: {name}: {rule}. Leave it out, or name the parts that are meant.")


def _refuse_half_of_a_tie(model: nn.Module, names: Iterable[str]) -> None:
    """A tied tensor has one owner: with one of its modules in another FSDP unit, the tie would silently end."""
    prefixes = tuple(f"{name}." for name in names)
    every = list(model.named_parameters(remove_duplicate=False))
    inside = {id(param): name for name, param in every if name.startswith(prefixes)}
    for name, param in every:
        if id(param) in inside and not name.startswith(prefixes):
            raise ValueError(
                f"fsdp_ignored_modules: {inside[id(param)]} is tied to {name}, which is sharded. "
                "Leave it out: a tied tensor has one owner."
            )


def apply_fsdp2(model: nn.Module, fsdp_kwargs: Mapping[str, Any]) -> nn.Module:
    """Path A: FSDP2 alone on an unmodified Hugging Face model, each block and then the root. In place.

    Args:
        fsdp_kwargs: passed to ``fully_shard``: ``mesh`` (required), ``mp_policy``, ``reshard_after_forward``, ... The
            default ``shard_placement_fn`` shards the first dim that the mesh's last axis divides, so that stacked
            experts need no padding. Gradients are averaged over the mesh, as ``fully_shard`` does by default.

    Raises:
        ValueError: ``mesh`` is missing, or the model has no blocks.
    """
    if "mesh" not in fsdp_kwargs:
        raise ValueError("fsdp_kwargs: 'mesh' is missing; pass the DeviceMesh to shard over.")
    kwargs = {"shard_placement_fn": build_even_placement_fn(fsdp_kwargs["mesh"].size(-1)), **fsdp_kwargs}
    for block in reversed(find_blocks(model)):  # a block within a block first
        fully_shard(block, **kwargs)
    fully_shard(model, **{**kwargs, "reshard_after_forward": False})
    return model
