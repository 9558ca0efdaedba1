"""What is read off logits, beside whole computations in double precision; of shared vocabularies in `tests/dist`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.parallel.tensor import VocabularyShard
from moesaic.rl.logprobs import logprobs_at, token_entropy, token_logprobs, topk_logprobs
from moesaic.train import losses as module

NUM_COLUMNS = 50
SHAPE = (2, 9)
K = 4
QUANTITIES = ("logprobs", "entropy", "at")
# fp32 beside double: rounding of logits of about 8, and of sums of 50 exponentials.
TOLERANCE = 2e-6


def draw(num_columns: int = NUM_COLUMNS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, ids [.., K], and factors that the results are multiplied by: every token another gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(*SHAPE, num_columns, generator=generator)
    labels = torch.randint(0, num_columns, SHAPE, generator=generator)
    labels[0, 3:6] = -100
    ids = torch.randint(0, num_columns, (*SHAPE, K), generator=generator)
    ids[0, 0] = ids[0, 0, 0]  # one token K times
    return logits, labels, ids, torch.randn(*SHAPE, K, generator=generator)


def read(
    quantity: str, logits: Tensor, labels: Tensor, ids: Tensor, shard: VocabularyShard | None, temperature: float
) -> Tensor:
    if quantity == "logprobs":
        return token_logprobs(logits, labels, shard, temperature)
    return (
        token_entropy(logits, shard, temperature)
        if quantity == "entropy"
        else logprobs_at(logits, ids, shard, temperature)
    )


def whole(quantity: str, logits: Tensor, labels: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """By log_softmax, in double."""
    logs = torch.log_softmax(logits.double() / temperature, dim=-1)
    if quantity == "logprobs":
        return torch.where(labels == -100, 0.0, logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0])
    return -(logs.exp() * logs).sum(-1) if quantity == "entropy" else logs.gather(-1, ids)


def errors(quantity: str, rank: int, world_size: int, temperature: float, num_columns: int) -> tuple[float, float]:
    """Largest differences of values, and of the own columns' gradients relative to the largest."""
    logits, labels, ids, factors = draw(num_columns)
    factors = factors if quantity == "at" else factors[..., 0]
    theirs = logits.clone().requires_grad_()
    expected = whole(quantity, theirs, labels, ids, temperature)
    (expected * factors).sum().backward()
    chunk = -(-num_columns // world_size)
    own = slice(rank * chunk, (rank + 1) * chunk)
    shard = None
    if world_size > 1:
        assert dist.group.WORLD is not None
        shard = VocabularyShard(group=dist.group.WORLD, first=rank * chunk, size=num_columns)
    ours = logits[..., own].clone().requires_grad_()
    found = read(quantity, ours, labels, ids, shard, temperature)
    assert found.dtype == torch.float32
    (found * factors).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    difference = (ours.grad - theirs.grad[..., own]).abs().max() / theirs.grad.abs().max()
    return (found - expected).abs().max().item(), difference.item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_values_and_gradients_are_those_of_a_whole_softmax(quantity: str, temperature: float) -> None:
    value, grad = errors(quantity, 0, 1, temperature, NUM_COLUMNS)
    assert value < 4 * TOLERANCE and grad < TOLERANCE


@pytest.mark.parametrize("chunk_numbers", [1, 3 * NUM_COLUMNS, 2**24])
def test_chunks_change_nothing(chunk_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, *_ = draw()
    results = []
    for numbers in (2**24, chunk_numbers):
        monkeypatch.setattr(module, "CHUNK_NUMBERS", numbers)
        own = logits.clone().requires_grad_()
        entropy = token_entropy(own)
        entropy.square().sum().backward()
        results.append((entropy.detach(), own.grad, *topk_logprobs(logits, K)))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("read_off", [token_entropy, lambda logits: logprobs_at(logits, draw()[2])])
def test_only_the_logits_are_kept(read_off: Callable[[Tensor], Tensor]) -> None:
    logits = draw()[0].bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = read_off(logits)
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.dtype for tensor in large] == [torch.bfloat16]
    assert large[0].untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    result.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """The most numbers in fp32 that one operation gives."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            self.numbers = max(self.numbers, found.numel())
        return found


@pytest.mark.parametrize(
    "read_off",
    [
        lambda logits, ids: token_logprobs(logits, ids[..., 0]),
        lambda logits, _: token_entropy(logits),
        logprobs_at,
        lambda logits, _: topk_logprobs(logits, K)[0],
    ],
    ids=["logprobs", "entropy", "at", "topk"],
)
def test_no_softmax_is_there_whole(
    read_off: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in forward nor in backward: two rows at a time."""
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 2 * NUM_COLUMNS)
    logits, _, ids, _ = draw()
    logits = logits.bfloat16().requires_grad_()
    with Largest() as largest:
        found = read_off(logits, ids)
        if found.requires_grad:
            found.sum().backward()
    assert 0 < largest.numbers <= 2 * NUM_COLUMNS < logits.numel()


def test_impossible_tokens_have_no_entropy_and_no_gradient() -> None:
    logits = torch.tensor([[[0.0, 0.0, float("-inf")], [1e4, 0.0, 0.0]]], requires_grad=True)
    entropy = token_entropy(logits)
    entropy.sum().backward()
    assert entropy.tolist() == [[pytest.approx(0.6931472), 0.0]]
    assert logits.grad is not None and bool((logits.grad == 0).all())


def test_the_likeliest_tokens() -> None:
    logits, *_ = draw()
    for temperature in (1.0, 0.7):
        found, ids = topk_logprobs(logits, K, temperature=temperature)
        expected, expected_ids = torch.log_softmax(logits.double() / temperature, dim=-1).topk(K)
        assert torch.equal(ids, expected_ids) and (found - expected).abs().max() < 4 * TOLERANCE


def test_more_tokens_than_there_are() -> None:
    with pytest.raises(ValueError, match="topk=51: the vocabulary has 50 tokens"):
        topk_logprobs(draw()[0], NUM_COLUMNS + 1)
