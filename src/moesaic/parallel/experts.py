"""Expert parallelism: experts split over the EP ranks, and the dispatcher at transformers' experts seam.

transformers calls a registered function as an experts module's forward, chosen by name in that module's config. Ours is
registered once; which dispatcher it uses is a value kept on each experts module, so two models with different meshes
live in one process, and neither model code nor the router is touched.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.config.parallel import ep_size_problem
from moesaic.dispatch import Dispatcher, build_dispatcher
from moesaic.model.seam import DOWN, find_experts, num_experts, stacked_params, up_name
from moesaic.ops.grouped_mm import grouped_linear
from moesaic.specs import ModelSpec

EXPERTS_FUNCTION = "moesaic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Which experts to split, and how tokens reach them.

    Attributes:
        modules: glob of the experts modules, ``*`` standing for one path segment; None: every module at transformers'
            experts seam.
        dispatcher: name of the dispatcher.
    """

    modules: str | None = None
    dispatcher: str = "eager"

    @classmethod
    def from_spec(cls, spec: ModelSpec, dispatcher: str = "eager") -> ExpertPlan:
        """The plan of a model family."""
        return cls(modules=spec.experts, dispatcher=dispatcher)


class ExpertLoad:
    """Tokens that each local expert of one layer received since the last ``reset``, as a device tensor.

    Only training forwards count: not evaluation, and not a recomputation (``paused``).
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.paused = False

    def add(self, offsets_C: Tensor) -> None:
        """Count one forward from the end offsets of each expert's rows."""
        if self.paused or not torch.is_grad_enabled():
            return
        counts = torch.diff(offsets_C, prepend=offsets_C.new_zeros(1)).to(torch.int64)
        self.tokens = counts if self.tokens is None else self.tokens + counts

    def reset(self) -> None:
        """Start counting anew."""
        self.tokens = None


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """What one experts module needs to run over its EP group; lives on the module as ``expert_parallel``."""

    dispatcher: Dispatcher
    ep_mesh: DeviceMesh
    num_experts: int
    load: ExpertLoad


def expert_parallelize_modules(model: nn.Module, ep_mesh: DeviceMesh, plan: ExpertPlan) -> nn.Module:
    """Split the experts of ``model`` over ``ep_mesh`` (dim 0, in chunks) and dispatch tokens to them. In place.

    Every rank of the mesh must call it. Parameters may lie on meta, or hold the same whole values on every rank.
    Afterwards each stacked parameter (weights and biases) is a DTensor ``[E, ...]`` with ``Shard(0)`` on ``ep_mesh``. A
    post-expert norm, which all experts share, stays as it is: a dense parameter, applied on the tokens' own ranks.

    Args:
        ep_mesh: 1-D; rank p gets experts ``[p*c, (p+1)*c)``, ``c = ceil(E/P)``.

    Raises:
        ValueError: the plan matches nothing; a module is not at the experts seam, holds parameters that the seam
            doesn't know, or was parallelized before; a rank would be left without an expert.
    """
    modules = find_experts(model, plan.modules)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no module at transformers' experts seam (use_experts_implementation): there "
            "is nothing to split over ep. It is a dense model, was configured without experts, or holds them in "
            "another way: use FSDP2 alone."
        )
    problems = [problem for name, module in modules.items() if (problem := _problem(name, module, ep_mesh.size()))]
    if problems:
        raise ValueError("\n".join(problems))
    for module in modules.values():
        _parallelize_experts(module, ep_mesh, plan)
    return model


def expert_parallel(experts: nn.Module) -> ExpertParallel:
    """What ``expert_parallelize_modules`` put on an experts module."""
    return cast(ExpertParallel, experts.expert_parallel)


def _problem(name: str, module: nn.Module, ep_size: int) -> str | None:
    if any(isinstance(param, DTensor) for param in stacked_params(module).values()):
        return f"{name}: already sharded. Build the model anew: a model is parallelized once, on one set of meshes."
    problem = ep_size_problem(num_experts(module), ep_size)
    return None if problem is None else f"{name}: {problem}"


def _parallelize_experts(module: nn.Module, ep_mesh: DeviceMesh, plan: ExpertPlan) -> None:
    total = num_experts(module)
    for name, param in stacked_params(module).items():
        # src_data_rank=None: each rank cuts its own slice, nothing is sent.
        local = distribute_tensor(param.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
    dispatcher = build_dispatcher(plan.dispatcher, ep_mesh.get_group(), math.ceil(total / ep_mesh.size()))
    experts = cast(Any, module)
    experts.expert_parallel = ExpertParallel(dispatcher, ep_mesh, total, ExpertLoad())
    # A config of its own: the model's config, which other models may share, keeps the implementation it names.
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = EXPERTS_FUNCTION


def _local(experts: nn.Module, name: str) -> Tensor:
    # Each EP rank differentiates its own experts only, so the local gradient is this rank's shard of the whole one.
    param = experts.get_parameter(name)
    return param.to_local(grad_placements=[Shard(0)]) if isinstance(param, DTensor) else param


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module over its EP group, as transformers' experts seam calls it, for all of its flags.

    Collective over the EP group; a rank without tokens calls it too.

    Args:
        hidden_states: [T, H]; top_k_index: [T, K] int64 global expert ids; top_k_weights: [T, K], in fp32 or the
            dtype of ``hidden_states``. The experts compute in their weights' dtype.

    Returns:
        [T, H], dtype of ``hidden_states``.
    """
    module, state = cast(Any, experts), expert_parallel(experts)
    weight = _local(experts, DOWN)
    rows, offsets, receipt = state.dispatcher.dispatch(
        hidden_states.to(weight.dtype), top_k_index, top_k_weights, weight.size(0)
    )
    state.load.add(offsets)
    gate_up = _grouped_linear(experts, up_name(experts), rows, offsets)
    activated = module._apply_gate(gate_up) if module.has_gate else module.act_fn(gate_up)
    down = _grouped_linear(experts, DOWN, activated, offsets)
    norm = module.post_expert_norm if module.has_post_expert_norm else None
    return state.dispatcher.combine(down, receipt, norm).to(hidden_states.dtype)


def _grouped_linear(experts: nn.Module, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    flags, weight = cast(Any, experts), _local(experts, name)
    bias = _local(experts, f"{name}_bias") if flags.has_bias else None
    return grouped_linear(rows.to(weight.dtype), weight, offsets, bias, flags.is_transposed)


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Experts modules that ``expert_parallelize_modules`` has treated, by name."""
    return {name: module for name, module in model.named_modules() if "expert_parallel" in module.__dict__}


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, experts_forward)
