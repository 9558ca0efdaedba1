"""The optimizer and the course of its learning rate.

Decisions:
- AdamW's ``fused`` form by default, on every device: one pass over memory, no temporaries the size of the model, and
  elementwise: a shard's update is bit-equal to the same slice of the whole parameter's. Parameters are DTensors on two
  meshes (dense, expert): torch runs the kernel on their local shards, whatever the mesh. So it does for ``foreach``.
- No Muon: torch's takes matrices only, while experts are stacked in three dims; and on sharded matrices its iteration
  in bf16 rounds by topology (some percent of an update), so that no topology would compute what one process computes.
- No weight decay on parameters with fewer than two dims (norms, biases): pulling them to zero regularises nothing.
- Plain tensors (modules left out of FSDP) get groups of their own: one kernel can't take them together with DTensors.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moesaic.config.recipe import LrSchedulerConfig, OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig, learning_rate: float) -> Optimizer:
    """AdamW over the parameters that require a gradient, with and without weight decay (see the module's decisions).

    Call it after sharding: the state has each parameter's own layout. Not collective.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            groups.setdefault((param.ndim >= 2, isinstance(param, DTensor)), []).append(param)
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient: unfreeze some before this.")
    param_groups = [
        {"params": params, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), params in groups.items()
    ]
    assert config.name == "adamw", "check_recipe refuses the others"
    is_fused = config.implementation == "fused"
    return AdamW(
        param_groups,
        lr=learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=is_fused,
        foreach=not is_fused,
    )


@torch.no_grad()
def give_state(optimizer: Optimizer) -> None:
    """Make the state that AdamW makes in the first step: no step done, moments of 0. What has one keeps it.

    Saving does so too where there is none, but counts a step that nobody took (torch's ``_init_optim_state``).
    """
    assert isinstance(optimizer, AdamW), type(optimizer).__name__
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                counter = torch.zeros((), device=param.device if group["fused"] else "cpu")
                moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[param] = {"step": counter, **moments}


def build_scheduler(optimizer: Optimizer, config: LrSchedulerConfig, num_steps: int) -> LambdaLR:
    """Scheduler to be stepped once after each optimizer step; see ``lr_factor``."""
    num_warmup_steps = warmup_steps(config, num_steps)

    def factor(step: int) -> float:
        return lr_factor(step, config.name, num_warmup_steps, num_steps, config.min_lr_ratio)

    return LambdaLR(optimizer, factor)


def warmup_steps(config: LrSchedulerConfig, num_steps: int) -> int:
    """Optimizer steps of warm-up: ``ceil(warmup_ratio * num_steps)`` where the ratio is set, else ``warmup_steps``."""
    return config.warmup_steps if config.warmup_ratio is None else math.ceil(config.warmup_ratio * num_steps)


def lr_factor(step: int, name: str, num_warmup_steps: int, num_steps: int, min_ratio: float) -> float:
    """What optimizer step ``step`` (from 0) of ``num_steps`` multiplies the learning rate with.

    Warm-up, w steps: ``(step + 1) / w``, so the ramp starts at 0 before the first step, which already learns. After it,
    with ``p = (step - w) / (num_steps - w)`` and r = ``min_ratio``: constant ``1``; linear ``1 - (1 - r) p``; cosine
    ``r + (1 - r) (1 + cos(pi p)) / 2``. The course reaches r just after the last step, so no step is taken at rate 0.

    Example, linear, w = 2, 6 steps, r = 0:  0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    # torch asks for one step more than there are, after the last: the minimum.
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps))
    if name == "constant":
        return 1.0
    if name == "linear":
        return 1.0 - (1.0 - min_ratio) * progress
    assert name == "cosine", name
    return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
