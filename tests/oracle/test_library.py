"""The parts as a library: the expert engine under a caller's FSDP2; several models and meshes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import moesaic
from moesaic.meshes import build_meshes
from moesaic.parallel import ExpertPlan, FSDPPlan, expert_fully_shard_modules, expert_parallelize_modules
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.specs import find_spec
from moesaic.train.losses import token_loss_sum
from tests.oracle.cells import TOLERANCES, Cell, build_batch, full, rel_error, share_documents, worst
from tests.oracle.reference import Case, Reference, build_config, load_reference
from tests.pool import RunRanks


def load_whole(reference: Reference) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def engine_under_plain_fsdp(rank: int, ep_size: int, reference: Reference) -> tuple[float, str]:
    """Meshes, model, outer FSDP2 and loop are the caller's; its FSDP averages, its loss is each rank's own share."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // ep_size, ep_size), mesh_dim_names=("efsdp", "ep"))
    dp_mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    model = load_whole(reference)
    plan = ExpertPlan.from_spec(find_spec(model.config.model_type))
    expert_parallelize_modules(model, mesh["ep"], plan)
    # FSDP's default is the mean over its ranks, so the experts' has to be one as well.
    ignored = expert_fully_shard_modules(model, mesh["efsdp"], plan, FSDPPlan(gradient_reduction="mean"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=dp_mesh, ignored_params=ignored)
    fully_shard(model, mesh=dp_mesh, ignored_params=ignored)

    (documents,) = share_documents(reference.documents, Cell(world_size=world_size), rank)
    batch = build_batch(documents, "padded")
    num_tokens = sum(document.num_loss_tokens for document in reference.documents)
    loss = token_loss_sum(model(**batch.model_inputs()).logits, batch.labels) / num_tokens
    (loss * world_size).backward()
    norm = moesaic.clip_grad_norm_(model.parameters(), max_norm=1e-3).item()
    scale = 1e-3 / (norm + 1e-6)
    assert abs(norm - reference.norms[2.0]) <= TOLERANCES["norms"] * norm, (norm, reference.norms)
    clipped = {name: grad * scale for name, grad in reference.grads.items()}
    return worst({name: param.grad for name, param in model.named_parameters()}, clipped)


@pytest.mark.parametrize(("world_size", "ep_size"), [(2, 2), (4, 2), (4, 4)])
def test_engine_under_a_plain_outer_fsdp(
    world_size: int, ep_size: int, run_ranks: RunRanks, reference_root: Path
) -> None:
    reference = load_reference(Case(family="qwen2_moe"), reference_root)
    for error in run_ranks(engine_under_plain_fsdp, world_size, ep_size, reference):
        assert error[0] <= TOLERANCES["grads"], error


def two_models_two_meshes(rank: int, first: Reference, second: Reference) -> list[tuple[float, str]]:
    """Two families on two topologies, and a plain model that shares a config: forwards interleaved, then backwards."""
    pairs = [(first, build_meshes("cpu", ep_size=4)), (second, build_meshes("cpu", ep_size=2))]
    models = [from_pretrained(reference.folder, meshes) for reference, meshes in pairs]
    plain = AutoModelForCausalLM.from_config(models[0].config, dtype=torch.float32)
    assert plain.config._experts_implementation != "moesaic"
    losses = []
    for model, (reference, _) in zip(models, pairs, strict=True):
        (batch,) = (build_batch(d, "padded") for d in share_documents(reference.documents, Cell(world_size=4), rank))
        num_tokens = sum(document.num_loss_tokens for document in reference.documents)
        losses.append(token_loss_sum(model(**batch.model_inputs()).logits, batch.labels) / num_tokens)
    assert plain(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    for loss in reversed(losses):
        loss.backward()
    return [
        worst({name: param.grad for name, param in model.named_parameters()}, reference.grads)
        for model, (reference, _) in zip(models, pairs, strict=True)
    ]


def test_two_models_on_two_meshes_in_one_process(run_ranks: RunRanks, reference_root: Path) -> None:
    first, second = (load_reference(Case(family=family), reference_root) for family in ("qwen3_moe", "qwen2_moe"))
    for errors in run_ranks(two_models_two_meshes, 4, first, second):
        assert all(error[0] <= TOLERANCES["grads"] for error in errors), errors


def describe_state(rank: int, reference: Reference) -> tuple[dict[str, str], float, str]:
    """Placements by state-dict key; the worst difference of gathered values; what a second parallelization says."""
    meshes = build_meshes("cpu", ep_size=2)
    model = from_pretrained(reference.folder, meshes)
    state = model.state_dict()
    whole = load_whole(reference).state_dict()
    assert list(state) == list(whole)
    assert all(isinstance(value, DTensor) for value in state.values())
    difference = max(rel_error(full(value), whole[name]) for name, value in state.items())
    try:
        moesaic.parallelize(model, meshes, find_spec("qwen3_moe"))
    except ValueError as error:
        return {name: str(value.placements) for name, value in state.items()}, difference, str(error)
    return {}, difference, "not refused"


def test_state_dict_keeps_its_keys_and_holds_dtensors(run_ranks: RunRanks, reference_root: Path) -> None:
    for placements, difference, refusal in run_ranks(describe_state, 4, load_reference(Case(), reference_root)):
        assert placements["model.layers.0.mlp.experts.gate_up_proj"] == "(Shard(dim=1), Shard(dim=0))"
        assert placements["model.layers.0.mlp.gate.weight"] == "(Shard(dim=0),)"
        assert difference == 0.0
        assert "already parallelized" in refusal


def refused(rank: int, ep_size: int, num_experts: int) -> str:
    model = AutoModelForCausalLM.from_config(build_config(Case(num_experts=num_experts)))
    mesh = init_device_mesh("cpu", (ep_size,), mesh_dim_names=("ep",))
    try:
        expert_parallelize_modules(model, mesh, ExpertPlan.from_spec(find_spec("qwen3_moe")))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_a_rank_without_experts_is_refused(run_ranks: RunRanks) -> None:
    (message, *_) = run_ranks(refused, 4, 4, 9)
    assert "9 experts" in message and "nearest legal: 3 or 5" in message, message


def ignore_half_of_a_tie(rank: int, reference: Reference) -> str:
    options = ParallelOptions(fsdp_ignored_modules=("model.embed_tokens",))
    try:
        from_pretrained(reference.folder, build_meshes("cpu", ep_size=2), options=options)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_a_tie_is_not_broken_silently(run_ranks: RunRanks, reference_root: Path) -> None:
    (message, _) = run_ranks(ignore_half_of_a_tie, 2, load_reference(Case(tied=True), reference_root))
    assert "model.embed_tokens.weight is tied to lm_head.weight" in message, message


def parallelize_dense_modules(rank: int, reference: Reference) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    try:
        expert_parallelize_modules(load_whole(reference), mesh, ExpertPlan(modules="model.layers.*.self_attn"))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_modules_that_are_not_at_the_seam_are_refused(run_ranks: RunRanks, reference_root: Path) -> None:
    (message, _) = run_ranks(parallelize_dense_modules, 2, load_reference(Case(), reference_root))
    assert "not at transformers' experts seam" in message and message.count("(Qwen3MoeAttention)") == 2, message


def norms_with_a_nan(rank: int) -> tuple[float, float]:
    """The last rank's gradient has a NaN: inf-norm and 2-norm."""
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, float("nan")]), mesh, [Shard(0)])
    inf_norm, norm = (moesaic.clip_grad_norm_([param], None, p).item() for p in (float("inf"), 2.0))
    return inf_norm, norm


def test_no_rank_misses_a_nan(run_ranks: RunRanks) -> None:
    for inf_norm, norm in run_ranks(norms_with_a_nan, 2):
        assert inf_norm == float("inf") and norm != norm
