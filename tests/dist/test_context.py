"""Ranks that share a sequence: the exchange and its backward, and families' attention beside the whole model's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.data.batch import Sample
from moesaic.data.shard import shard_batch
from moesaic.meshes import Meshes, build_meshes
from moesaic.model.build import find_auto_class
from moesaic.ops.head_exchange import heads_to_positions, positions_to_heads
from moesaic.ops.sequence import run_of
from moesaic.parallel.context import Ulysses, apply_context_parallel
from tests.families.configs import FIRST_TOKEN, VOCAB_SIZE, tiny_config
from tests.oracle.cells import build_batch, rel_error
from tests.pool import RunRanks

# Numbers of heads of queries, keys and values; widths of queries and values.
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 8), (8, 2, 8, 4)]
TOLERANCE = 2e-6


def attend(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Causal attention with sinks, written out: [B, H, S, D] -> [B, S, H, D]."""
    assert sinks_H is not None and sinks_H.size(0) == query.size(1)
    key, value = (part.repeat_interleave(query.size(1) // part.size(1), dim=1) for part in (key, value))
    scores = (query @ key.mT).masked_fill(torch.ones(query.size(2), query.size(2)).triu(1).bool(), -torch.inf)
    sinks = sinks_H[None, :, None, None].expand(*scores.shape[:3], 1)
    return (torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1] @ value).transpose(1, 2)


def ulysses_errors(rank: int, cp_size: int, num_query: int, num_key: int, width: int, value_width: int) -> list[float]:
    """Of output and gradients of one mode of 2 rows and 16 positions, beside the same attention computed whole."""
    torch.manual_seed(0)
    shapes = [(num_query, width), (num_key, width), (num_key, value_width)]
    inputs = [torch.randn(2, heads, 16, size, requires_grad=True) for heads, size in shapes]
    sinks, weights = torch.randn(num_query, requires_grad=True), torch.randn(2, 16, num_query, value_width)
    expected = attend(*inputs, sinks)
    whole_grads = torch.autograd.grad((expected * weights).sum(), [*inputs, sinks])

    meshes = build_meshes("cpu", cp_size=cp_size)
    group, index = meshes.data["cp"].get_group(), meshes.data.get_local_rank("cp")
    parts = [run_of(part, index, cp_size, dim=2).detach().requires_grad_() for part in inputs]
    ours = Ulysses(group).attend(*parts, sinks, attend)
    grads = torch.autograd.grad((ours * run_of(weights, index, cp_size, dim=1)).sum(), [*parts, sinks])
    dist.all_reduce(grads[-1], group=group)  # of a parameter that every rank holds whole, as FSDP sums it
    whole = [run_of(expected, index, cp_size, dim=1), *(run_of(g, index, cp_size, dim=2) for g in whole_grads[:-1])]
    return [rel_error(a, b) for a, b in zip((ours, *grads), (*whole, whole_grads[-1]), strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("world_size", "cp_size"), [(2, 2), (4, 4), (4, 2)])
def test_heads_and_positions_change_places(
    world_size: int, cp_size: int, shape: tuple[int, int, int, int], run_ranks: RunRanks
) -> None:
    for errors in run_ranks(ulysses_errors, world_size, cp_size, *shape):
        assert max(errors) <= TOLERANCE, errors


def exchange_once(rank: int) -> list[list[list[int]]]:
    """The docstring's example, there and back; and the way back of other numbers."""
    positions = torch.tensor([[0, 1], [10, 11]]) + 2 * rank
    (whole,) = heads_to_positions([positions[None, :, :, None]], dist.group.WORLD)
    back = positions_to_heads(whole.transpose(1, 2), dist.group.WORLD)
    return [whole[0, :, :, 0].tolist(), back[0, :, :, 0].T.tolist()]


def test_the_example(run_ranks: RunRanks) -> None:
    first, second = run_ranks(exchange_once, 2)
    assert first == [[[0, 1, 2, 3]], [[0, 1], [10, 11]]]
    assert second == [[[10, 11, 12, 13]], [[2, 3], [12, 13]]]


# One of each way in which transformers says which layer has which window, and what else sets attention modules apart.
FAMILIES = {
    "qwen2_moe": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},  # on the module only
    "mixtral": {"sliding_window": 5},  # passed from the config, in all layers
    "cohere2_moe": {},  # passed from the module
    "gemma4_text": {},  # layers of different head widths, keys that are values
    "deepseek_v3": {},  # values of another width
    "glm4v_moe": {},  # a composite, with positions along three axes
    "qwen3_vl_moe": {},
    "muse_spark": {},
}


def family_errors(rank: int, cp_size: int) -> dict[tuple[str, str], float]:
    """Of each family and layout, the largest error of all logits beside those of documents by themselves."""
    meshes = build_meshes("cpu", cp_size=cp_size)
    found = {}
    for family in FAMILIES:
        for layout, error in family_error(family, meshes).items():
            found[family, layout] = error
    return found


@torch.no_grad()
def family_error(family: str, meshes: Meshes) -> dict[str, float]:
    config = tiny_config(family)
    for name, value in FAMILIES[family].items():
        setattr(config, name, value)
    config.get_text_config().initializer_range = 0.06
    torch.manual_seed(0)
    model = find_auto_class(config).from_config(config, experts_implementation="eager").float().eval()
    lengths, documents = (11, 3, 23, 12), []
    for length in lengths:
        ids = torch.randint(FIRST_TOKEN, VOCAB_SIZE, (length,)).tolist()
        documents.append(Sample(input_ids=ids, labels=ids))
    apart = [model(input_ids=torch.tensor([d.input_ids]), use_cache=False).logits[0] for d in documents]
    apply_context_parallel(model, meshes)
    errors = {}
    for layout in ("packed", "padded"):
        part = shard_batch(build_batch(documents, layout), meshes)
        mine = model(**part.model_inputs() | {"logits_to_keep": 0}).logits.contiguous()
        gathered = [torch.empty_like(mine) for _ in range(meshes.data["cp"].size())]
        dist.all_gather(gathered, mine, group=meshes.data["cp"].get_group())
        logits = torch.cat(gathered, dim=1)
        rows = list(logits[0, : sum(lengths)].split(lengths)) if layout == "packed" else list(logits)
        assert logits.isfinite().all()
        errors[layout] = max(
            rel_error(row[:n], expected) for row, n, expected in zip(rows, lengths, apart, strict=True)
        )
    return errors


@pytest.mark.parametrize("cp_size", [2, 4])
def test_families(cp_size: int, run_ranks: RunRanks) -> None:
    for errors in run_ranks(family_errors, cp_size, cp_size):
        assert max(errors.values()) <= TOLERANCE, errors
