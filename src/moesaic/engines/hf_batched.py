"""Engine ``hf``, one way of two: transformers' ``generate`` on left-padded batches.

Tokens are drawn by ``sampler.draw`` in the place of transformers' own sampling: it gets the raw logits, and hands back
a distribution with one token in it, which ``generate`` then takes greedily. So log-probabilities are of the model's own
distribution, and each completion has noise of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from moesaic.engines.base import RanksApart, Sampling
from moesaic.engines.routed import RoutedExperts
from moesaic.engines.sampler import Draft, draw
from moesaic.runtime import PeerFailed

Pieces = dict[int, list[tuple[int, Tensor]]]
"""By ``id`` of a draft: (first position, routed experts from there on)."""


@torch.no_grad()
def generate_batched(
    model: PreTrainedModel,
    drafts: Sequence[Draft],
    sampling: Sampling,
    *,
    max_batch_tokens: int,
    max_length: int,
    recorder: RoutedExperts | None,
    group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None = None,
) -> Pieces:
    """Complete all ``drafts``, in place. With a ``group`` (the ranks of a parallelized model) every rank of it must
    call, and all go through the same number of forwards: a rank that is done computes on until all are.

    Args:
        tp_group: ranks with the same drafts, that must draw the same tokens.
        max_batch_tokens: rows times the longest sequence that a batch may grow to; a batch has one row at least.
        max_length: of prompt and completion together.

    Raises:
        RanksApart: with a ``group``, what this rank alone came to in a forward, e.g. that it has no memory left.
    """
    batches = list(cut_batches(drafts, max_batch_tokens))
    num_batches, num_steps = _largest([len(batches), max(each.max_tokens for each in drafts)], model.device, group)
    pieces: Pieces = {}
    with own_generation(model) as config, _positions_below(max_length, model):
        config.max_new_tokens = num_steps
        for index in range(num_batches):
            rows = batches[index] if index < len(batches) else [_idle(drafts[0])]
            _run_batch(model, rows, sampling, config, recorder, group, tp_group, pieces)
    return pieces


def cut_batches(drafts: Sequence[Draft], max_batch_tokens: int) -> Iterator[list[Draft]]:
    """Drafts of like length together, longest first: so there is little padding, and the first batch is the largest."""
    batch: list[Draft] = []
    longest = 0
    for each in sorted(drafts, key=lambda each: -len(each.prompt)):
        longest = max([longest, len(each.prompt) + each.max_tokens])
        if batch and (len(batch) + 1) * longest > max_batch_tokens:
            yield batch
            batch, longest = [], len(each.prompt) + each.max_tokens
        batch.append(each)
    yield batch


@contextmanager
def own_generation(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """The model in evaluation mode, and settings for ``generate`` that its folder's generation_config.json, which
    ``generate`` would merge into any, has no say in."""
    config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
    before, modes = model.generation_config, {module: module.training for module in model.modules()}
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield config
    finally:
        model.generation_config = before
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _positions_below(limit: int, model: PreTrainedModel) -> Iterator[None]:
    """A row that is done computes on until its batch is: not beyond a table of positions, nor to where some rotary
    embeddings turn to other frequencies, for all rows."""

    def clamp(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else {**kwargs, "position_ids": positions.clamp(max=limit - 1)}

    handle = model.register_forward_pre_hook(clamp, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _run_batch(
    model: PreTrainedModel,
    rows: list[Draft],
    sampling: Sampling,
    config: GenerationConfig,
    recorder: RoutedExperts | None,
    group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
    pieces: Pieces,
) -> None:
    longest = max(len(each.prompt) for each in rows)
    ids = torch.tensor([[0] * (longest - len(each.prompt)) + list(each.prompt) for each in rows], device=model.device)
    real = torch.tensor([[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in rows])
    chooser = _Draw(rows, sampling, recorder, longest, pieces, is_alone=group is None, tp_group=tp_group)
    criterion = _AllDone(rows, group, chooser)
    try:
        cast(Any, model).generate(
            input_ids=ids,
            attention_mask=real.to(model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([criterion]),
            synced_gpus=False,
        )
    except Exception as error:
        if group is None or criterion.have_all_failed:
            raise
        raise RanksApart(f"generate failed on one rank of several: {type(error).__name__}: {error}") from error


class _Draw:
    """As a logits processor: draws, and leaves ``generate`` no choice.

    Attributes:
        error: what went wrong, where there are other ranks: they must know before it is raised.
    """

    def __init__(
        self,
        rows: list[Draft],
        sampling: Sampling,
        recorder: RoutedExperts | None,
        longest: int,
        pieces: Pieces,
        *,
        is_alone: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        self.error: Exception | None = None
        self._rows, self._sampling, self._recorder, self._pieces = rows, sampling, recorder, pieces
        self._longest, self._is_alone, self._tp_group = longest, is_alone, tp_group

    def __call__(self, input_ids: Tensor, scores_BV: Tensor) -> Tensor:
        try:
            if self._recorder is not None:
                self._keep(self._recorder.take(), input_ids.size(1))
            tokens_B = draw(scores_BV, self._rows, self._sampling, self._tp_group)
        except Exception as error:
            if self._is_alone:
                raise
            self.error = error
            return scores_BV
        return torch.full_like(scores_BV, -torch.inf).scatter_(-1, tokens_B[:, None], 0)

    def _keep(self, routed: Tensor, length: int) -> None:
        """``routed``: of the whole padded prompts in the first forward, then of one position each."""
        routed = routed.unflatten(0, (len(self._rows), -1))
        first = length - routed.size(1)
        for row, each in zip(routed, self._rows, strict=True):
            if not each.is_done:
                padding = self._longest - len(each.prompt)
                piece = (max(0, first - padding), row[padding:] if first == 0 else row)
                self._pieces.setdefault(id(each), []).append(piece)


class _AllDone(StoppingCriteria):
    """Every row of every rank is done: all ranks stop, or fail, after the same forward.

    Attributes:
        have_all_failed: an error was raised on all ranks.
    """

    def __init__(self, rows: list[Draft], group: dist.ProcessGroup | None, chooser: _Draw) -> None:
        self.have_all_failed = False
        self._rows, self._group, self._chooser = rows, group, chooser

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        is_open = any(not each.is_done for each in self._rows)
        if self._group is not None:
            error = self._chooser.error
            num_open, num_failed = _largest([int(is_open), int(error is not None)], input_ids.device, self._group)
            is_open = num_open > 0
            if num_failed:
                self.have_all_failed = True
                raise error or PeerFailed("generate failed on another rank; its own message says why")
        return torch.full((input_ids.size(0),), not is_open, device=input_ids.device)


def _largest(numbers: list[int], device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """Of all ranks, each number for itself."""
    if group is None:
        return numbers
    values = torch.tensor(numbers, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return cast(list[int], values.tolist())


def _idle(like: Draft) -> Draft:
    """A row for a rank that has no batch left while others do."""
    return Draft(prompt=like.prompt[:1], max_tokens=1, noise=like.noise, finish_reason="aborted")
