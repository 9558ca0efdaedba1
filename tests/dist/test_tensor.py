"""Tensor parallelism's parts alone: what is gathered and summed, the loss over shared columns, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from moesaic.meshes import build_meshes
from moesaic.ops.runs import gather_runs, share_runs, sum_runs
from moesaic.parallel.apply import ParallelOptions, parallelize
from moesaic.parallel.outer import find_text_blocks
from moesaic.parallel.tensor import VocabularyShard, apply_tensor_parallel
from moesaic.train.losses import token_loss_sum
from tests.families.configs import tiny_config
from tests.oracle.reference import Case, build_config
from tests.pool import RunRanks


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gather_and_sum(rank: int, dim: int) -> tuple[bool, ...]:
    """Whether values and gradients are those of concatenation (gathered, shared), and of a sum that is cut."""
    size = dist.get_world_size()
    wholes = torch.randn(size, 4, 4 * size, 3, generator=torch.Generator().manual_seed(0))
    wholes = wholes.movedim(2, 1 + dim)
    runs = [whole.chunk(size, dim)[rank] for whole in wholes]
    mine = runs[0].clone().requires_grad_()
    gathered = gather_runs(mine, world(), dim)
    weights = wholes[1 % size] * (rank + 1)
    (gathered * weights).sum().backward()
    total = sum(wholes[1 % size] * (other + 1) for other in range(size))
    assert isinstance(total, Tensor) and mine.grad is not None
    is_gathered = torch.equal(gathered, wholes[0])
    has_gradient = torch.allclose(mine.grad, total.chunk(size, dim)[rank])

    own = runs[0].clone().requires_grad_()
    shared = share_runs(own, world(), dim)
    (shared * wholes[1 % size]).sum().backward()
    assert own.grad is not None
    is_shared = torch.equal(shared, wholes[0]) and torch.equal(own.grad, runs[1 % size])

    part = wholes[rank].clone().requires_grad_()
    run = sum_runs(part, world(), dim)
    (run * runs[0]).sum().backward()
    assert part.grad is not None
    is_summed = torch.allclose(run, wholes.sum(0).chunk(size, dim)[rank])
    return is_gathered, has_gradient, is_shared, is_summed, torch.equal(part.grad, wholes[0])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_runs_are_gathered_and_summed_with_their_gradients(run_ranks: RunRanks, world_size: int, dim: int) -> None:
    assert run_ranks(gather_and_sum, world_size, dim) == [(True,) * 5] * world_size


def loss_of_columns(rank: int, vocabulary: int) -> tuple[float, float]:
    """Relative errors of the loss and of the own columns' gradients."""
    logits = 5 * torch.randn(2, 7, vocabulary, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, vocabulary, (2, 7), generator=torch.Generator().manual_seed(1))
    labels[0, 2:5] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    (0.5 * expected).backward()
    chunk = -(-vocabulary // dist.get_world_size())
    own = logits[..., rank * chunk : (rank + 1) * chunk].clone().requires_grad_()
    loss = token_loss_sum(own, labels, VocabularyShard(group=world(), first=rank * chunk, size=vocabulary))
    (0.5 * loss).backward()
    assert own.grad is not None and whole.grad is not None
    grad = whole.grad[..., rank * chunk : (rank + 1) * chunk]
    return abs(loss.item() / expected.item() - 1), ((own.grad - grad).abs().max() / grad.abs().max()).item()


@pytest.mark.parametrize("vocabulary", [12, 11])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_loss_of_columns_is_the_loss_of_whole_logits(run_ranks: RunRanks, world_size: int, vocabulary: int) -> None:
    for loss_error, grad_error in run_ranks(loss_of_columns, world_size, vocabulary):
        assert loss_error < 1e-6 and grad_error < 1e-5


def loss_without_labels(rank: int) -> tuple[float, bool]:
    own = torch.randn(1, 3, 4).requires_grad_()
    loss = token_loss_sum(own, torch.full((1, 3), -100), VocabularyShard(group=world(), first=4 * rank, size=8))
    loss.backward()
    assert own.grad is not None
    return loss.item(), bool((own.grad == 0).all())


def test_no_labels_are_no_loss(run_ranks: RunRanks) -> None:
    assert run_ranks(loss_without_labels, 2) == [(0.0, True)] * 2


def loss_of_an_unknown_label(rank: int, label: int) -> float:
    shard = VocabularyShard(group=world(), first=4 * rank, size=8)
    return token_loss_sum(torch.zeros(1, 2, 4), torch.tensor([[1, label]]), shard).item()


@pytest.mark.parametrize("label", [8, -1])
def test_a_label_of_no_column_has_no_finite_loss(run_ranks: RunRanks, label: int) -> None:
    assert all(math.isnan(loss) for loss in run_ranks(loss_of_an_unknown_label, 2, label))


def refusal(rank: int, family: str, changes: dict[str, Any], tp_size: int) -> str:
    config = build_config(Case(family=family)) if family in ("qwen3_moe", "qwen2_moe") else tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError) as error:
        apply_tensor_parallel(model, mesh, find_text_blocks(model))
    assert all(type(param) is nn.Parameter for param in model.parameters()), "something was split all the same"
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"num_attention_heads": 3, "num_key_value_heads": 3}, "3 heads"),
        ("qwen3_moe", {"num_attention_heads": 6, "num_key_value_heads": 3}, "3 key and value heads"),
        ("qwen3_moe", {"vocab_size": 1}, "a vocabulary of 1 leaves ranks without rows"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 47}, "gate_proj has 47 outputs"),
        ("olmoe", {"num_key_value_heads": 1}, "1 key and value heads"),
        ("gemma4_text", {}, "embed_tokens_per_layer (Gemma4TextScaledWordEmbedding): a second embedding"),
        ("gpt_oss", {}, "sinks spans the heads"),
    ],
)
def test_what_cannot_be_split_is_named(run_ranks: RunRanks, family: str, changes: dict[str, Any], said: str) -> None:
    (message, _) = run_ranks(refusal, 2, family, changes, 2)
    assert message.startswith("tp_size=2: ") and said in message, message


def ignore_what_is_split(rank: int) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(Case()))
    options = ParallelOptions(fsdp_ignored_modules=("model.layers.*.self_attn",))
    with pytest.raises(ValueError) as error:
        parallelize(model, build_meshes("cpu", tp_size=2), options=options)
    return str(error.value)


def test_what_tp_splits_is_not_kept_whole(run_ranks: RunRanks) -> None:
    (message, _) = run_ranks(ignore_what_is_split, 2)
    assert "model.layers.0.self_attn: tp splits it" in message, message
