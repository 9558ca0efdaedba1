"""A source to tokenized samples held in memory, and a report of what became of every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from moesaic.data.batch import Sample
from moesaic.data.chat import Masking
from moesaic.data.encode import Stage, build_row_encoder, columns_of, unused_columns
from moesaic.data.formats import Rows, SampleError, load_rows

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
        num_cut: good rows longer than ``cutoff_len``: truncated, or under ``pt`` split into several samples, whole.
        num_samples: samples made of the good rows: one each, but for split ones.
        num_split_tokens: edges of assistant turns that lie inside a token (the whole token is trained).
        num_tokens, num_loss_tokens: over the samples.
        unused_columns: columns the format doesn't read.
    """

    source: str
    format_name: str
    masking: Masking
    num_rows: int
    bad: tuple[BadSample, ...]
    num_cut: int
    num_samples: int
    num_split_tokens: int
    num_tokens: int
    num_loss_tokens: int
    unused_columns: tuple[str, ...]

    @property
    def num_good(self) -> int:
        """num_rows - len(bad)."""
        return self.num_rows - len(self.bad)

    @property
    def _cut_text(self) -> str:
        if self.masking.method == "text":
            return f"{self.num_cut} long documents split: {self.num_samples} samples"
        return f"{self.num_cut} samples truncated"

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.num_good} of {self.num_rows} rows, format {self.format_name}",
            f"  {self.num_tokens} tokens, {self.num_loss_tokens} trained; {self._cut_text}",
            f"  {describe_masking(self.masking)}",
        ]
        if self.num_split_tokens:
            lines.append(f"  {self.num_split_tokens} edges of assistant turns lie inside a token")
        if self.unused_columns:
            lines.append(f"  columns not used: {', '.join(self.unused_columns)}")
        if self.bad:
            lines.append(f"  {len(self.bad)} bad samples left out:")
        return "\n".join([*lines, *list_bad(self.bad, "sample")])


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """Tokenized samples, held in memory: 8 bytes a token, ids and labels as 32-bit numbers."""

    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def build_dataset(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    stage: Stage = "sft",
    split: str = "train",
    format_name: str = "auto",
) -> tuple[TokenizedDataset, DataReport]:
    """Read, convert and tokenize a dataset. Beyond ``cutoff_len``, conversations lose their end; documents are split.

    Args:
        source: file, folder or name (:func:`load_rows`).
        tokenizer: with a chat template; without one, only prompt/completion data and text can be used.
        cutoff_len: longest sample, in tokens.
        stage: ``sft``: conversations, the assistant's tokens are trained; ``pt``: text, all tokens are.
        split: for folders and names.
        format_name: a key of ``FORMATS``, or ``auto``: told from the columns; under ``pt``, ``text``.

    Raises:
        ValueError: the source can't be read, its format isn't known, or it has no good sample.
    """
    return build_dataset_from_rows(
        load_rows(source, split=split), tokenizer, cutoff_len, stage=stage, source=source, format_name=format_name
    )


def build_dataset_from_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    stage: Stage = "sft",
    source: str = "rows",
    format_name: str = "auto",
) -> tuple[TokenizedDataset, DataReport]:
    """:func:`build_dataset` of rows that are already in memory; ``source`` is their name in messages."""
    if len(rows) == 0:
        raise ValueError(f"dataset {source!r} is empty")
    columns = columns_of(rows[index] for index in range(len(rows)))
    encoder = build_row_encoder(stage, tokenizer, cutoff_len, columns=columns, format_name=format_name)
    samples: list[Sample] = []
    bad: list[BadSample] = []
    num_cut = num_split_tokens = 0
    for index in range(len(rows)):
        try:
            encoded = encoder.encode(rows[index])
        except SampleError as error:
            bad.append(BadSample(index, str(error)))
            continue
        samples += encoded.samples
        num_cut += encoded.is_cut
        num_split_tokens += encoded.num_split_tokens
    report = DataReport(
        source=source,
        format_name=encoder.format_name,
        masking=encoder.masking,
        num_rows=len(rows),
        bad=tuple(bad),
        num_cut=num_cut,
        num_samples=len(samples),
        num_split_tokens=num_split_tokens,
        num_tokens=sum(len(sample) for sample in samples),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        unused_columns=unused_columns(columns, encoder),
    )
    if not samples:
        raise ValueError(f"dataset {source!r} has no good sample\n{report}")
    return TokenizedDataset(tuple(samples)), report


def choose_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's pad token, else its eos token: padding carries no loss and no real token attends to it.

    Raises:
        ValueError: it has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ValueError("the tokenizer has neither a pad_token nor an eos_token: set one in the model's folder")


def list_bad(bad: Sequence[BadSample], name: str) -> list[str]:
    """Lines of a report: the first ``NUM_SHOWN`` with their reasons, of the others how many have which.

    Args:
        name: what a row is called.
    """
    lines = [f"    {name} {each.index}: {each.reason}" for each in bad[:NUM_SHOWN]]
    rest = Counter(each.reason for each in bad[NUM_SHOWN:])
    return lines + [f"    {count} more: {reason}" for reason, count in rest.most_common(NUM_SHOWN)]


def describe_masking(masking: Masking) -> str:
    """Which tokens are trained, in a sentence of the report."""
    if masking.method == "text":
        return f"every token is trained; documents end with {masking.end_of_turn!r}"
    end = "none: the model can't learn to stop" if masking.end_of_turn is None else repr(masking.end_of_turn)
    return f"trained tokens found by method {masking.method!r}; end of turn: {end}"
