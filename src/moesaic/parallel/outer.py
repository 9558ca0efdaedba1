"""The outer FSDP2: every block, then the root, over the dense mesh; and path A, FSDP2 alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from moesaic.parallel.efsdp import FSDPPlan, set_gradient_sum
from moesaic.parallel.shard_rules import build_even_placement_fn
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


def apply_outer_fsdp(
    model: nn.Module, mesh: DeviceMesh, plan: FSDPPlan, ignored_params: set[nn.Parameter]
) -> list[FSDPModule]:
    """``fully_shard`` each block, then the root, over ``mesh`` along dim 0. In place; every rank of the mesh must call.

    Args:
        mesh: ``mp_shard``, or ``(mp_replicate, mp_shard)`` for HSDP.
        ignored_params: parameters that another FSDP owns (the experts).

    Returns:
        The blocks' units, in forward order.
    """
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": plan.mp_policy, "ignored_params": ignored_params}
    blocks = [
        fully_shard(block, reshard_after_forward=plan.reshard_after_forward, **common) for block in find_blocks(model)
    ]
    # The root's parameters (embedding, final norm, head) are needed again at once in backward: it keeps them.
    for unit in (*blocks, fully_shard(model, reshard_after_forward=False, **common)):
        set_gradient_sum(unit, mesh)
    return blocks


def replicate_modules(model: nn.Module, patterns: Sequence[str], device_type: str, plan: FSDPPlan) -> set[nn.Parameter]:
    """Keep the modules that the globs name whole on every rank; their gradients are still summed. In place.

    They become FSDP units on a mesh of W replicas of one shard, so that dtypes, reduction and norm are those of every
    other unit. Every rank must call it; no tensor parallelism (its ranks would count the same tokens again).

    Returns:
        Their parameters, for the outer FSDP to ignore.

    Raises:
        ValueError: a glob matches nothing, or one of two tied modules.
    """
    if not patterns:
        return set()
    names = dict.fromkeys(name for p in patterns for name in match_names(p, dict(model.named_modules())))
    _refuse_half_of_a_tie(model, names)
    mesh = init_device_mesh(device_type, (dist.get_world_size(), 1), mesh_dim_names=("replica", "whole"))
    replicated: set[nn.Parameter] = set()
    for module in map(model.get_submodule, names):
        unit = fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=plan.mp_policy)
        set_gradient_sum(unit, mesh)
        replicated.update(module.parameters())
    return replicated


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
    for block in find_blocks(model):
        fully_shard(block, **kwargs)
    fully_shard(model, **{**kwargs, "reshard_after_forward": False})
    return model
