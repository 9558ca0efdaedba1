"""The order of composition, top to bottom; and the way from a checkpoint folder to a model that is ready to train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.kernels import KernelSelection, apply_kernels, select_kernels
from moesaic.meshes import Meshes
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.parallel.activation_checkpointing import apply_activation_checkpointing
from moesaic.parallel.efsdp import FSDPPlan, expert_fully_shard_modules, set_gradient_sum
from moesaic.parallel.experts import ExpertPlan, expert_parallelize_modules, find_expert_modules
from moesaic.parallel.outer import apply_fsdp2, apply_outer_fsdp, find_blocks, replicate_modules
from moesaic.parallel.prefetch import set_prefetch_order
from moesaic.specs import ModelSpec, find_spec, registered_specs
from moesaic.weights.load import load_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a model is parallelized, beside the meshes.

    Attributes:
        expert_parallel: path B (explicit expert parallelism, also at ep 1); False is path A, FSDP2 alone.
        ep_dispatcher: name of the dispatcher (path B).
        storage_dtype: dtype of the sharded parameters, and so of the optimizer's state.
        compute_dtype: dtype of gathered parameters and activations; gradients are reduced in fp32.
        reshard_after_forward: free gathered parameters between forward and backward.
        activation_checkpointing: recompute blocks in backward, with their routing kept.
        fsdp_ignored_modules: globs of modules that are kept whole on every rank (path B); gradients are still summed.
    """

    expert_parallel: bool = True
    ep_dispatcher: str = "eager"
    storage_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    fsdp_ignored_modules: tuple[str, ...] = ()

    @property
    def fsdp_plan(self) -> FSDPPlan:
        """The same policy for experts and dense parameters."""
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        if self.compute_dtype == self.storage_dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        return FSDPPlan(gradient_reduction="sum", mp_policy=policy, reshard_after_forward=self.reshard_after_forward)


def from_pretrained(
    path: str | Path,
    meshes: Meshes,
    *,
    options: ParallelOptions | None = None,
    attn_implementation: str | None = None,
    spec: ModelSpec | None = None,
    kernels: KernelSelection | None = None,
) -> PreTrainedModel:
    """A Hugging Face model from a checkpoint folder, parallelized and loaded. Every rank must call it.

    No rank ever holds the model: it is built on meta, sharded, and each rank then reads only its own slices.

    Args:
        path: folder with ``config.json`` and safetensors.
        options: see ``ParallelOptions``.
        attn_implementation: as in transformers; None picks what transformers' ``from_pretrained`` would pick.
        spec: the family's spec; default: the registered one of the config's ``model_type`` (needed on path B).
        kernels: implementations of operators, see ``select_kernels``; default: ``auto`` for the meshes' device.

    Returns:
        The model in training mode; parameters are DTensors, ``state_dict()`` keys are the Hugging Face module's.

    Raises:
        ValueError: no spec for the family, kernels that match nothing in the model, or a checkpoint that doesn't fit it
            (all keys listed).
    """
    options = options or ParallelOptions()
    model = build_on_meta(path, attn_implementation=attn_implementation, dtype=options.storage_dtype)
    if spec is None and (options.expert_parallel or model.config.model_type in registered_specs()):
        spec = find_spec(model.config.model_type)
    apply_kernels(model, kernels or select_kernels(device_type=meshes.dense.device_type))
    parallelize(model, meshes, spec, options)
    materialize(model, torch.device(meshes.dense.device_type))
    load_weights(model, Path(path), spec)
    return cast(PreTrainedModel, model.train())


def parallelize(
    model: PreTrainedModel, meshes: Meshes, spec: ModelSpec | None = None, options: ParallelOptions | None = None
) -> PreTrainedModel:
    """Shard ``model`` (on meta, or whole and equal on every rank) over ``meshes``. In place; every rank must call it.

    Args:
        spec: the family's spec; default: the registered one (path B; path A needs none).

    Raises:
        ValueError: the model was parallelized before, its family has no spec, or it doesn't fit its spec.
    """
    options = options or ParallelOptions()
    _refuse_parallelized(model)
    ties = find_ties(model)
    blocks = find_blocks(model)
    if options.expert_parallel:
        spec = spec or find_spec(model.config.model_type)
        _apply_path_b(model, meshes, ExpertPlan.from_spec(spec, options.ep_dispatcher), options)
    else:
        _apply_path_a(model, meshes, options.fsdp_plan)
    if options.activation_checkpointing:
        apply_activation_checkpointing(model, blocks)
    _assert_owned(model)
    assert find_ties(model) == ties, "a tie got lost: tied modules must belong to one FSDP unit"
    return model


def _apply_path_b(model: PreTrainedModel, meshes: Meshes, plan: ExpertPlan, options: ParallelOptions) -> None:
    fsdp_plan = options.fsdp_plan
    expert_parallelize_modules(model, meshes.expert["ep"], plan)
    owned = expert_fully_shard_modules(model, meshes.expert_fsdp, plan, fsdp_plan)
    owned |= replicate_modules(model, options.fsdp_ignored_modules, meshes.dense.device_type, fsdp_plan)
    blocks = apply_outer_fsdp(model, meshes.dense_fsdp, fsdp_plan, ignored_params=owned)
    set_prefetch_order(cast(FSDPModule, model), [_units(cast(nn.Module, block)) for block in blocks])


def _apply_path_a(model: PreTrainedModel, meshes: Meshes, fsdp_plan: FSDPPlan) -> None:
    kwargs = {
        "mesh": meshes.dense_fsdp,
        "mp_policy": fsdp_plan.mp_policy,
        "reshard_after_forward": fsdp_plan.reshard_after_forward,
    }
    for unit in _units(apply_fsdp2(model, kwargs)):
        set_gradient_sum(unit, meshes.dense_fsdp)


def _units(module: nn.Module) -> list[FSDPModule]:
    """FSDP units in ``module``, itself first."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def find_ties(model: nn.Module) -> list[list[str]]:
    """Groups of names that stand for one parameter, e.g. embedding and head."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _refuse_parallelized(model: nn.Module) -> None:
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if sharded or find_expert_modules(model):
        raise ValueError(
            f"{type(model).__name__} is already parallelized (e.g. {(sharded or ['experts'])[0]}). "
            "Build the model anew: a model is parallelized once, on one set of meshes."
        )


def _assert_owned(model: nn.Module) -> None:
    """Every parameter belongs to exactly one FSDP unit: none is left plain, none is managed twice."""
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert not plain, f"parameters that no FSDP unit owns: {plain}"
