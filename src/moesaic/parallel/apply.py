"""The order of composition, top to bottom; and the way from a checkpoint folder to a model that is ready to train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.kernels import KernelSelection, apply_kernels, select_kernels
from moesaic.meshes import Meshes
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.model.value_head import build_value_model_on_meta
from moesaic.parallel.activation_checkpointing import apply_activation_checkpointing
from moesaic.parallel.context import apply_context_parallel
from moesaic.parallel.efsdp import (
    FSDPPlan,
    expert_fully_shard_modules,
    find_experts_params,
    set_gradient_sum,
    set_mixed_gradient_sum,
)
from moesaic.parallel.experts import ExpertPlan, expert_parallelize_modules, find_expert_modules
from moesaic.parallel.freeze import freeze_modules
from moesaic.parallel.linear_attention import apply_linear_attention_parallel
from moesaic.parallel.outer import apply_fsdp2, apply_outer_fsdp, find_text_blocks, replicate_modules
from moesaic.parallel.prefetch import set_prefetch_order
from moesaic.parallel.shard_rules import (
    ParamsOnMesh,
    build_even_placement_fn,
    build_expert_placement_fn,
    build_free_placement_fn,
    build_mixed_placement_fn,
)
from moesaic.parallel.tensor import apply_tensor_parallel, find_split_params
from moesaic.parallel.units import list_units
from moesaic.specs import ModelSpec, find_spec, refusal
from moesaic.weights.load import load_weights
from moesaic.weights.value_head import find_value_head


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a model is parallelized, beside the meshes.

    Attributes:
        expert_parallel: path B (explicit expert parallelism, also at ep 1); False is path A, FSDP2 alone.
        ep_dispatcher: name of the dispatcher (path B).
        storage_dtype: dtype of the sharded parameters, and so of the optimizer's state. All of them: FSDP2 wants one
            dtype in a unit, also where a family keeps some in fp32.
        compute_dtype: dtype of gathered parameters and activations; gradients are reduced in fp32.
        reshard_after_forward: free gathered parameters between forward and backward.
        activation_checkpointing: recompute blocks in backward, with their routing kept.
        exchanged_tokens: what was sent to experts and back is kept for recomputation too, or sent again.
        offload: shards, their gradients and the optimizer's state stay on the host.
        fsdp_implementation: experts are units of their own, or belong to their block's unit, on a mesh of their own
            (path B).
        hook_modules: globs of modules around the experts whose forward gathers them; empty: the experts' own (path B,
            ``native``).
        fsdp_ignored_modules: globs of modules that are kept whole on every rank (path B); gradients are still summed.
        frozen_modules: globs of modules that are not trained.
        cp_mode: how the ranks of a cp group share attention.
    """

    expert_parallel: bool = True
    ep_dispatcher: str = "eager"
    storage_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    exchanged_tokens: Literal["keep", "recompute"] = "keep"
    offload: bool = False
    fsdp_implementation: Literal["native", "custom"] = "native"
    hook_modules: tuple[str, ...] = ()
    fsdp_ignored_modules: tuple[str, ...] = ()
    frozen_modules: tuple[str, ...] = ()
    cp_mode: str = "ulysses"

    def __post_init__(self) -> None:
        """Raise a ValueError for an option that nothing would look at."""
        path_b = {
            "exchanged_tokens": self.exchanged_tokens != "keep",
            "fsdp_implementation": self.fsdp_implementation != "native",
            "hook_modules": self.hook_modules,
            "fsdp_ignored_modules": self.fsdp_ignored_modules,
        }
        unread = [name for name, is_set in path_b.items() if is_set and not self.expert_parallel]
        if unread:
            raise ValueError(f"{', '.join(unread)}: for expert_parallel=True only; remove, or set that.")
        if self.exchanged_tokens == "recompute" and not self.activation_checkpointing:
            raise ValueError(
                "exchanged_tokens='recompute' needs activation_checkpointing=True; remove it, or set that."
            )

    def fsdp_plan(self, device_type: str) -> FSDPPlan:
        """The same policy for experts and dense parameters."""
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        if self.compute_dtype == self.storage_dtype == torch.float32:
            policy = MixedPrecisionPolicy()
        # Copies between pinned memory and an accelerator overlap with computation; on CPU there is nothing to pin for.
        offloads = CPUOffloadPolicy(pin_memory=device_type != "cpu") if self.offload else OffloadPolicy()
        return FSDPPlan(
            gradient_reduction="sum",
            mp_policy=policy,
            reshard_after_forward=self.reshard_after_forward,
            offload_policy=offloads,
        )


def from_pretrained(
    path: str | Path,
    meshes: Meshes,
    *,
    options: ParallelOptions | None = None,
    attn_implementation: str | None = None,
    spec: ModelSpec | None = None,
    kernels: KernelSelection | None = None,
    value_head: Literal["new", "trained"] | None = None,
) -> PreTrainedModel:
    """A Hugging Face model from a checkpoint folder, parallelized and loaded. Every rank must call it.

    No rank ever holds the model: it is built on meta, sharded, and each rank then reads only its own slices.

    Args:
        path: folder with ``config.json`` and safetensors.
        options: see ``ParallelOptions``.
        attn_implementation: as in transformers; None picks what transformers' ``from_pretrained`` would pick.
        spec: the family's spec (path B); default: ``find_spec`` of the config's ``model_type``.
        kernels: implementations of operators, see ``select_kernels``; default: ``auto`` for the meshes' device.
        value_head: for a value model (``build_value_model_on_meta``): its head is the folder's ``score``, which must be
            there (``trained``), or is 0 where it isn't (``new``).

    Returns:
        The model in training mode; parameters are DTensors, ``state_dict()`` keys are the Hugging Face module's.

    Raises:
        ValueError: a family that path B can't train, kernels that match nothing in the model, or a checkpoint that
            doesn't fit it (all keys listed).
    """
    options = options or ParallelOptions()
    if value_head is None:
        model = build_on_meta(path, attn_implementation=attn_implementation, dtype=options.storage_dtype)
    else:
        model = build_value_model_on_meta(
            path,
            attn_implementation=attn_implementation,
            dtype=options.storage_dtype,
            has_bias="bias" in find_value_head(path, is_required=value_head == "trained"),
        )
    apply_kernels(model, kernels or select_kernels(device_type=meshes.dense.device_type))
    parallelize(model, meshes, spec, options)
    give_storage(model, meshes, options)
    load_weights(model, Path(path))
    return cast(PreTrainedModel, model.train())


def give_storage(model: PreTrainedModel, meshes: Meshes, options: ParallelOptions) -> None:
    """``materialize`` a parallelized model, in place: on its device; where it is offloaded, its shards on the host."""
    device = torch.device(meshes.dense.device_type)
    materialize(model, torch.device("cpu") if options.offload else device)
    for module in model.modules() if options.offload else ():  # buffers are whole, and used where the forward runs
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), name not in module._non_persistent_buffers_set)


def parallelize(
    model: PreTrainedModel, meshes: Meshes, spec: ModelSpec | None = None, options: ParallelOptions | None = None
) -> PreTrainedModel:
    """Shard ``model`` (on meta, or whole and equal on every rank) over ``meshes``. In place; every rank must call it.

    Args:
        spec: the family's spec (path B); default: ``find_spec`` of the config's ``model_type``.

    Raises:
        ValueError: the model was parallelized before; path B can't train its family; it has no experts, or its experts
            don't fit ``ep`` or the spec; attention or matrices that cp or tp can't share.
    """
    options = options or ParallelOptions()
    _refuse_parallelized(model)
    _cast_parameters(model, options.storage_dtype)
    freeze_modules(model, options.frozen_modules)
    if meshes.sequence.size() > 1:
        apply_context_parallel(model, meshes, options.cp_mode)
        apply_linear_attention_parallel(model, meshes.sequence)
    ties = find_ties(model)
    blocks = find_text_blocks(model)
    if options.expert_parallel:
        _refuse_family(model.config.model_type)
        spec = spec or find_spec(model.config.model_type)
        _apply_path_b(model, meshes, ExpertPlan.from_spec(spec, options.ep_dispatcher), options, blocks)
    else:
        _apply_path_a(model, meshes, options.fsdp_plan(meshes.dense.device_type), blocks)
    if options.activation_checkpointing:
        apply_activation_checkpointing(model, blocks, keeps_tokens=options.exchanged_tokens == "keep")
    _assert_owned(model)
    assert find_ties(model) == ties, "a tie got lost: tied modules must belong to one FSDP unit"
    return model


def _apply_path_b(
    model: PreTrainedModel, meshes: Meshes, plan: ExpertPlan, options: ParallelOptions, blocks: Sequence[nn.Module]
) -> None:
    if options.fsdp_implementation == "custom" and (meshes.sizes.ep_size == 1 or options.hook_modules):
        raise ValueError(
            "fsdp_implementation=custom: a block's one unit holds its experts, on a mesh of their own. It takes an "
            "ep_size of at least 2 and no hook_modules; otherwise choose native."
        )
    device_type, patterns = meshes.dense.device_type, options.fsdp_ignored_modules
    fsdp_plan = options.fsdp_plan(device_type)
    expert_parallelize_modules(model, meshes.expert["ep"], plan)
    experts = find_experts_params(model, plan)
    split = _apply_tensor_parallel(model, meshes, blocks)
    replicated = replicate_modules(model, patterns, device_type, fsdp_plan, ignored_params=experts)
    if options.fsdp_implementation == "custom":
        place = build_expert_placement_fn(meshes.expert_fsdp.size(-1))
        mixed = ParamsOnMesh(params=experts, mesh=meshes.expert_fsdp, place=place)
        apply_outer_fsdp(model, meshes.unsplit_fsdp, fsdp_plan, ignored_params=replicated, others=[*split, mixed])
    else:
        apply_outer_fsdp(model, meshes.unsplit_fsdp, fsdp_plan, ignored_params=replicated | experts, others=split)
        expert_fully_shard_modules(model, meshes.expert_fsdp, plan, fsdp_plan, options.hook_modules)
    set_prefetch_order(cast(FSDPModule, model), [_units(block) for block in blocks])


def _apply_tensor_parallel(model: PreTrainedModel, meshes: Meshes, blocks: Sequence[nn.Module]) -> list[ParamsOnMesh]:
    """What tp splits, and the mesh over which FSDP shards it further; nothing without tp."""
    if meshes.sizes.tp_size == 1:
        return []
    tp_mesh = meshes.dense["tp"]
    apply_tensor_parallel(model, tp_mesh, blocks)
    place = build_free_placement_fn(meshes.sizes.mp_shard_size)
    return [ParamsOnMesh(params=find_split_params(model, tp_mesh), mesh=meshes.dense_fsdp, place=place)]


def _apply_path_a(model: PreTrainedModel, meshes: Meshes, fsdp_plan: FSDPPlan, blocks: Sequence[nn.Module]) -> None:
    split = _apply_tensor_parallel(model, meshes, blocks)
    mesh = meshes.unsplit_fsdp
    kwargs = {
        "mesh": mesh,
        "shard_placement_fn": build_mixed_placement_fn(split, build_even_placement_fn(mesh.size(-1))),
        "mp_policy": fsdp_plan.mp_policy,
        "reshard_after_forward": fsdp_plan.reshard_after_forward,
        "offload_policy": fsdp_plan.offload_policy,
    }
    for unit in _units(apply_fsdp2(model, kwargs)):
        if split:
            set_mixed_gradient_sum(unit)
        else:
            set_gradient_sum(unit, mesh)


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


def _refuse_family(model_type: str) -> None:
    reason = refusal(model_type)
    if reason is not None:
        raise ValueError(
            f"model_type={model_type!r} can't be trained with expert parallelism: {reason}. Use FSDP2 alone "
            "(expert_parallel=False), or another model."
        )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter to ``dtype``, in place, ties kept. Not buffers: they aren't sharded."""
    for param in model.parameters():
        if param.is_floating_point() and param.dtype != dtype:
            param.data = param.data.to(dtype)


def _assert_owned(model: nn.Module) -> None:
    """Every parameter belongs to exactly one FSDP unit: none is left plain, none is managed twice."""
    num_owners = Counter(row.name for row in list_units(model))
    wrong = {name: num_owners[name] for name, _ in model.named_parameters() if num_owners[name] != 1}
    assert not wrong, f"parameters and the number of FSDP units that own them: {wrong}"
