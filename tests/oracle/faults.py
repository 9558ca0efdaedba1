"""Faults of public systems, planted in the process of a rank: each is a context in which the model is built and run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import _StridedShard

from moesaic.meshes import Meshes
from moesaic.model.seam import find_experts
from moesaic.ops.placements import blocks_at
from moesaic.ops.runs import _gather
from moesaic.ops.sequence import run_of
from moesaic.parallel import apply, efsdp, outer
from moesaic.parallel.efsdp import find_experts_params, set_gradient_sum
from moesaic.train import grad_norm, router, step
from moesaic.verify import run
from moesaic.weights import load


@contextmanager
def wrong_divide_factor() -> Iterator[None]:
    """The experts' units divide by the ranks that shard them, as an average would."""

    def divides(unit: FSDPModule, mesh: Any, divide_factor: int = 1) -> None:
        set_gradient_sum(unit, mesh, divide_factor=mesh.size())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efsdp, "set_gradient_sum", divides)
        yield


@contextmanager
def unwrapped_experts() -> Iterator[None]:
    """Every unit averages over all ranks, of a loss that is each rank's own; the experts, whose efsdp is 1, aren't made
    a unit, so that nothing divides their gradients."""

    def averages(unit: FSDPModule, mesh: Any, divide_factor: int = 1) -> None:
        set_gradient_sum(unit, mesh, divide_factor=torch.distributed.get_world_size())

    def leaves_alone(model: nn.Module, _mesh: Any, plan: Any, *_: Any) -> set[nn.Parameter]:
        return find_experts_params(model, plan)

    def own_loss(logits: Tensor, labels: Tensor, *rest: Any) -> Tensor:
        loss = token_loss_sum(logits, labels, *rest)
        return loss + (torch.distributed.get_world_size() - 1) * (loss - loss.detach())

    token_loss_sum = step.token_loss_sum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer, "set_gradient_sum", averages)
        patch.setattr(apply, "expert_fully_shard_modules", leaves_alone)
        patch.setattr(apply, "_assert_owned", lambda model: None)
        patch.setattr(step, "token_loss_sum", own_loss)
        yield


@contextmanager
def unreduced_modules() -> Iterator[None]:
    """``fsdp_ignored_modules`` are left to nobody: each rank trains on its own tokens."""

    def leaves_alone(model: nn.Module, patterns: Any, *_: Any, **__: Any) -> set[nn.Parameter]:
        return {param for pattern in patterns for param in model.get_submodule(pattern).parameters()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "replicate_modules", leaves_alone)
        patch.setattr(apply, "_assert_owned", lambda model: None)
        yield


@contextmanager
def unreduced_replicas() -> Iterator[None]:
    """The outer FSDP spans one replica, and nothing sums over them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meshes, "dense_fsdp", property(lambda meshes: meshes.dense["mp_shard"]))
        yield


@contextmanager
def unreduced_over_cp() -> Iterator[None]:
    """Dense parameters are sharded over dp alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meshes, "dense_fsdp", property(lambda meshes: meshes.data["dp"]))
        yield


class _CopyRuns(torch.autograd.Function):
    """What a block without sequence parallelism has on each tp rank: all tokens, and gradients that all ranks share."""

    @staticmethod
    def forward(ctx: Any, run: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(run, group, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return run_of(grads[0], ctx.group.rank(), ctx.group.size(), 0), None


class _OwnRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return run_of(whole, group.rank(), group.size(), 0).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group, 0), None


@contextmanager
def dispatched_by_each_tp_rank() -> Iterator[None]:
    """Every tp rank sends all tokens of its group to the experts, and has gradients of all of them."""

    def change(model: nn.Module, meshes: Meshes) -> None:
        group = meshes.dense.get_group("tp")

        def copy(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(_CopyRuns.apply(one, group) for one in args)

        for experts in find_experts(model).values():
            experts.register_forward_pre_hook(copy)
            experts.register_forward_hook(lambda _module, _args, output: _OwnRun.apply(output, group))

    with _changed_model(change):
        yield


@contextmanager
def skipped_strided_shard() -> Iterator[None]:
    """Loading takes a strided shard for one contiguous chunk, in the order of the mesh's axes."""

    def contiguous(shape: Any, mesh: Any, placements: Any) -> Any:
        from torch.distributed.tensor import Shard

        plain = [Shard(one.dim) if isinstance(one, _StridedShard) else one for one in placements]
        taken = blocks_at(shape, tuple(mesh.shape), mesh.get_coordinate(), plain)
        right = blocks_at(shape, tuple(mesh.shape), mesh.get_coordinate(), placements)
        return taken if [one.size for one in taken] == [one.size for one in right] else right

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "local_blocks", contiguous)
        yield


@contextmanager
def detached_router() -> Iterator[None]:
    """Routing weights reach the experts without a gradient."""

    def detach(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0], args[1], args[2].detach())

    def change(model: nn.Module, _meshes: Meshes) -> None:
        for experts in find_experts(model).values():
            experts.register_forward_pre_hook(detach)

    with _changed_model(change):
        yield


@contextmanager
def aux_loss_per_rank() -> Iterator[None]:
    """The load behind the auxiliary loss is each rank's own."""

    def keep(self: router.RouterTraining) -> None:
        self._are_global = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.RouterTraining, "_sum_counts", keep)
        yield


@contextmanager
def replicas_counted_in_the_norm() -> Iterator[None]:
    """The norm adds up what every rank holds, copies too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_norm, "_num_copies", lambda grad: 1)
        yield


@contextmanager
def _changed_model(change: Any) -> Iterator[None]:
    build_model = run.build_model

    def build(recipe: Any, meshes: Meshes) -> Any:
        model = build_model(recipe, meshes)
        change(model, meshes)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build_model", build)
        yield
