"""Engine ``hf``, the other way: transformers' continuous batching, where a completion that ends makes room at once.

One manager per call, so that keys and values never outlive it; without sharing of prefixes, which would serve those of
earlier weights. Tokens are drawn by ``sampler.draw``, in the place of the manager's logits processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from moesaic.engines.base import Sampling
from moesaic.engines.hf_batched import Pieces, own_generation
from moesaic.engines.routed import RoutedExperts
from moesaic.engines.sampler import Draft, draw
from moesaic.model.buffers import random_state_kept

PAGE_TOKENS = 16
# Tokens in one forward, at most. The attention mask has a row for each, as long as all pages together.
MAX_QUERY_TOKENS = 512


@torch.no_grad()
def generate_continuous(
    model: PreTrainedModel,
    drafts: Sequence[Draft],
    sampling: Sampling,
    *,
    max_batch_tokens: int,
    recorder: RoutedExperts | None,
) -> Pieces:
    """Complete all ``drafts``, in place, on a model that is whole in this process.

    Args:
        max_batch_tokens: tokens whose keys and values are kept at a time, at most; room for one sequence at least.

    Raises:
        RuntimeError: the manager failed; with its reason.
    """
    pages = [-(-(len(each.prompt) + each.max_tokens) // PAGE_TOKENS) + 1 for each in drafts]
    settings = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=max(max(pages), min(sum(pages), max_batch_tokens // PAGE_TOKENS)),
        max_batch_tokens=MAX_QUERY_TOKENS,
        max_requests_per_batch=min(len(drafts), MAX_QUERY_TOKENS),
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )
    # The manager seeds torch's generators, from which nothing here is drawn, but training is.
    with own_generation(model) as config, random_state_kept(model.device):
        stops = list(sampling.stop_token_ids) or -1
        config.eos_token_id = stops
        chooser = _Draw(drafts, sampling, recorder)
        manager = cast(Any, model).init_continuous_batching(config, settings)
        manager.logit_processor = chooser
        manager.start()
        try:
            for index, each in enumerate(drafts):
                manager.add_request(
                    list(each.prompt), request_id=str(index), max_new_tokens=each.max_tokens, eos_token_id=stops
                )
            _wait(manager, len(drafts))
        finally:
            manager.stop(block=True)
            manager.destroy()
    assert all(each.is_done for each in drafts)
    return chooser.pieces


def refuse_continuous(model: PreTrainedModel) -> str | None:
    """Why continuous batching is not for this model; None where it is."""
    config = model.config.get_text_config()
    try:
        group_layers_by_attn_type(config)
    except ValueError as error:  # layers that aren't attention
        return f"transformers' continuous batching doesn't know this model's layers ({error})"
    return None


def _wait(manager: Any, num_requests: int) -> None:
    while num_requests:
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"continuous batching ended with {num_requests} requests open")
        elif result.error is not None:
            raise RuntimeError(f"continuous batching failed: {result.error}")
        elif result.is_finished():
            num_requests -= 1


class _Draw(ContinuousBatchingLogitsProcessorList):
    """As the manager's logits processors: draws, and leaves it no choice."""

    def __init__(self, drafts: Sequence[Draft], sampling: Sampling, recorder: RoutedExperts | None) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.pieces: Pieces = {}
        self._drafts, self._sampling, self._recorder = drafts, sampling, recorder
        self._batch: list[tuple[Draft, int, int, bool]] = []

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Told before each forward: the requests in it, in the order of their tokens."""
        self._batch = [
            # Its position is beyond the forward's tokens already.
            (self._drafts[int(each.state.request_id)], each.state.position_offset - each.query_length,
             each.query_length, each.has_new_token)
            for each in requests_in_batch
        ]  # fmt: skip
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        if self._recorder is not None:
            routed = self._recorder.take().split([count for _, _, count, _ in self._batch])
            for (each, start, _, _), piece in zip(self._batch, routed, strict=True):
                self.pieces.setdefault(id(each), []).append((start, piece))
        rows = [each for each, _, _, has_new_token in self._batch if has_new_token]
        tokens = draw(scores[: len(rows)], rows, self._sampling)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, 0] = 0  # rows of no request
        chosen[: len(rows)].fill_(-torch.inf).scatter_(-1, tokens[:, None], 0)
        return chosen
