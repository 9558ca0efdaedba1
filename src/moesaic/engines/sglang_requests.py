"""What is asked of an SGLang server to generate, and how its answers are read."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.engines.base import FinishReason, Sampling
from moesaic.engines.server import ServerError
from moesaic.engines.vllm import FINISH_REASONS


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedLayers:
    """What SGLang's answers don't say of the experts in them: they come for every layer, and without a shape.

    Attributes:
        moe: numbers of the layers that have experts, ascending.
        num_layers: of the model.
        top_k: experts per token.
    """

    moe: tuple[int, ...]
    num_layers: int
    top_k: int


@dataclass(slots=True, kw_only=True)
class Draft:
    """A completion in the making: one request, or several, where the server stopped before it was to.

    Attributes:
        seed: None where the server ignores it.
        version: of the weights that made the first token.
        experts: as the server wrote them, of the whole sequence.
    """

    prompt: list[int]
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: str = ""
    experts: str | None = None
    finish_reason: FinishReason | None = None

    def take(self, answer: Mapping[str, Any], sampling: Sampling, max_prompt: int | None) -> None:
        """Add what the server made. ``finish_reason`` stays None where the completion is to go on.

        Args:
            max_prompt: the longest that the server takes.

        Raises:
            ServerError: log-probabilities aren't there, or of other tokens; or the model's output is broken.
        """
        meta, tokens = answer["meta_info"], answer["output_ids"]
        entries = meta.get("output_token_logprobs") or []
        if [entry[1] for entry in entries] != tokens or not all(isinstance(entry[0], float | int) for entry in entries):
            raise ServerError(
                f"{len(tokens)} tokens came with log-probabilities of other tokens, or without: {entries[:4]}"
            )
        self.tokens += tokens
        self.logprobs += [float(entry[0]) for entry in entries]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        self.version = self.version or spans[0]["version"]
        self.experts = meta.get("routed_experts")
        reason = meta["finish_reason"]
        if reason["type"] == "stop" and reason.get("matched") not in sampling.stop_token_ids:
            if not isinstance(reason.get("matched"), int):
                raise ServerError(f"a completion ended by {reason}: the model's output is broken.")
            is_full = max_prompt is not None and len(self.prompt) + len(self.tokens) > max_prompt
            self.finish_reason = "length" if is_full or len(self.tokens) >= sampling.max_tokens else None
        else:
            self.finish_reason = FINISH_REASONS[reason["type"]]


def sampling_values(sampling: Sampling, num_done: int, seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters, all that could come from elsewhere written out.

    Args:
        num_done: tokens that the completion has already.
    """
    return {
        "max_new_tokens": sampling.max_tokens - num_done,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        # It would also switch off the stop tokens that are given.
        "ignore_eos": not sampling.stop_token_ids,
        "no_stop_trim": True,
        "n": 1,
        **({} if seed is None else {"sampling_seed": seed}),
    }


def decode_experts(text: str | None, routed: RoutedLayers, num_positions: int) -> Tensor:
    """Routed experts as the server writes them: base64 of int32 ``[num_positions, num_layers, top_k]``, all layers.

    Returns:
        int32 ``[num_positions, len(routed.moe), top_k]``.

    Raises:
        ServerError: none, or not as many.
    """
    values = np.frombuffer(base64.b64decode(text or ""), dtype=np.int32)
    shape = (num_positions, routed.num_layers, routed.top_k)
    if values.size != num_positions * routed.num_layers * routed.top_k:
        raise ServerError(f"routed experts: {values.size} numbers came, which isn't {' x '.join(map(str, shape))}")
    return torch.from_numpy(values.reshape(shape)[:, list(routed.moe)].copy())
