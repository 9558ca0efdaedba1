"""Expert-FSDP: each rank's experts sharded again, over the ranks that hold the same experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

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
    """

    gradient_reduction: Literal["sum", "mean"]
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool = True


def set_gradient_sum(unit: FSDPModule, mesh: DeviceMesh, divide_factor: float = 1.0) -> None:
    """Reduce this unit's gradients over its ``mesh`` as a sum, divided once by ``divide_factor``.

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


def expert_fully_shard_modules(
    model: nn.Module, efsdp_mesh: DeviceMesh, plan: ExpertPlan, fsdp_plan: FSDPPlan
) -> set[nn.Parameter]:
    """``fully_shard`` each experts module over ``efsdp_mesh``, along a dim that EP left free. In place.

    Also where the mesh has one rank: the experts' gradients must be divided, and their dtype kept, as everywhere else.
    Every rank of the mesh must call it, after ``expert_parallelize_modules``.

    Args:
        efsdp_mesh: ``efsdp``, or ``(edp, efsdp)`` for replicated experts; same parent mesh as the EP axis.

    Returns:
        The experts' parameters: what an outer ``fully_shard(model, ignored_params=...)`` has to leave alone.

    Raises:
        ValueError: the glob matches nothing.
    """
    experts_params: set[nn.Parameter] = set()
    placement_fn = build_expert_placement_fn(efsdp_mesh.size(-1))
    for name in match_names(plan.modules, dict(model.named_modules())):
        module = model.get_submodule(name)
        unit = fully_shard(
            module,
            mesh=efsdp_mesh,
            shard_placement_fn=placement_fn,
            reshard_after_forward=fsdp_plan.reshard_after_forward,
            mp_policy=fsdp_plan.mp_policy,
        )
        # EP's exchange sums over the ep ranks, FSDP's reduction over the others: together, over all of them.
        num_ranks = efsdp_mesh.size() * expert_parallel(module).ep_mesh.size()
        set_gradient_sum(unit, efsdp_mesh, divide_factor=1 if fsdp_plan.gradient_reduction == "sum" else num_ranks)
        experts_params.update(module.parameters())
    return experts_params
