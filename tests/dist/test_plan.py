"""Shard rules lay parameters out exactly, FSDP takes the dim that they leave, and what can't be cut is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM

from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.ops.placements import local_blocks, local_shape
from moesaic.parallel import FSDPPlan, apply_plan, build_fsdp_mesh, fully_shard_planned
from moesaic.parallel.units import list_units
from moesaic.train.grad_norm import clip_grad_norm_
from moesaic.weights import export_hf, load_weights
from tests.pool import RunRanks
from tests.unit.tiny_checkpoints import assert_same_state, save_tiny

SUM = FSDPPlan(gradient_reduction="sum")
AXES = ("R", "F", "MP", "EP")
PLAN = {"EP": {"*.gate_up_proj": 0, "*.down_proj": 0}, "MP": {"*.gate_up_proj": 2}}


class Weights(nn.Module):
    """Parameters of given shapes; the loss is their sum over what the rank holds, weighted by rank."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], tied: bool = False) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name, shape in shapes.items():
            values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            self.inner.register_parameter(name, nn.Parameter(values))
        if tied:
            self.other = nn.Module()
            self.other.register_parameter("tied", next(self.inner.parameters()))

    def forward(self, factor: float) -> Tensor:
        total = torch.zeros(())
        for param in self.inner.parameters():
            local = param.to_local(grad_placements=param.placements) if isinstance(param, DTensor) else param
            total = total + (local * local).sum() * factor / 2
        return total


def build_root(shape: tuple[int, ...], axes: tuple[str, ...] = AXES) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def own_part(whole: Tensor, param: DTensor) -> Tensor:
    """What the placements say that this rank holds of ``whole``."""
    blocks = local_blocks(whole.shape, param.device_mesh, param.placements)
    part = torch.zeros(local_shape(blocks, whole.ndim))
    for block in blocks:
        part[block.local_slices] = whole[block.global_slices]
    return part


def assert_holds(param: nn.Parameter, whole: Tensor) -> None:
    assert isinstance(param, DTensor)
    local = param.to_local().detach()
    assert local.numel() == own_part(whole, param).numel() and torch.equal(
        local.flatten(), own_part(whole, param).flatten()
    )


# ---------------------------------------------------------------------------------------------------------------------
# Exact layouts and gradients, on meshes of up to 4 axes.
# ---------------------------------------------------------------------------------------------------------------------
OWN_AXES = {"inner.gate_up_proj": ("MP", "EP"), "inner.down_proj": ("EP",), "inner.norm": ()}
SHAPES = {"gate_up_proj": (4, 8, 6), "down_proj": (4, 6, 8), "norm": (8,)}


def lay_out(rank: int, sizes: tuple[int, ...], replicates: bool) -> dict[str, Any]:
    """Cut, shard, one backward; what became of each parameter, checked in place."""
    root = build_root(sizes)
    model, whole = Weights(SHAPES), dict(Weights(SHAPES).named_parameters())
    apply_plan(model, PLAN, {"EP": root["EP"], "MP": root["MP"]})
    gate_up = model.inner.gate_up_proj
    assert isinstance(gate_up, DTensor) and gate_up.device_mesh.mesh_dim_names == ("MP", "EP")
    assert gate_up.placements == (Shard(2), Shard(0)) and gate_up._local_tensor.is_contiguous()
    assert_holds(gate_up, whole["inner.gate_up_proj"])
    tokens = ("R", "MP", "EP") if replicates else ("MP", "EP")
    fully_shard_planned(model, root, SUM, shard="F", replicate=tokens, blocks=[])
    model(1.0 + rank).backward()
    for name, param in model.named_parameters():
        assert_holds(param, whole[name].detach())
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        # d/dw = sum of the factors of the ranks that FSDP sums over * w
        axes = [axis for axis in ("F", *tokens) if axis not in OWN_AXES[name]]
        factor = sum(1.0 + other for other in root[tuple(sorted(axes, key=AXES.index))].mesh.flatten().tolist())
        assert torch.equal(param.grad.to_local(), param.to_local().detach() * factor), name
        assert torch.equal(param.detach().full_tensor(), whole[name].detach()), name
    return {name: (p.device_mesh.mesh_dim_names, p.placements) for name, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (2, 1, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2)])
def test_two_meshes_on_one_parameter_with_hsdp(sizes: tuple[int, ...], run_ranks: RunRanks) -> None:
    for found in run_ranks(lay_out, 8, sizes, True):
        assert found["inner.gate_up_proj"] == (AXES, (Replicate(), Shard(1), Shard(2), Shard(0)))
        assert found["inner.down_proj"] == (("R_MP", "F", "EP"), (Replicate(), Shard(1), Shard(0)))
        assert found["inner.norm"][1] == (Replicate(), Shard(0))


def test_two_meshes_on_one_parameter_with_fsdp(run_ranks: RunRanks) -> None:
    for found in run_ranks(lay_out, 8, (1, 2, 2, 2), False):
        assert found["inner.gate_up_proj"] == (("F", "MP", "EP"), (Shard(1), Shard(2), Shard(0)))


# ---------------------------------------------------------------------------------------------------------------------
# One rule of FSDP's dim each: shape, plan, placements on (F 2, EP 2).
# ---------------------------------------------------------------------------------------------------------------------
RULES: dict[str, tuple[tuple[int, ...], dict[str, int], tuple[Any, ...]]] = {
    "first free dim that divides": ((4, 6, 8), {"*.w": 0}, (Shard(1), Shard(0))),
    "next one where that doesn't": ((4, 5, 8), {"*.w": 0}, (Shard(2), Shard(0))),
    "dim 0 where the plan left it": ((4, 6, 8), {"*.w": 2}, (Shard(0), Shard(2))),
    "strided where none divides": ((4, 5, 3), {"*.w": 0}, (_StridedShard(0, split_factor=2), Shard(0))),
    "strided, unevenly": ((7, 5), {"*.w": 0}, (_StridedShard(0, split_factor=2), Shard(0))),
    "uneven dim 0 where none divides": ((5, 3, 4), {"*.w": 2}, (Shard(0), Shard(2))),
    "not cut, first that divides": ((5, 4), {}, (Shard(1),)),
    "not cut, dim 0 padded": ((5, 3), {}, (Shard(0),)),
}


def apply_rule(rank: int, shape: tuple[int, ...], patterns: dict[str, int]) -> tuple[Any, ...]:
    root = build_root((2, 2), ("F", "EP"))
    model, whole = Weights({"w": shape}), Weights({"w": shape}).inner.w.detach()
    apply_plan(model, {"EP": patterns}, {"EP": root["EP"]})
    fully_shard_planned(model, root, SUM, shard="F", blocks=[])
    model(1.0 + rank).backward()
    param = model.inner.w
    assert isinstance(param, DTensor) and param.grad is not None
    assert_holds(param, whole)
    factor = sum(1.0 + other for other in root["F"].mesh.tolist())
    assert torch.equal(param.grad.to_local(), param.to_local().detach() * factor)
    return param.placements


@pytest.mark.parametrize("rule", RULES)
def test_dim_that_fsdp_takes(rule: str, run_ranks: RunRanks) -> None:
    shape, patterns, placements = RULES[rule]
    assert run_ranks(apply_rule, 4, shape, patterns) == [placements] * 4


def leave_no_dim(rank: int, replicates: bool) -> list[float]:
    """A bias that EP takes whole, beside a weight: held by every rank of the FSDP mesh, gradients summed there."""
    root = build_root((2, 2, 2), ("R", "F", "EP"))
    mesh = build_fsdp_mesh(root, "F", ("R",) if replicates else ())
    model = Weights({"bias": (5,), "weight": (4, 6), "free": (3,)})
    apply_plan(model, {"EP": {"*.bias": 0, "*.weight": 0}}, {"EP": root["EP"]})
    fully_shard_planned(model, root, SUM, shard="F", replicate=("R", "EP") if replicates else ("EP",), blocks=[])
    for _ in range(2):  # two micro-batches: what was summed once isn't summed again
        model(1.0 + rank).backward()
    bias = model.inner.bias
    assert isinstance(bias, DTensor) and isinstance(bias.grad, DTensor)
    held = [0.0, 1.0, 2.0] if rank % 2 == 0 else [3.0, 4.0]
    factor = 2 * sum(1.0 + other for other in mesh.mesh.flatten().tolist())
    assert bias.to_local().tolist() == held and bias.grad.to_local().tolist() == [factor * value for value in held]
    assert bias.grad.placements[0] == Replicate() and bias.device_mesh.size(0) == mesh.size()
    assert [row.local_shape for row in list_units(model) if row.name == "inner.bias"] == [(len(held),)]
    return [factor, clip_grad_norm_([bias], None).item()]


@pytest.mark.parametrize("replicates", [False, True])
def test_parameter_without_a_free_dim_is_all_reduced(replicates: bool, run_ranks: RunRanks) -> None:
    found = run_ranks(leave_no_dim, 8, replicates)
    for rank, (_, norm) in enumerate(found):
        # The bias is 0..4. The ranks of one FSDP mesh share a factor, and each part counts once.
        (even, _), (odd, _) = found[rank & ~1], found[rank | 1]
        assert norm == pytest.approx((even**2 * (1 + 4) + odd**2 * (9 + 16)) ** 0.5, rel=1e-6)


def cut_ties_and_orders(rank: int) -> None:
    """A tied parameter stays one; a flattened axis, an axis before FSDP's, and two meshes on one dim work."""
    root = build_root((2, 2, 2), ("EP", "F", "MP"))
    model = Weights({"w": (8, 8), "v": (8, 6), "frozen": (8, 2)}, tied=True)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.inner.frozen.requires_grad_(False)
    flat = root["EP", "MP"]._flatten("both")
    plan = {"MP": {"other.*": 0}, "EP": {"inner.w": 0}, "BOTH": {"*.v": 0}}
    apply_plan(model, plan | {"EP": {"inner.w": 0, "*frozen": 0}}, {"EP": root["EP"], "MP": root["MP"], "BOTH": flat})
    tied = model.inner.w
    assert model.other.tied is tied and isinstance(tied, DTensor) and not model.inner.frozen.requires_grad
    assert tied.device_mesh.mesh_dim_names == ("EP", "MP") and tied.placements == (Shard(0), Shard(0))
    fully_shard_planned(model, root, SUM, shard="F", replicate=("EP", "MP"), blocks=[])
    assert model.other.tied is model.inner.w
    for name, param in model.named_parameters():
        assert_holds(param, whole[name])
    model(1.0).backward()
    assert isinstance(model.inner.v.grad, DTensor)
    assert torch.equal(model.inner.v.grad.to_local(), model.inner.v.to_local() * 2)
    assert clip_grad_norm_([model.inner.v], None).item() == pytest.approx(2 * whole["inner.v"].norm().item())


def test_ties_and_other_orders_of_axes(run_ranks: RunRanks) -> None:
    run_ranks(cut_ties_and_orders, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: on meta, loaded slice by slice, and exported.
# ---------------------------------------------------------------------------------------------------------------------
def load_planned(rank: int, folder: Path, target: Path) -> None:
    root = build_root((2, 1, 2, 2))
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    apply_plan(model, PLAN, {"EP": root["EP"], "MP": root["MP"]})
    everyone = root["R", "F", "MP", "EP"]._flatten()
    fully_shard_planned(model, root, SUM, shard="F", replicate=("R", "MP", "EP"), dense_mesh=everyone)
    materialize(model, torch.device("cpu"))
    load_weights(model, folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert ("experts" in name) == (mine.device_mesh.ndim > 1)
        assert_holds(mine, theirs.detach())
    export_hf(model, target)
    assert_same_state(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), reference)


def test_planned_model_is_loaded_and_exported(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "qwen3_moe")
    run_ranks(load_planned, 8, tmp_path / "source", tmp_path / "target")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals: everything that is wrong, in one message, and nothing changed.
# ---------------------------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, dict[str, int]], list[str]]] = {
    "globs that match nothing": (
        {"EP": {"*.gone": 0, "*.w": 0}, "MP": {"w": 1}},
        ["EP: '\\*.gone' matches no parameter", "MP: 'w' matches no parameter"],
    ),
    "mesh that isn't there": ({"OE": {"*.w": 0}}, ["OE: no mesh of this name; named_meshes has \\['BOTH', "]),
    "mesh of two axes": ({"TWO": {"*.w": 0}}, ["TWO: .* isn't 1-D"]),
    "dim that isn't there": ({"EP": {"*.w": 2}, "MP": {"*.v": -1}}, ["inner.w: no dim 2 in", "inner.v: no dim -1 in"]),
    "two dims by one mesh": ({"EP": {"*.w": 0, "inner.*": 1}}, ["inner.w: EP shards dim 0 and, by 'inner.\\*', 1"]),
    "rows for too few ranks": ({"BOTH": {"*.v": 0}}, ["inner.v: \\(2, 8\\) in chunks .* leaves ranks with nothing"]),
    "three meshes": ({"EP": {"*.w": 0}, "MP": {"*.w": 1}, "F": {"*.w": 1}}, ["inner.w: sharded by .* 2 meshes beside"]),
    "meshes of different roots": ({"EP": {"*.w": 0}, "FAR": {"*.w": 1}}, ["inner.w: .* different root meshes"]),
    "meshes that overlap": ({"EP": {"*.w": 0}, "BOTH": {"*.w": 1}}, ["inner.w: .* share ranks"]),
}


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def refuse(rank: int) -> dict[str, tuple[str, bool]]:
    root = build_root((2, 2, 2), ("F", "MP", "EP"))
    far = build_root((4, 2), ("A", "FAR"))
    meshes = {"EP": root["EP"], "MP": root["MP"], "F": root["F"], "TWO": root["MP", "EP"], "FAR": far["FAR"]}
    meshes["BOTH"] = root["MP", "EP"]._flatten("both")
    shapes = {"w": (8, 8), "v": (2, 8)}
    found = {}
    for name, (plan, _) in REFUSED.items():
        model = Weights(shapes)
        message = message_of(apply_plan, model, plan, meshes)
        found[name] = (message, not any(isinstance(param, DTensor) for param in model.parameters()))
    model = apply_plan(Weights(shapes), {"EP": {"*.w": 0}}, meshes)
    found["twice"] = (message_of(apply_plan, model, {"MP": {"*.w": 1}}, meshes), True)
    found["root"] = (message_of(fully_shard_planned, model, far, SUM, shard="A", blocks=[]), True)
    found["overlap"] = (message_of(fully_shard_planned, model, root, SUM, shard="EP", blocks=[]), True)
    mean = FSDPPlan(gradient_reduction="mean")
    found["mean"] = (message_of(fully_shard_planned, model, root, mean, shard="F", blocks=[]), True)
    found["axis"] = (message_of(build_fsdp_mesh, root, "F", ("G",)), True)
    found["axis twice"] = (message_of(build_fsdp_mesh, root, "F", ("F",)), True)
    return found


def test_what_is_refused(run_ranks: RunRanks) -> None:
    expected = {name: patterns for name, (_, patterns) in REFUSED.items()} | {
        "twice": ["inner.w: already sharded"],
        "root": ["inner.w: FSDP's 'A' .* different root meshes"],
        "overlap": ["inner.w: FSDP's 'EP' .* share ranks"],
        "mean": ["gradient_reduction='mean'.*choose 'sum'"],
        "axis": ["'G' is named twice, or not an axis of the root mesh"],
        "axis twice": ["'F' is named twice"],
    }
    for found in run_ranks(refuse, 8):
        assert found.keys() == expected.keys()
        for name, (message, is_unchanged) in found.items():
            assert is_unchanged, name
            for pattern in expected[name]:
                assert re.search(pattern, message), (name, message)
