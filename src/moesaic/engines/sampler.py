"""Draw tokens from logits: each completion with its own noise, whatever is in the batch beside it.

Sizes: B rows of a batch, V tokens of the vocabulary. One uniform number per token decides, by the inverse of the
cumulative distribution. Example, temperature 1, top_k 0, top_p 1, and a row whose probabilities are 0.5, 0.2, 0.3 (V =
3): the number 0.6 falls behind 0.5 and before 0.7, so it is token 1, with a log-probability of log 0.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.engines.base import FinishReason, Sampling, noise_keys


@dataclass(slots=True, kw_only=True)
class Draft:
    """A completion in the making.

    Attributes:
        prompt: its token ids.
        max_tokens: of this completion: what the caller asked for, or less where the sequence would get too long.
        noise: a stream of its own, from (seed, prompt's index, completion's index); from (prompt's seed, completion's
            index) where each prompt has one.
        finish_reason: None until it is done; from then on nothing is added.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    noise: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


def draft(
    prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int | tuple[int, ...], max_length: int
) -> list[list[Draft]]:
    """``sampling.n`` empty drafts for each prompt, with noise by ``seed``.

    Raises:
        ValueError: a prompt leaves no room for a token within ``max_length``.
    """
    longest = max(map(len, prompts))
    if longest >= max_length:
        raise ValueError(
            f"a prompt has {longest} tokens, and the engine's sequences at most {max_length}, completion included; "
            "shorten it, or give the engine a larger max_length if the model can."
        )
    return [
        [
            Draft(
                prompt=tuple(prompt),
                max_tokens=min(sampling.max_tokens, max_length - len(prompt)),
                noise=np.random.default_rng((*key, sample)),
            )
            for sample in range(sampling.n)
        ]
        for key, prompt in zip(noise_keys(seed, len(prompts)), prompts, strict=True)
    ]


@torch.no_grad()
def draw(
    logits_BV: Tensor, drafts: Sequence[Draft], sampling: Sampling, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The next token of each row, appended to its draft where that isn't done; int64 ``[B]`` on the logits' device.

    A done row gets 0. One wait for the device per call.

    Args:
        group: ranks that have the same rows, and whose logits may differ in the last digits: all take the tokens of
            its first. Every rank of it must call.

    Raises:
        RuntimeError: a row has a token whose log-probability is no number: the model's output is broken.
    """
    uniform = torch.tensor(
        [0.0 if each.is_done else each.noise.random() for each in drafts], dtype=torch.float64, device=logits_BV.device
    )
    tokens_B = choose(logits_BV, uniform, sampling)
    if group is not None:
        dist.broadcast(tokens_B, group_src=0, group=group)
    logprobs_B = logits_BV.float().log_softmax(-1).gather(-1, tokens_B[:, None])[:, 0]
    both = torch.stack((tokens_B.double(), logprobs_B.double())).cpu()
    tokens, logprobs = both[0].long().tolist(), both[1].tolist()
    for row, each in enumerate(drafts):
        if each.is_done:
            tokens[row] = 0
            continue
        if not np.isfinite(logprobs[row]):
            raise RuntimeError(
                f"token {tokens[row]} drawn with a log-probability of {logprobs[row]}: the model's logits are broken"
            )
        each.tokens.append(tokens[row])
        each.logprobs.append(logprobs[row])
        if tokens[row] in sampling.stop_token_ids:
            each.finish_reason = "stop"
        elif len(each.tokens) == each.max_tokens:
            each.finish_reason = "length"
    return torch.tensor(tokens, device=logits_BV.device)


def choose(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> Tensor:
    """int64 ``[B]``: where the numbers (fp64, in [0, 1)) fall in each row's distribution as ``sampling`` shapes it."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    # In fp64, from the largest logit down: no temperature is too small, and 150,000 small terms add up exactly enough.
    exact_BV = logits_BV.double()
    scaled_BV = (exact_BV - exact_BV.amax(-1, keepdim=True)) / sampling.temperature
    order_BV: Tensor | None = None
    num_tokens = logits_BV.size(-1)
    if 0 < sampling.top_k < num_tokens or sampling.top_p < 1:
        scaled_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        scaled_BV = scaled_BV[:, : sampling.top_k or num_tokens]
    mass_BV = scaled_BV.softmax(-1).cumsum(-1)
    total_B = mass_BV[:, -1]
    if sampling.top_p < 1:
        last_B = torch.searchsorted(mass_BV, sampling.top_p * total_B[:, None]).clamp_(max=mass_BV.size(-1) - 1)
        total_B = mass_BV.gather(-1, last_B)[:, 0]
    place_B1 = torch.searchsorted(mass_BV, (uniform_B * total_B)[:, None], right=True)
    # Rounding may put a number just below 1 behind the last token that has any mass.
    last_B1 = torch.searchsorted(mass_BV, total_B[:, None].contiguous())
    place_B1 = torch.minimum(place_B1, last_B1.clamp_(max=mass_BV.size(-1) - 1))
    return (place_B1 if order_BV is None else order_BV.gather(-1, place_B1))[:, 0]
