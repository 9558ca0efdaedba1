"""bf16, the recipes' own arithmetic, against one process in fp32: no factor is wrong.

Rounding to 8 bits is far above what a different order of summation costs, and it turns some tokens to other experts,
so the bounds are those of one process that computes in bf16 itself: measured here, and printed beside each cell.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.tensor import vocabulary_shard
from moesaic.train.grad_norm import clip_grad_norm_
from moesaic.train.losses import token_loss_sum
from tests.oracle.cells import Cell, build_batch, full, largest, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

# Relative L2 of a tensor: twice what one process in bf16 has there, or this where that is less.
MIN_BOUND = 0.05
# What every bound must stay below: a factor of 2 somewhere, either way, is a relative L2 of at least 0.5.
WRONG_FACTOR = 0.5
MAX_NORM_ERROR = 0.01

COMPUTE = ParallelOptions(compute_dtype=torch.bfloat16)
STORAGE = ParallelOptions(compute_dtype=torch.bfloat16, storage_dtype=torch.bfloat16)

CELLS: dict[str, Cell] = {
    "ep2-efsdp2": Cell(world_size=4, sizes={"ep_size": 2}, options=COMPUTE),
    "ep4": Cell(world_size=4, sizes={"ep_size": 4}, options=COMPUTE),
    "hsdp2-ep2-edp2": Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2}, options=COMPUTE),
    "ep2-efsdp2-stored-in-bf16": Cell(world_size=4, sizes={"ep_size": 2}, options=STORAGE),
    "ep4-stored-in-bf16": Cell(world_size=4, sizes={"ep_size": 4}, options=STORAGE),
    "hsdp2-ep2-edp2-stored-in-bf16": Cell(world_size=4, sizes={"ep_size": 2, "mp_replicate_size": 2}, options=STORAGE),
    "custom-stored-in-bf16": Cell(
        world_size=4, sizes={"ep_size": 2}, options=replace(STORAGE, fsdp_implementation="custom")
    ),
    "fsdp-ep2-tp2": Cell(world_size=4, sizes={"ep_size": 2, "tp_size": 2}, options=COMPUTE),
    "ep4-cp2-tp2-stored-in-bf16": Cell(
        world_size=4, sizes={"ep_size": 4, "cp_size": 2, "tp_size": 2}, options=STORAGE, layout="packed"
    ),
}


def l2_error(ours: Tensor, reference: Tensor) -> float:
    """|a - b| / |b| in fp32, of the whole tensor: a few tokens that went to other experts don't decide it alone."""
    assert ours.shape == reference.shape
    return ((ours.float() - reference).norm() / reference.norm()).item()


@dataclass(frozen=True, slots=True)
class Errors:
    """|norm / reference - 1|, and each gradient's relative L2."""

    norm: float
    grads: dict[str, float]

    def __str__(self) -> str:
        error, name = largest(self.grads)
        median = statistics.median(self.grads.values())
        return f"norm off by {self.norm:.1e}, relative L2 median {median:.3f}, worst {error:.3f} ({name})"


def compare(grads: dict[str, Tensor], norm: float, reference: Reference) -> Errors:
    assert grads.keys() == reference.grads.keys(), grads.keys() ^ reference.grads.keys()
    l2 = {name: l2_error(grad, reference.grads[name]) for name, grad in grads.items()}
    return Errors(abs(norm / reference.norms[2.0] - 1), l2)


def run_cell(rank: int, cell: Cell, reference: Reference) -> Errors:
    """One backward of our model."""
    meshes = build_meshes("cpu", **cell.sizes)
    model = from_pretrained(reference.folder, meshes, options=cell.options, attn_implementation="sdpa")
    assert {param.dtype for param in model.parameters()} == {cell.options.storage_dtype}
    (documents,) = share_documents(reference.documents, cell, rank)
    grads = gradients(model, shard_batch(build_batch(documents, cell.layout), meshes), reference)
    return compare(grads, clip_grad_norm_(model.parameters(), None).item(), reference)


def gradients(model: PreTrainedModel, batch: Batch, reference: Reference) -> dict[str, Tensor]:
    """Whole gradients of sum of token losses / global tokens."""
    num_tokens = sum(document.num_loss_tokens for document in reference.documents)
    logits = model(**batch.model_inputs()).logits
    assert logits.dtype == torch.bfloat16
    (token_loss_sum(logits, batch.kept_labels, vocabulary_shard(model)) / num_tokens).backward()
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


@pytest.fixture(scope="module")
def reference(reference_root: Path) -> Reference:
    return load_reference(Case(num_documents=16), reference_root)


@pytest.fixture(scope="module")
def floor(reference: Reference) -> Errors:
    """Plain transformers in bf16, one process, all documents in one padded batch."""
    model = AutoModelForCausalLM.from_pretrained(
        reference.folder, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
    )
    grads = gradients(model.train(), build_batch(reference.documents, "padded"), reference)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten().float() for grad in grads.values()])).item()
    return compare(grads, norm, reference)


@pytest.mark.parametrize("name", CELLS)
def test_bf16_is_as_close_to_fp32_as_one_process_in_bf16(
    name: str, run_ranks: RunRanks, reference: Reference, floor: Errors
) -> None:
    cell = CELLS[name]
    bounds = {tensor: max(MIN_BOUND, 2 * error) for tensor, error in floor.grads.items()}
    assert max(bounds.values()) < WRONG_FACTOR, f"one process in bf16 is too far off to judge by: {floor}"
    for errors in run_ranks(run_cell, cell.world_size, cell, reference):
        print(f"{name}: {errors}; one process: {floor}")
        too_large = {tensor: error for tensor, error in errors.grads.items() if not error <= bounds[tensor]}
        assert not too_large, f"{too_large}; {errors}; one process: {floor}"
        assert errors.norm <= MAX_NORM_ERROR, f"{errors}; one process: {floor}"


def test_a_wrong_factor_on_one_tensor_is_noticed(reference: Reference) -> None:
    for factor in (0.5, 2.0):
        for name in reference.grads:
            grads = {**reference.grads, name: reference.grads[name] * factor}
            assert compare(grads, reference.norms[2.0], reference).grads[name] >= WRONG_FACTOR * (1 - 1e-6)
