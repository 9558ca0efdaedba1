"""Drawing tokens: the distribution is exactly the one that temperature, top-k and top-p define, token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.engines.base import Sampling
from moesaic.engines.sampler import Draft, choose, draft, draw

# 0.4, 0.3, 0.15, 0.1, 0.05 in another order, and one token that cannot come.
PROBABILITIES = (0.1, 0.4, 0.0, 0.05, 0.3, 0.15)
LOGITS = torch.tensor(PROBABILITIES).log()


def exact(sampling: Sampling) -> np.ndarray:
    """The same distribution by hand, in plain numpy."""
    values = np.array(PROBABILITIES) ** (1 / sampling.temperature)
    values /= values.sum()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: sampling.top_k or len(order)]
    values = values * np.isin(range(len(values)), order)
    values /= values.sum()
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += values[token]
        if total >= sampling.top_p:
            break
    values = values * np.isin(range(len(values)), kept)
    return values / values.sum()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_k": 100},
    {"top_p": 0.65},
    {"top_p": 0.05},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 3, "top_p": 0.5},
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_even_numbers_fall_into_the_exact_distribution(setting: dict[str, float]) -> None:
    """The inverse of a distribution, on a grid of N numbers: each token's share is its probability within 1/N."""
    sampling = Sampling(max_tokens=1, **setting)  # type: ignore[arg-type]
    count = 20_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choose(LOGITS.expand(count, -1), grid, sampling)
    shares = torch.bincount(tokens, minlength=len(LOGITS)) / count
    assert np.abs(shares.numpy() - exact(sampling)).max() < 2 / count


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}])
def test_streams_of_noise_draw_the_distribution(setting: dict[str, float]) -> None:
    """Chi-square over first tokens of 4,000 completions of one prompt: each has a stream of its own."""
    sampling = Sampling(max_tokens=1, n=4000, **setting)  # type: ignore[arg-type]
    (drafts,) = draft([[0]], sampling, seed=3, max_length=8)
    draw(LOGITS.expand(4000, -1), drafts, sampling)
    counts = Counter(each.tokens[0] for each in drafts)
    expected = exact(sampling) * 4000
    possible = expected > 0
    assert set(counts) <= set(np.flatnonzero(possible))
    chi_square = sum(
        (counts[token] - expected[token]) ** 2 / expected[token] for token in np.flatnonzero(possible).tolist()
    )
    assert chi_square < 20  # 4 degrees of freedom at most: p = 0.0005
    # Raw: not of the distribution that was drawn from.
    assert {round(each.logprobs[0], 5) for each in drafts if each.tokens[0] == 1} == {round(float(np.log(0.4)), 5)}


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_no_number_draws_what_cannot_come(number: float) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    for setting in SETTINGS:
        token = choose(logits[None], torch.tensor([number], dtype=torch.float64), Sampling(max_tokens=1, **setting))  # type: ignore[arg-type]
        assert int(token) in (1, 3), setting


def test_logits_of_few_bits_are_taken_as_they_are() -> None:
    """A difference of bf16 logits isn't one of bf16: 10.0625 - 0.0123 would be 10.0625."""
    logits = torch.tensor([10.0625, *[0.0123] * 10_000], dtype=torch.bfloat16)
    share = logits.double().softmax(-1)[0].item()
    for number, is_first in ((share - 1e-4, True), (share + 1e-4, False)):
        token = choose(logits[None], torch.tensor([number], dtype=torch.float64), Sampling(max_tokens=1))
        assert (int(token) == 0) == is_first


def test_small_temperatures_are_greedy_and_do_not_overflow() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9], [80.0, -80.0, 79.0]])
    number = torch.tensor([0.9999, 0.9999], dtype=torch.float64)
    for temperature in (0.0, 1e-6, 1e-300):
        assert choose(logits, number, Sampling(max_tokens=1, temperature=temperature)).tolist() == [1, 0]


def logits_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))


def test_a_seed_of_its_own_makes_a_prompt_independent_of_its_place_in_the_call() -> None:
    sampling = Sampling(max_tokens=20)

    def noise(seed: int | tuple[int, ...], *prompts: int) -> list[float]:
        drafts = draft([[prompt] for prompt in prompts], sampling, seed=seed, max_length=64)
        return [each.noise.random() for group in drafts for each in group]

    first, second, third = noise((5, 6, 7), 1, 2, 3)
    assert noise((7, 5), 3, 1) == [third, first] and noise((6,), 2) == [second]
    assert noise((5, 5), 1, 1) == [first, first]
    assert len({first, second, third}) == 3 and len(set(noise(5, 1, 1, 1))) == 3


def test_a_completion_does_not_depend_on_its_batch_mates() -> None:
    sampling = Sampling(max_tokens=20, temperature=1.3, top_k=30, top_p=0.95, n=2)
    prompts = [[1], [2, 3], [4]]

    def run(kept: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        drafts = draft(prompts, sampling, seed=9, max_length=64)
        rows = [drafts[prompt][sample] for prompt, sample in kept]
        for step in range(20):
            logits = torch.stack([logits_of(1, 100 * prompt + step)[0] for prompt, _ in kept])
            draw(logits, rows, sampling)
        return {key: row.tokens for key, row in zip(kept, rows, strict=True)}

    everything = run([(prompt, sample) for prompt in range(3) for sample in range(2)])
    assert len({tuple(tokens) for tokens in everything.values()}) == 6
    for key, tokens in everything.items():
        assert run([key])[key] == tokens
    assert run([(2, 1), (0, 0)]) == {(2, 1): everything[2, 1], (0, 0): everything[0, 0]}


def test_stop_tokens_length_and_rows_that_are_done() -> None:
    sampling = Sampling(max_tokens=3, temperature=0, stop_token_ids=(1, 5))
    drafts = [group[0] for group in draft([[0], [0, 0, 0], [0]], sampling, seed=0, max_length=5)]
    picks = [[2, 2, 1], [2, 2, 2], [9, 5, 9]]
    for step in [[0, 0, 0], [1, 1, 1], [2, 2, 2]]:
        logits = torch.zeros(3, 10)
        for row, column in enumerate(step):
            logits[row, picks[row][column]] = 9.0
        tokens = draw(logits, drafts, sampling)
    assert [each.tokens for each in drafts] == [[2, 2, 1], [2, 2], [9, 5]]
    assert [each.finish_reason for each in drafts] == ["stop", "length", "stop"]  # the second: 5 tokens in all
    assert tokens.tolist() == [1, 0, 0]
    assert [len(each.logprobs) for each in drafts] == [3, 2, 2]


def test_too_long_prompts_and_broken_logits_are_refused() -> None:
    sampling = Sampling(max_tokens=3)
    with pytest.raises(ValueError, match="a prompt has 5 tokens, and the engine's sequences at most 5"):
        draft([[1], [1] * 5], sampling, seed=0, max_length=5)
    (row,) = draft([[1]], sampling, seed=0, max_length=5)
    with pytest.raises(RuntimeError, match="log-probability of nan: the model's logits are broken"):
        draw(torch.full((1, 4), torch.nan), row, sampling)
    assert isinstance(row[0], Draft) and not row[0].tokens
