"""One row of a source to samples, by stage: a conversation to one (``sft``), a document to all it takes (``pt``).

A document's labels are shifted over the whole of it, before it is cut: the last position of a piece predicts the first
token of the next, so a cut loses no target. Example, ``cutoff_len`` 3 and a document of 4 tokens and eos::

    input_ids  10 11 12 | 13
    labels     11 12 13 | eos      eos, the last token, is a target and predicts nothing

A document that fits is one sample, eos included; a piece of eos alone would have no label and isn't made.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from moesaic.data.batch import IGNORE_INDEX, Sample, shift_labels
from moesaic.data.chat import (
    Encoded,
    Masking,
    build_completion_masking,
    build_masking,
    encode_chat,
    encode_completion,
)
from moesaic.data.formats import (
    FORMATS,
    TEXT,
    Message,
    SampleError,
    check_text_format,
    detect_format,
    to_messages,
    to_text,
)

Stage = Literal["sft", "pt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """Samples of one row.

    Attributes:
        samples: at least one; one document of ``pt`` may be several.
        is_cut: the row was longer than ``cutoff_len``: truncated (``sft``) or split, whole (``pt``).
        num_split_tokens: edges of assistant turns that lie inside a token.
    """

    samples: tuple[Sample, ...]
    is_cut: bool
    num_split_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEncoder:
    """How rows of one source become samples.

    Attributes:
        format_name: their format.
        known_columns: the columns that it reads.
        masking: how trained tokens are found.
        encode: one row to its samples; raises ``SampleError`` for one that can't be trained on.
    """

    format_name: str
    known_columns: frozenset[str]
    masking: Masking
    encode: Callable[[object], EncodedRow]


def build_row_encoder(
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    columns: Iterable[str],
    format_name: str = "auto",
) -> RowEncoder:
    """The encoder of rows that have ``columns``.

    Raises:
        ValueError: the format isn't known or doesn't fit the stage; the tokenizer lacks what it needs.
    """
    if cutoff_len < 2:
        raise ValueError(f"cutoff_len={cutoff_len}: must be at least 2, one token to read and one to predict")
    if stage == "pt":
        check_text_format(columns, format_name)
        return _build_text_encoder(tokenizer, cutoff_len)
    return _build_chat_encoder(tokenizer, cutoff_len, detect_format(columns, format_name))


def _build_chat_encoder(tokenizer: PreTrainedTokenizerBase, cutoff_len: int, format_name: str) -> RowEncoder:
    masking, encode_messages = _choose_chat(tokenizer, format_name)

    def encode(row: object) -> EncodedRow:
        encoded = encode_messages(to_messages(row, format_name))
        return EncodedRow(
            samples=(_truncate(encoded, cutoff_len),),
            is_cut=len(encoded.input_ids) > cutoff_len,
            num_split_tokens=encoded.num_split_tokens,
        )

    known = FORMATS[format_name]
    columns = frozenset({*known.required, *known.optional})
    return RowEncoder(format_name=format_name, known_columns=columns, masking=masking, encode=encode)


def _choose_chat(
    tokenizer: PreTrainedTokenizerBase, format_name: str
) -> tuple[Masking, Callable[[Sequence[Message]], Encoded]]:
    if format_name == "prompt_completion" and not tokenizer.chat_template:
        masking = build_completion_masking(tokenizer)
        return masking, lambda messages: encode_completion(tokenizer, messages[0].content, messages[1].content)
    masking = build_masking(tokenizer)
    return masking, lambda messages: encode_chat(tokenizer, messages, masking)


def _truncate(encoded: Encoded, cutoff_len: int) -> Sample:
    input_ids = encoded.input_ids[:cutoff_len]
    labels = shift_labels(input_ids, encoded.trained[:cutoff_len])
    sample = Sample(input_ids=array("i", input_ids), labels=array("i", labels))
    if sample.num_loss_tokens == 0:
        raise SampleError(
            f"nothing left to learn: no assistant token within the first cutoff_len={cutoff_len} "
            f"of {len(encoded.input_ids)} tokens"
        )
    return sample


def _build_text_encoder(tokenizer: PreTrainedTokenizerBase, cutoff_len: int) -> RowEncoder:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: documents would never end; set one in the model's folder")
    eos_id = int(tokenizer.eos_token_id)

    def encode(row: object) -> EncodedRow:
        input_ids = list(tokenizer(to_text(row), verbose=False)["input_ids"])
        if input_ids[-1:] != [eos_id]:  # a tokenizer may put it there by itself
            input_ids.append(eos_id)
        samples = split_document(input_ids, cutoff_len)
        return EncodedRow(samples=samples, is_cut=len(samples) > 1)

    masking = Masking(method="text", end_of_turn=tokenizer.eos_token, end_of_turn_id=eos_id)
    return RowEncoder(format_name=TEXT, known_columns=frozenset({TEXT}), masking=masking, encode=encode)


def split_document(input_ids: Sequence[int], cutoff_len: int) -> tuple[Sample, ...]:
    """Pieces of at most ``cutoff_len`` tokens; every token but the first is a target once (the module's example).

    Raises:
        SampleError: fewer than two tokens, so that there is nothing to predict.
    """
    if len(input_ids) < 2:
        raise SampleError("a single token: nothing to predict")
    labels = array("i", [*input_ids[1:], IGNORE_INDEX])
    starts = range(0, len(input_ids) - 1, cutoff_len)  # no piece of the last token alone
    ids = array("i", input_ids)
    return tuple(
        Sample(input_ids=ids[start : start + cutoff_len], labels=labels[start : start + cutoff_len]) for start in starts
    )


def unused_columns(columns: Iterable[str], encoder: RowEncoder) -> tuple[str, ...]:
    """Columns that the encoder doesn't read, sorted."""
    return tuple(sorted(set(columns) - encoder.known_columns))


def columns_of(rows: Iterable[object]) -> set[str]:
    """Columns that any of ``rows`` has."""
    return {str(name) for row in rows if isinstance(row, Mapping) for name in row}
