"""A second oracle: transformers' own FSDP2 and expert parallelism, gradient by gradient, where it supports the cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.train.losses import token_loss_sum
from tests.oracle.cells import TOLERANCES, Cell, build_batch, full, grads_of, share_documents, worst
from tests.oracle.reference import Reference, load_reference
from tests.oracle.test_parity import CELLS
from tests.pool import RunRanks

# What it can't do, and why no comparison is possible there.
UNSUPPORTED = {
    "hsdp2-ep4-edp1": "its experts are replicated as often as the dense parameters",
    "edp2-ep2": "the same",
    "7-experts-ep4": "refuses experts that don't divide by ep",
    "7-experts-ep2-efsdp2": "the same",
    "7-experts-ep2-efsdp3-strided": "the same",
    "more-shards-than-experts": "loading fails on the rank whose dim-0 shard is empty, and the others hang",
    "ignored-modules-are-replicated": "has no such option",
}
SUPPORTED = sorted(set(CELLS) - set(UNSUPPORTED))
# Run by `make test`: one of each kind of axes, experts, batch and family; the rest by `make test-slow`.
SAMPLE = {
    "ep4-efsdp1-all-ranks-are-ep",
    "ep2-efsdp2",
    "hsdp2-ep2-efsdp2-8-ranks",
    "path-a-7-experts",
    "expert-and-rank-receive-nothing",
    "accumulation-4",
    "checkpointed-ep4-packed",
    "qwen2-shared-expert-ep2",
    "hybrid-ep2",
}


def gradients(model: Any, batches: list[Any], scale: float) -> dict[str, torch.Tensor]:
    """Gradients of sum of token losses / global tokens, times ``scale``, over all micro-batches."""
    num_tokens = torch.stack([(batch.labels != -100).sum() for batch in batches]).sum()
    dist.all_reduce(num_tokens)
    for batch in batches:
        (token_loss_sum(model(**batch.model_inputs()).logits, batch.kept_labels) / num_tokens * scale).backward()
    return grads_of(model)


def compare(rank: int, cell: Cell, reference: Reference) -> tuple[float, str]:
    """Worst error of our gradients against transformers' on the same ranks and batches."""
    batches = [build_batch(docs, cell.layout) for docs in share_documents(reference.documents, cell, rank)]
    replicas = cell.sizes.get("mp_replicate_size", 1)
    config = DistributedConfig(
        fsdp_size=cell.world_size // replicas, dp_replicate_size=replicas, ep_size=cell.sizes.get("ep_size", 1)
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        reference.folder, distributed_config=config, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    # Its gradients are means over the data-parallel ranks, ours are sums.
    expected = {name: full(grad) for name, grad in gradients(theirs, batches, scale=cell.world_size).items()}
    ours = from_pretrained(reference.folder, build_meshes("cpu", **cell.sizes), options=cell.options)
    actual = gradients(ours, batches, scale=1.0)
    return worst(actual, expected)


def refusal(rank: int, ep_size: int, reference: Reference) -> str:
    """What transformers says to this many experts and ranks."""
    config = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=ep_size)
    try:
        AutoModelForCausalLM.from_pretrained(reference.folder, distributed_config=config, dtype=torch.float32)
    except Exception as error:  # which one it raises is its own affair
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize("name", ["7-experts-ep4", "7-experts-ep2-efsdp2"])
def test_experts_that_do_not_divide_are_refused(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    """Of the reasons above, the one that can be shown without a hang."""
    assert name in UNSUPPORTED
    case, cell = CELLS[name]
    ep_size = cell.sizes["ep_size"]
    for said in run_ranks(refusal, cell.world_size, ep_size, load_reference(case, reference_root)):
        assert said == f"ValueError: Cannot evenly shard 7 experts across {ep_size} expert-parallel ranks."


def test_the_list_of_unsupported_cells_is_about_existing_cells() -> None:
    assert set(UNSUPPORTED) <= set(CELLS) and set(SAMPLE) <= set(SUPPORTED)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in SUPPORTED])
def test_gradients_equal_those_of_transformers(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, cell = CELLS[name]
    for error in run_ranks(compare, cell.world_size, cell, load_reference(case, reference_root)):
        assert error[0] <= TOLERANCES["grads"], error
