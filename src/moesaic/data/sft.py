"""Supervised fine-tuning data: a source to tokenized samples, and a report of what became of every row."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from moesaic.data.batch import Sample, shift_labels
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
    Message,
    Rows,
    SampleError,
    column_names,
    detect_format,
    load_rows,
    to_messages,
)

NUM_SHOWN = 20
"""Bad samples that a printed report names; ``DataReport.bad`` has them all."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A row that isn't trained on: its index in the source (blank lines aside, from 0), and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What became of a dataset's rows. ``str(report)`` is what a run logs.

    Attributes:
        source, format_name, masking: where rows came from, their format, how trained tokens are found.
        num_rows: rows read; each is either good or in ``bad``.
        bad: rows left out.
        num_truncated: good rows cut to ``cutoff_len``.
        num_split_tokens: edges of assistant turns that lie inside a token (the whole token is trained).
        num_tokens, num_loss_tokens: over the good rows.
        unused_columns: columns the format doesn't read.
    """

    source: str
    format_name: str
    masking: Masking
    num_rows: int
    bad: tuple[BadSample, ...]
    num_truncated: int
    num_split_tokens: int
    num_tokens: int
    num_loss_tokens: int
    unused_columns: tuple[str, ...]

    @property
    def num_good(self) -> int:
        """num_rows - len(bad)."""
        return self.num_rows - len(self.bad)

    def __str__(self) -> str:
        end = (
            "none: the model can't learn to stop"
            if self.masking.end_of_turn is None
            else repr(self.masking.end_of_turn)
        )
        lines = [
            f"{self.source}: {self.num_good} of {self.num_rows} samples, format {self.format_name}",
            f"  {self.num_tokens} tokens, {self.num_loss_tokens} trained; {self.num_truncated} samples truncated",
            f"  trained tokens found by method {self.masking.method!r}; end of turn: {end}",
        ]
        if self.num_split_tokens:
            lines.append(f"  {self.num_split_tokens} edges of assistant turns lie inside a token")
        if self.unused_columns:
            lines.append(f"  columns not used: {', '.join(self.unused_columns)}")
        if self.bad:
            lines.append(f"  {len(self.bad)} bad samples left out:")
            lines += [f"    sample {bad.index}: {bad.reason}" for bad in self.bad[:NUM_SHOWN]]
        if len(self.bad) > NUM_SHOWN:
            rest = Counter(bad.reason for bad in self.bad[NUM_SHOWN:])
            lines += [f"    {count} more: {reason}" for reason, count in rest.most_common(NUM_SHOWN)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SftDataset:
    """Tokenized samples, held in memory: 8 bytes a token, ids and labels as 32-bit numbers."""

    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def build_sft_dataset(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    split: str = "train",
    format_name: str = "auto",
) -> tuple[SftDataset, DataReport]:
    """Read, convert and tokenize a dataset; samples longer than ``cutoff_len`` tokens lose their end.

    Args:
        source: file, folder or name (:func:`load_rows`).
        tokenizer: with a chat template; without one, only prompt/completion data can be used.
        cutoff_len: longest sample, in tokens.
        split: for folders and names.
        format_name: a key of ``FORMATS``, or ``auto``: told from the columns.

    Raises:
        ValueError: the source can't be read, its format isn't known, or it has no good sample.
    """
    return build_sft_dataset_from_rows(
        load_rows(source, split=split), tokenizer, cutoff_len, source=source, format_name=format_name
    )


def build_sft_dataset_from_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    source: str = "rows",
    format_name: str = "auto",
) -> tuple[SftDataset, DataReport]:
    """:func:`build_sft_dataset` of rows that are already in memory; ``source`` is their name in messages."""
    if cutoff_len < 2:
        raise ValueError(f"cutoff_len={cutoff_len}: must be at least 2, one token to read and one to predict")
    if len(rows) == 0:
        raise ValueError(f"dataset {source!r} is empty")
    columns = column_names(rows)
    format_name = detect_format(columns, format_name)
    masking, encode = _choose_encoder(tokenizer, format_name)
    samples: list[Sample] = []
    bad: list[BadSample] = []
    num_truncated = num_split_tokens = 0
    for index in range(len(rows)):
        try:
            encoded = encode(to_messages(rows[index], format_name))
            sample = _cut(encoded, cutoff_len)
        except SampleError as error:
            bad.append(BadSample(index, str(error)))
            continue
        samples.append(sample)
        num_truncated += len(encoded.input_ids) > cutoff_len
        num_split_tokens += encoded.num_split_tokens
    known = {*FORMATS[format_name].required, *FORMATS[format_name].optional}
    report = DataReport(
        source=source,
        format_name=format_name,
        masking=masking,
        num_rows=len(rows),
        bad=tuple(bad),
        num_truncated=num_truncated,
        num_split_tokens=num_split_tokens,
        num_tokens=sum(len(sample) for sample in samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        unused_columns=tuple(sorted(columns - known)),
    )
    if not samples:
        raise ValueError(f"dataset {source!r} has no good sample\n{report}")
    return SftDataset(tuple(samples)), report


def choose_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's pad token, else its eos token: padding carries no loss and no real token attends to it.

    Raises:
        ValueError: it has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ValueError("the tokenizer has neither a pad_token nor an eos_token: set one in the model's folder")


def _choose_encoder(
    tokenizer: PreTrainedTokenizerBase, format_name: str
) -> tuple[Masking, Callable[[Sequence[Message]], Encoded]]:
    if format_name == "prompt_completion" and not tokenizer.chat_template:
        masking = build_completion_masking(tokenizer)
        return masking, lambda messages: encode_completion(tokenizer, messages[0].content, messages[1].content)
    masking = build_masking(tokenizer)
    return masking, lambda messages: encode_chat(tokenizer, messages, masking)


def _cut(encoded: Encoded, cutoff_len: int) -> Sample:
    input_ids = encoded.input_ids[:cutoff_len]
    labels = shift_labels(input_ids, encoded.trained[:cutoff_len])
    sample = Sample(input_ids=array("i", input_ids), labels=array("i", labels))
    if sample.num_loss_tokens == 0:
        raise SampleError(
            f"nothing left to learn: no assistant token within the first cutoff_len={cutoff_len} "
            f"of {len(encoded.input_ids)} tokens"
        )
    return sample
