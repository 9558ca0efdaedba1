"""What a caller brings: FSDP2 alone in a loop of their own, and a model family that moesaic doesn't know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

import moesaic
from tests.oracle.cells import TOLERANCES, Cell, build_batch, share_documents, worst
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks


def backward_of_means(model: PreTrainedModel, rank: int, reference: Reference) -> None:
    """Each rank's loss is such that their mean is the step's: what a loop for ``fully_shard``'s averages does."""
    world_size = dist.get_world_size()
    (documents,) = share_documents(reference.documents, Cell(world_size=world_size), rank)
    batch = build_batch(documents, "padded")
    num_tokens = sum(document.num_loss_tokens for document in reference.documents)
    logits = model(**batch.model_inputs()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    (loss * world_size / num_tokens).backward()


def fsdp2_alone(rank: int, reference: Reference) -> tuple[tuple[float, str], tuple[float, str], float]:
    """Errors of gradients and of weights after one step of SGD; the norm."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32, attn_implementation="sdpa")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert moesaic.apply_fsdp2(model.train(), {"mesh": mesh}) is model
    assert all(isinstance(param, DTensor) for param in model.parameters())
    backward_of_means(model, rank, reference)
    grads = worst({name: param.grad for name, param in model.named_parameters()}, reference.grads)
    norm = moesaic.clip_grad_norm_(model.parameters(), None).item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = {name: before[name] - 0.1 * grad for name, grad in reference.grads.items()}
    return grads, worst(dict(model.named_parameters()), expected), norm


@pytest.mark.parametrize("world_size", [2, 4])
def test_apply_fsdp2_under_a_plain_loop(world_size: int, run_ranks: RunRanks, reference_root: Path) -> None:
    reference = load_reference(Case(num_experts=7), reference_root)
    for grads, weights, norm in run_ranks(fsdp2_alone, world_size, reference):
        assert grads[0] <= TOLERANCES["grads"], grads
        assert weights[0] <= TOLERANCES["sgd"], weights
        assert abs(norm / reference.norms[2.0] - 1) <= TOLERANCES["norms"]


class FamilyOfMyOwnConfig(Qwen3MoeConfig):
    """A family that only this file knows; no other test uses its name, for what is registered stays so."""

    model_type = "family_of_my_own"


class FamilyOfMyOwnForCausalLM(Qwen3MoeForCausalLM):
    config_class = FamilyOfMyOwnConfig


def own_family(rank: int, folder: Path, out: Path, reference: Reference) -> tuple[str, tuple[float, str]]:
    """What is said while transformers doesn't know how the files name experts; the worst gradient once it does."""
    AutoConfig.register(FamilyOfMyOwnConfig.model_type, FamilyOfMyOwnConfig)
    AutoModelForCausalLM.register(FamilyOfMyOwnConfig, FamilyOfMyOwnForCausalLM)
    meshes = moesaic.build_meshes("cpu", ep_size=2)
    with pytest.raises(ValueError) as refusal:
        moesaic.from_pretrained(folder, meshes)
    register_checkpoint_conversion_mapping("family_of_my_own", get_checkpoint_conversion_mapping("qwen3_moe"))
    moesaic.register_spec(moesaic.ModelSpec(model_types=("family_of_my_own",), experts="model.layers.*.mlp.experts"))
    model = moesaic.from_pretrained(folder, meshes, attn_implementation="sdpa")
    assert isinstance(model, FamilyOfMyOwnForCausalLM)
    (documents,) = share_documents(reference.documents, Cell(world_size=4), rank)
    num_tokens = sum(document.num_loss_tokens for document in reference.documents)
    batch = build_batch(documents, "padded")
    logits = model(**batch.model_inputs()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    (loss / num_tokens).backward()
    error = worst({name: param.grad for name, param in model.named_parameters()}, reference.grads)
    moesaic.export_hf(model, out)
    return str(refusal.value), error


def test_a_family_of_ones_own(run_ranks: RunRanks, reference_root: Path, tmp_path: Path) -> None:
    reference = load_reference(Case(), reference_root)
    shutil.copytree(reference.folder, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "model_type": "family_of_my_own"}))
    for message, error in run_ranks(own_family, 4, tmp_path / "own", tmp_path / "out", reference):
        assert "model.layers.0.mlp.experts.gate_up_proj" in message, message
        assert error[0] <= TOLERANCES["grads"], error
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in index
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "family_of_my_own"
