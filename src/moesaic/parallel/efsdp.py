"""Expert-FSDP: each rank's experts sharded again, over the ranks that hold the same experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from moesaic.model.seam import find_experts, is_at_seam, stacked_params
from moesaic.parallel.experts import ExpertPlan, expert_parallel
from moesaic.parallel.gloo_exchange import use_gloo_exchange
from moesaic.parallel.shard_rules import build_expert_placement_fn
from moesaic.specs import match_names


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPPlan:
    """How an FSDP unit computes and reduces.

    Attributes:
        gradient_reduction: ``sum`` where the loss is divided by the global token count already; ``mean`` where it is
            each rank's own mean, to go with an outer ``fully_shard``, which averages over its ranks by default. It has
            no default: the wrong one makes the experts' gradients as many times too large, or too small, as there are
            ranks, and the loss doesn't show it.
        mp_policy: compute and reduction dtypes.
        reshard_after_forward: free unsharded parameters between forward and backward.
        offload_policy: where shards and their gradients live.
    """

    gradient_reduction: Literal["sum", "mean"]
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool = True
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)


def set_gradient_sum(unit: FSDPModule, mesh: DeviceMesh, divide_factor: float = 1.0) -> None:
    """Reduce this unit's gradients over its ``mesh`` as a sum, divided once by ``divide_factor``. Units on CPU ranks
    also gather and reduce point to point from here on (``gloo_exchange.py``).

    The factor alone would use the backend's PREMUL_SUM, which gloo lacks and NCCL zeroes in bf16 up to torch 2.13
    (pytorch/pytorch#190747); forcing a sum avoids it. Not with a single shard: there FSDP scatters nothing and divides
    as it copies, and a forced sum would divide a second time. One rank and factor 1 need neither: FSDP just copies.
    """
    if mesh.size() == 1 and divide_factor == 1.0:
        return
    unit.set_gradient_divide_factor(divide_factor)
    unit.set_force_sum_reduction_for_comms(mesh.size(-1) > 1)
    if mesh.size(-1) > 1 and mesh.device_type == "cpu":
        use_gloo_exchange(unit)


def set_mixed_gradient_sum(unit: FSDPModule) -> None:
    """As ``set_gradient_sum``, for a unit whose parameters lie on several meshes, all of which the settings are for.

    Dividing by 1 is harmless also where a mesh has a single shard. torch refuses a custom exchange for such units.
    """
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def find_experts_params(model: nn.Module, plan: ExpertPlan) -> set[nn.Parameter]:
    """The stacked parameters of all experts modules."""
    return {param for module in find_experts(model, plan.modules).values() for param in stacked_params(module).values()}


def find_hook_modules(model: nn.Module, plan: ExpertPlan, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules whose forward gathers experts, by name: those that ``patterns`` name, else the experts' own.

    Raises:
        ValueError: a glob matches nothing, or a module without experts, or one that is an FSDP unit already (a block);
            or experts that no module, or more than one, would gather.
    """
    experts = find_experts(model, plan.modules)
    if not patterns:
        return experts
    modules = dict(model.named_modules())
    hooks = {name: modules[name] for pattern in patterns for name in match_names(pattern, modules)}
    for name in hooks:
        if not any(_is_within(inner, name) for inner in experts):
            raise ValueError(
                f"hook_modules: {name} ({type(hooks[name]).__name__}) holds no experts. Name modules that do, e.g. "
                f"{next(iter(experts))} or one around it."
            )
    for name in experts:
        outer = [hook for hook in hooks if _is_within(name, hook)]
        if len(outer) != 1:
            raise ValueError(
                f"hook_modules: the experts {name} are in {len(outer)} of the modules it names ({outer}). Name exactly "
                "one module around each layer's experts, or none at all."
            )
    units = [name for name, module in hooks.items() if isinstance(module, FSDPModule)]
    if units:
        raise ValueError(
            f"hook_modules: {units[0]} is an FSDP unit already, a block or one of fsdp_ignored_modules. Name a module "
            "inside a block, or choose fsdp_implementation: custom, where the block gathers its experts."
        )
    return hooks


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def expert_fully_shard_modules(
    model: nn.Module, efsdp_mesh: DeviceMesh, plan: ExpertPlan, fsdp_plan: FSDPPlan, hook_modules: Sequence[str] = ()
) -> set[nn.Parameter]:
    """``fully_shard`` each experts module over ``efsdp_mesh``, along a dim that EP left free. In place.

    Also where the mesh has one rank: the experts' gradients must be divided, and their dtype kept, as everywhere else.
    Every rank of the mesh must call it, after ``expert_parallelize_modules``.

    Args:
        efsdp_mesh: ``efsdp``, or ``(edp, efsdp)`` for replicated experts; same parent mesh as the EP axis.
        hook_modules: globs of modules around the experts that become the units instead. They own the experts only, so
            the outer FSDP comes first then: it must own everything else in them, and doesn't look below a unit.

    Returns:
        The experts' parameters: what an outer ``fully_shard(model, ignored_params=...)`` has to leave alone. A
        post-expert norm isn't among them: it is a dense parameter. Where the experts module is a unit, FSDP doesn't
        look for it there; make it one too, ``fully_shard(experts.post_expert_norm, mesh=...)`` on the outer mesh.

    Raises:
        ValueError: the plan's glob matches nothing, or a module that is not at the experts seam; see also
            ``find_hook_modules``.
    """
    placement_fn = build_expert_placement_fn(efsdp_mesh.size(-1))
    experts_params = find_experts_params(model, plan)
    ep_size = next(expert_parallel(module).ep_mesh.size() for module in find_experts(model, plan.modules).values())
    # EP's exchange sums over the ep ranks, FSDP's reduction over the others: together, over all of them.
    divide_factor = 1 if fsdp_plan.gradient_reduction == "sum" else efsdp_mesh.size() * ep_size
    for module in find_hook_modules(model, plan, hook_modules).values():
        if not is_at_seam(module):
            module.register_forward_hook(_without_views)
        unit = fully_shard(
            module,
            mesh=efsdp_mesh,
            shard_placement_fn=placement_fn,
            reshard_after_forward=fsdp_plan.reshard_after_forward,
            # Routing weights in fp32 stay so, as in transformers' own experts; the tokens are cast in the forward.
            mp_policy=replace(fsdp_plan.mp_policy, cast_forward_inputs=False),
            offload_policy=fsdp_plan.offload_policy,
            ignored_params=set(module.parameters()) - experts_params,
        )
        set_gradient_sum(unit, efsdp_mesh, divide_factor=divide_factor)
    return find_experts_params(model, plan)  # FSDP has put new ones in the old ones' places


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """FSDP hangs its backward on a unit's outputs, where an in-place operation on a view would silently drop it."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)
