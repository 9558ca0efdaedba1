"""Models cut by shard rules compute what one process computes; so do experts on a mesh that a caller has built."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.meshes import build_meshes
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.model.seam import find_experts
from moesaic.parallel import (
    ExpertPlan,
    FSDPPlan,
    apply_plan,
    build_fsdp_mesh,
    expert_fully_shard_modules,
    expert_parallelize_modules,
    fully_shard_planned,
)
from moesaic.train.step import train_step
from moesaic.weights.load import load_weights
from tests.oracle import reference as references
from tests.oracle.cells import (
    Cell,
    ShardOptimizer,
    assert_within_tolerance,
    build_batch,
    measure_gradients,
    share_documents,
    worst,
)
from tests.oracle.reference import NUM_STEPS, OPTIMIZERS, Case, Reference, load_reference
from tests.pool import RunRanks

SUM = FSDPPlan(gradient_reduction="sum")
EXPERTS_FUNCTION = "moesaic_test_plan"
AXES = ("R", "F", "MP", "EP")
PLAN = {
    "EP": {"*.experts.gate_up_proj": 0, "*.experts.down_proj": 0},
    "MP": {"*.experts.gate_up_proj": 2},
}


# ---------------------------------------------------------------------------------------------------------------------
# What a forward does with its shards. Every rank has tokens of its own.
# ---------------------------------------------------------------------------------------------------------------------
class SumOver(torch.autograd.Function):
    """Sum over a group, each of whose ranks uses the sum for a part of the loss of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather(rows: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """[P * num_rows, ...]: every rank's rows, padded with zeros, in the order of ranks."""
    before = group.rank() * num_rows
    after = group.size() * num_rows - before - rows.size(0)
    padded = F.pad(rows, (*(0, 0) * (rows.ndim - 1), before, after))
    return cast(Tensor, SumOver.apply(padded, group))


def most_rows(rows: Tensor, group: dist.ProcessGroup) -> int:
    count = torch.tensor(rows.size(0))
    dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
    return int(count)


def shard_of(param: nn.Parameter) -> tuple[Tensor, DeviceMesh]:
    assert isinstance(param, DTensor)
    return param.to_local(grad_placements=param.placements), param.device_mesh


def planned_experts(experts: nn.Module, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """gate_up_proj on (MP: dim 2, EP: dim 0), down_proj on (EP: dim 0): every rank of both sees all their tokens."""
    gate_up, mesh = shard_of(experts.get_parameter("gate_up_proj"))
    down, _ = shard_of(experts.get_parameter("down_proj"))
    (mp, ep), group = cast(list[int], mesh.get_coordinate()), mesh._flatten().get_group()
    num_rows = most_rows(hidden_TH, group)
    tokens, weights = gather(hidden_TH, num_rows, group), gather(weights_TK, num_rows, group)
    chosen = gather(index_TK, num_rows, group)
    own_columns = slice(mp * gate_up.size(2), (mp + 1) * gate_up.size(2))
    partial = torch.einsum("th,eih->eti", tokens[:, own_columns], gate_up)
    gate, up = cast(Tensor, SumOver.apply(partial, mesh.get_group("MP"))).chunk(2, dim=-1)
    out = torch.einsum("eti,ehi->eth", F.silu(gate) * up, down)
    own_experts = torch.arange(ep * down.size(0), (ep + 1) * down.size(0))
    routed = (weights * (chosen == own_experts[:, None, None])).sum(-1)  # [e, t]
    # The MP ranks of an expert have the same outputs: each gives those of its own tokens, so that down_proj's gradient
    # on each is a part of it, which FSDP sums (MP isn't an axis of down_proj's own).
    owner = torch.arange(group.size()).repeat_interleave(num_rows) // mesh.size(1)
    out = ((routed * (owner == mp)).unsqueeze(-1) * out).sum(0)
    whole = cast(Tensor, SumOver.apply(out, group))
    start = group.rank() * num_rows
    return whole[start : start + hidden_TH.size(0)]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, planned_experts)


class OverEncoded(nn.Module):
    """Token embeddings plus a large table of bigrams, looked up by a hash of a token and the one before it."""

    def __init__(self, embed: nn.Embedding, num_rows: int) -> None:
        super().__init__()
        self.weight = embed.weight
        self.over_encoded = nn.Embedding(num_rows, embed.embedding_dim)
        self.padding_idx = None

    def forward(self, ids: Tensor) -> Tensor:
        before = F.pad(ids, (1, 0))[:, :-1]
        return F.embedding(ids, self.weight) + self._look_up((before * 31 + ids * 7) % self.over_encoded.num_embeddings)

    def _look_up(self, rows: Tensor) -> Tensor:
        if not isinstance(self.over_encoded.weight, DTensor):
            return F.embedding(rows, self.over_encoded.weight)
        table, mesh = shard_of(self.over_encoded.weight)
        group, flat = mesh.get_group(), rows.flatten()
        num_rows = most_rows(flat, group)
        # Which rows every rank of the group wants; each adds those it has.
        wanted = gather(flat, num_rows, group) - mesh.get_local_rank() * table.size(0)
        is_here = (wanted >= 0) & (wanted < table.size(0))
        found = F.embedding(wanted.clamp(0, table.size(0) - 1), table) * is_here.unsqueeze(-1)
        start = group.rank() * num_rows
        return cast(Tensor, SumOver.apply(found, group))[start : start + flat.numel()].view(*rows.shape, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Experts over EP and MP, with FSDP and HSDP.
# ---------------------------------------------------------------------------------------------------------------------
def use_planned_experts(model: PreTrainedModel) -> None:
    for module in find_experts(model).values():
        experts = cast(Any, module)
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation = EXPERTS_FUNCTION


def batches_of(rank: int, world_size: int, reference: Reference) -> list[Any]:
    shares = share_documents(reference.documents, Cell(world_size=world_size), rank)
    return [build_batch(documents, "padded") for documents in shares]


def run_planned(rank: int, sizes: tuple[int, ...], shards_dense: bool, reference: Reference) -> dict[str, Any]:
    root = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    model = build_on_meta(reference.folder, attn_implementation="sdpa", dtype=torch.float32)
    use_planned_experts(model)
    apply_plan(model, PLAN, {"EP": root["EP"], "MP": root["MP"]})
    everyone = root[AXES]._flatten() if shards_dense else None
    fully_shard_planned(model, root, SUM, shard="F", replicate=("R", "MP", "EP"), dense_mesh=everyone)
    gate_up = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert isinstance(gate_up, DTensor) and gate_up.device_mesh.mesh_dim_names == AXES
    assert gate_up.placements == (Replicate(), Shard(1), Shard(2), Shard(0))
    return compare_loaded(model, batches_of(rank, root.size(), reference), reference)


def compare_loaded(model: PreTrainedModel, batches: list[Any], reference: Reference) -> dict[str, Any]:
    meshes = build_meshes("cpu")
    materialize(model, torch.device("cpu"))
    load_weights(model, reference.folder)
    model.train()
    errors = measure_gradients(model, batches, meshes, reference)
    for name in OPTIMIZERS:
        load_weights(model, reference.folder)
        errors[name] = two_steps(model, batches, name, reference)
    return errors


def two_steps(model: PreTrainedModel, batches: list[Any], name: str, reference: Reference) -> tuple[float, str]:
    meshes = build_meshes("cpu")
    optimizer = cast(Optimizer, ShardOptimizer(OPTIMIZERS[name], model.parameters()))
    for _ in range(NUM_STEPS):
        assert train_step(model, batches, optimizer, None, meshes, max_grad_norm=None).is_finite
    return worst(dict(model.named_parameters()), reference.weights[name])


@pytest.mark.parametrize(
    ("sizes", "shards_dense"),
    [
        ((1, 2, 2, 2), True),
        pytest.param((2, 1, 2, 2), False, marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 2), True, marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 1), False, marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 2), True, marks=pytest.mark.slow),
    ],
)
def test_experts_on_two_meshes(
    sizes: tuple[int, ...], shards_dense: bool, run_ranks: RunRanks, reference_root: Path
) -> None:
    world_size = torch.Size(sizes).numel()
    reference = load_reference(Case(), reference_root)
    for errors in run_ranks(run_planned, world_size, sizes, shards_dense, reference):
        assert_within_tolerance(errors)


# ---------------------------------------------------------------------------------------------------------------------
# An over-encoded embedding on a mesh of its own: MP and EP flattened.
# ---------------------------------------------------------------------------------------------------------------------
NUM_BIGRAMS = 48
OVER_ENCODED = {"OE": {"*.over_encoded.weight": 0}}


def build_over_encoded(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = references.build_config(Case())
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float()
    references._spread_routers(model)
    model.model.embed_tokens = OverEncoded(model.model.embed_tokens, NUM_BIGRAMS)
    nn.init.normal_(model.model.embed_tokens.over_encoded.weight, std=0.06)
    return cast(PreTrainedModel, model)


def over_encoded_reference() -> tuple[int, Reference]:
    """A seed, and what one process computes with it."""
    documents = references.build_documents(Case())
    for seed in range(50):
        result = references._run(build_over_encoded(seed), documents)
        if result is not None:
            return seed, Reference(Path(), False, documents, **result)
    raise AssertionError("no seed keeps the routes apart")


def run_over_encoded(rank: int, sizes: tuple[int, ...], seed: int, reference: Reference) -> dict[str, Any]:
    root = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    meshes = {"EP": root["EP"], "MP": root["MP"], "OE": root["MP", "EP"]._flatten("OE")}

    def build() -> PreTrainedModel:
        model = build_over_encoded(seed)  # whole, and equal on every rank
        use_planned_experts(model)
        apply_plan(model, PLAN | OVER_ENCODED, meshes)
        fully_shard_planned(model, root, SUM, shard="F", replicate=("R", "MP", "EP"))
        table = model.get_parameter("model.embed_tokens.over_encoded.weight")
        assert isinstance(table, DTensor)
        assert tuple(table.device_mesh.shape) == (sizes[0], sizes[1], sizes[2] * sizes[3])
        assert table.placements == (Replicate(), Shard(1), Shard(0))
        return model.train()

    batches = batches_of(rank, root.size(), reference)
    errors = measure_gradients(build(), batches, build_meshes("cpu"), reference)
    return errors | {name: two_steps(build(), batches, name, reference) for name in OPTIMIZERS}


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 2, 2),
        pytest.param((1, 2, 1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_over_encoded_embedding(sizes: tuple[int, ...], run_ranks: RunRanks) -> None:
    seed, reference = over_encoded_reference()
    for errors in run_ranks(run_over_encoded, torch.Size(sizes).numel(), sizes, seed, reference):
        assert_within_tolerance(errors)


# ---------------------------------------------------------------------------------------------------------------------
# A caller's own mesh of four axes: experts split over ep, and equal over expert_cp, whose ranks hold other tokens.
# ---------------------------------------------------------------------------------------------------------------------
OWN_AXES = ("edp", "efsdp", "ep", "expert_cp")


def run_own_mesh(rank: int, sizes: tuple[int, ...], uses_rules: bool, reference: Reference) -> dict[str, Any]:
    root = init_device_mesh("cpu", sizes, mesh_dim_names=OWN_AXES)
    everyone = root[OWN_AXES]._flatten()
    model = build_on_meta(reference.folder, attn_implementation="sdpa", dtype=torch.float32)
    expert_parallelize_modules(model, root["ep"], ExpertPlan())
    others, experts = ("edp", "expert_cp"), set[nn.Parameter]()
    if not uses_rules:
        experts = expert_fully_shard_modules(model, build_fsdp_mesh(root, "efsdp", others), ExpertPlan(), SUM)
    fully_shard_planned(
        model,
        root,
        SUM,
        shard="efsdp",
        replicate=("edp", "ep", "expert_cp"),
        dense_mesh=everyone,
        ignored_params=experts,
    )
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(down, DTensor) and down.placements == (Replicate(), Shard(1), Shard(0))
    assert tuple(down.device_mesh.shape) == (sizes[0] * sizes[3], sizes[1], sizes[2])
    return compare_loaded(model, batches_of(rank, root.size(), reference), reference)


@pytest.mark.parametrize(
    ("sizes", "uses_rules"),
    [
        ((1, 2, 2, 2), False),
        ((1, 1, 2, 2), True),
        pytest.param((1, 2, 2, 2), True, marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 2), False, marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 2), True, marks=pytest.mark.slow),
    ],
)
def test_experts_replicated_over_expert_cp(
    sizes: tuple[int, ...], uses_rules: bool, run_ranks: RunRanks, reference_root: Path
) -> None:
    reference = load_reference(Case(), reference_root)
    for errors in run_ranks(run_own_mesh, torch.Size(sizes).numel(), sizes, uses_rules, reference):
        assert_within_tolerance(errors)
