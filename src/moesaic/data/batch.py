"""What a model trains on: one tokenized sample, and one micro-batch of them.

Labels are shifted here, once, while a sample is still a list: position t holds the token that it must predict. A
batch can then be cut along the sequence (context parallelism) without any rank needing a neighbour's first token.

Example, a document of five tokens of which the last two are the assistant's::

    input_ids  10  11  12  13  14
    trained     .   .   .   x   x
    labels   -100 -100  13  14 -100      the last position has no next token in its document
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moesaic.ops.sequence import SequenceLayout

IGNORE_INDEX = -100
"""Label of a position without loss (the value that torch's cross-entropy ignores by default)."""

NO_PLACE = -1
"""Place of a position without a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document: ``input_ids`` and, equally long, ``labels`` already shifted left by one (the module's example).

    Lists, or arrays where a whole dataset is kept: ``array("i")`` takes 4 bytes a number, a list about 8 to 36.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]

    def __post_init__(self) -> None:
        assert len(self.input_ids) == len(self.labels), (len(self.input_ids), len(self.labels))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_loss_tokens(self) -> int:
        """How many positions have a label."""
        return sum(label != IGNORE_INDEX for label in self.labels)


def find_loss_positions(labels: Tensor) -> Tensor:
    """Positions in which some row of ``labels`` [B, S] has a label: [n] int64; one where a batch has no loss at all."""
    positions = (labels != IGNORE_INDEX).any(dim=0).nonzero().flatten()
    return positions if positions.numel() else positions.new_zeros(1)


def shift_labels(input_ids: Sequence[int], trained: Sequence[bool]) -> list[int]:
    """Targets of one document: ``labels[t] = input_ids[t + 1]`` where token t + 1 is trained, else -100.

    The first token is never a target, whether trained or not, and the last position never has one.
    """
    assert len(input_ids) == len(trained), (len(input_ids), len(trained))
    following = zip(input_ids[1:], trained[1:], strict=True)
    return [token if is_trained else IGNORE_INDEX for token, is_trained in following] + [IGNORE_INDEX] * bool(input_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch of one data-parallel rank: B rows of S tokens, int64.

    Attributes:
        input_ids: [B, S].
        labels: [B, S]; ``labels[b, t]`` is the target of position t, -100 where there is no loss. Already shifted.
        position_ids: [B, S]; restart at 0 with each document of a row.
        attention_mask: [B, S], 1 = real, 0 = padding; None where there is none: packed, ``position_ids`` tell documents
            apart, and B is 1, as flash attention in transformers looks for packed documents only in a single row.
        loss_positions: [n], the positions in which some row has a label: logits are computed there alone, and not for
            prompts and padding. None: everywhere.
        is_real: [B, S] bool, the documents' own tokens, without padding; None: where ``attention_mask`` is 1, or all.
            Tensors don't tell it where packed: there padding looks like one more document.
        document_lengths: tokens of each document, padding left out; stays on the host. For measuring only: None where
            nobody will ask.
        places: [B, S]; where there is a label, its flat place in tables beside this batch (in reinforcement learning
            ``b * T + t`` of a step's [B, T] tables, whose B and T are others than here), else ``NO_PLACE``.
        sequence: the whole rows, where this is one rank's part of them (``shard_batch``): S is then the positions of
            this rank's cp index, ``attention_mask`` None, and ``is_real`` [B, S / tp] of the rank's own run.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None = None
    loss_positions: Tensor | None = None
    is_real: Tensor | None = None
    document_lengths: tuple[int, ...] | None = None
    places: Tensor | None = None
    sequence: SequenceLayout | None = None

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        assert len(shape) == 2 and self.labels.shape == shape and self.position_ids.shape == shape, shape
        assert self.attention_mask is None or self.attention_mask.shape == shape, shape
        assert self.places is None or self.places.shape == shape, shape

    @property
    def kept_labels(self) -> Tensor:
        """[B, n]: the labels at ``loss_positions``, where the logits are; all of them without."""
        return self.labels if self.loss_positions is None else self.labels.index_select(1, self.loss_positions)

    @property
    def kept_places(self) -> Tensor:
        """[B, n]: the places at ``loss_positions``, beside ``kept_labels``; for a batch with places only."""
        assert self.places is not None, "the batch has no places"
        return self.places if self.loss_positions is None else self.places.index_select(1, self.loss_positions)

    @property
    def real_tokens(self) -> Tensor:
        """[B, S] bool, of a part [B, S / tp]: see ``is_real``."""
        if self.is_real is not None:
            return self.is_real
        mask = self.attention_mask
        return torch.ones_like(self.input_ids, dtype=torch.bool) if mask is None else mask.bool()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        mask, positions, is_real, places = self.attention_mask, self.loss_positions, self.is_real, self.places
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            labels=self.labels.to(device),
            position_ids=self.position_ids.to(device),
            attention_mask=None if mask is None else mask.to(device),
            loss_positions=None if positions is None else positions.to(device),
            is_real=None if is_real is None else is_real.to(device),
            places=None if places is None else places.to(device),
            sequence=None if self.sequence is None else self.sequence.to(device),
        )

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a transformers model: never the labels, which the model would shift a second time.

        ``use_cache=False`` is part of them because transformers looks for packed documents only where there is no
        cache.
        """
        sequence = {} if self.sequence is None else {"sequence_layout": self.sequence}
        return sequence | {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "use_cache": False,
            "logits_to_keep": 0 if self.loss_positions is None else self.loss_positions,
        }
