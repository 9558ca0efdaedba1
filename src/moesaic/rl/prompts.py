"""Data sets to prompts, and the order in which a run asks them.

| format          | columns needed                     | kept for reward functions and environments                    |
|-----------------|------------------------------------|---------------------------------------------------------------|
| `prompt`        | prompt (text, or turns)            | all columns                                                   |
| `verl`          | prompt (turns), data_source,       | all columns                                                   |
|                 | reward_model                       |                                                               |
| `reasoning_gym` | none: the task named makes rows    | question, answer, metadata, options                           |

A prompt that is text is a user's turn where the tokenizer has a chat template, and goes to the model as it is where it
has none. Every row also has ``prompt``, as it was, and ``data_source``: its own, or the data set's path.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from moesaic.config import DatasetConfig
from moesaic.data.dataset import BadSample, list_bad
from moesaic.data.encode import columns_of
from moesaic.data.formats import (
    UNSUPPORTED_ROW_FIELDS,
    UNSUPPORTED_TURN_FIELDS,
    Rows,
    UnreadableRow,
    load_rows,
    refuse_fields,
)
from moesaic.data.mixing import shuffle_indices
from moesaic.data.order import require_same_order
from moesaic.engines.prompts import encode_one, to_prompt
from moesaic.rl.reasoning_tasks import build_task, scorer_problem, stream_rows
from moesaic.rl.reward_functions import ground_truth_of
from moesaic.rl.types import Prompt

COLUMNS: Mapping[str, tuple[str, ...]] = {"verl": ("prompt", "data_source", "reward_model"), "prompt": ("prompt",)}
"""What tells a format, the first that fits."""
HELD_OUT_SEED = 1 << 31
"""Added to the seed of held-out rows: a task's row i of seed s is often its row 0 of seed s + i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """What became of a data set's rows. ``str(report)`` is what a run logs.

    Attributes:
        source, format_name: where rows came from, and their format.
        num_rows: rows read; each is a prompt, or in ``bad``.
        bad: rows left out, those that are too long among them.
        num_too_long: rows of more than ``max_prompt_length`` tokens.
        num_tokens, longest: of the prompts, in all and of one.
    """

    source: str
    format_name: str
    num_rows: int
    bad: tuple[BadSample, ...]
    num_too_long: int
    num_tokens: int
    longest: int

    def __str__(self) -> str:
        num_prompts = self.num_rows - len(self.bad)
        lines = [
            f"{self.source}: {num_prompts} prompts of {self.num_rows} rows, format {self.format_name}",
            f"  {self.num_tokens} tokens, the longest prompt has {self.longest}",
        ]
        if self.bad:
            lines.append(f"  {len(self.bad)} rows left out, {self.num_too_long} of them too long:")
        return "\n".join([*lines, *list_bad(self.bad, "row")])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of all data sets, in their order, and a report for each of these."""

    prompts: tuple[Prompt, ...]
    reports: tuple[PromptReport, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def count_shared(self, other: PromptSet) -> int:
        """Prompts here that ``other`` has too, token for token: held-out ones that are trained on."""
        known = {prompt.tokens for prompt in other.prompts}
        return sum(prompt.tokens in known for prompt in self.prompts)


def build_prompts(
    datasets: Sequence[DatasetConfig],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    seed: int,
    is_held_out: bool = False,
    vocab_size: int | None = None,
) -> PromptSet:
    """Read, or make, and tokenize. Equal on all ranks; nothing is communicated.

    Args:
        max_prompt_length: in tokens; longer ones are left out.
        seed: of the rows that tasks make, where their options have none.
        is_held_out: such rows are others than those of training.
        vocab_size: of the model; None: not checked.

    Raises:
        ValueError: a source that can't be read, or whose format isn't known; one without a good row; tokens beyond the
            model's vocabulary.
    """
    prompts: list[Prompt] = []
    reports = []
    first = 0
    for dataset in datasets:
        rows, problems = _read(dataset, seed + HELD_OUT_SEED if is_held_out else seed)
        made, report = build_prompts_from_rows(
            rows,
            tokenizer,
            max_prompt_length,
            source=dataset.path,
            format_name=dataset.format,
            first_number=first,
            problems=problems,
        )
        prompts += made
        reports.append(report)
        first += len(rows)
    largest = max((max(prompt.tokens) for prompt in prompts), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"token {largest} is beyond the model's vocabulary of {vocab_size}: the tokenizer is of another model, or "
            "has grown. Put the model's own into its folder, or resize its embeddings."
        )
    return PromptSet(prompts=tuple(prompts), reports=tuple(reports))


def build_prompts_from_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    source: str = "rows",
    format_name: str = "auto",
    first_number: int = 0,
    problems: Mapping[int, str] | None = None,
) -> tuple[list[Prompt], PromptReport]:
    """``build_prompts`` of rows that are already in memory; ``source`` is their name in messages.

    Args:
        first_number: of the first row's prompt.
        problems: rows that are known to be bad, and why.

    Raises:
        ValueError: no row, columns of no known format, no good row.
    """
    if len(rows) == 0:
        raise ValueError(f"dataset {source!r} is empty")
    if format_name != "reasoning_gym":
        format_name = _detect_format(columns_of(rows[index] for index in range(len(rows))), format_name, source)
    prompts: list[Prompt] = []
    bad: list[BadSample] = []
    num_too_long = 0
    for index in range(len(rows)):
        reason = (problems or {}).get(index)
        if reason is None:
            try:
                prompt = _build(rows[index], format_name, tokenizer, source, first_number + index)
            except ValueError as error:
                reason = str(error)
            else:
                if len(prompt.tokens) <= max_prompt_length:
                    prompts.append(prompt)
                    continue
                reason = f"longer than max_prompt_length={max_prompt_length}"
                num_too_long += 1
        bad.append(BadSample(index, reason))
    report = PromptReport(
        source=source,
        format_name=format_name,
        num_rows=len(rows),
        bad=tuple(bad),
        num_too_long=num_too_long,
        num_tokens=sum(len(prompt.tokens) for prompt in prompts),
        longest=max((len(prompt.tokens) for prompt in prompts), default=0),
    )
    if not prompts:
        raise ValueError(f"dataset {source!r} has no prompt that can be used\n{report}")
    return prompts, report


def _detect_format(columns: Collection[str], format_name: str, source: str) -> str:
    fitting = [name for name, needed in COLUMNS.items() if set(needed) <= set(columns)]
    if format_name == "auto" and fitting:
        return fitting[0]
    if format_name in fitting:
        return format_name
    known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in COLUMNS.items())
    wanted = "of prompts" if format_name == "auto" else repr(format_name)
    raise ValueError(
        f"dataset {source!r}: columns {sorted(columns)} fit no format {wanted}; formats and their columns: {known}"
    )


def _read(dataset: DatasetConfig, seed: int) -> tuple[Rows, dict[int, str]]:
    """Its rows; of a task's, those that its scorer can't judge, and why."""
    if dataset.format != "reasoning_gym":
        return load_rows(dataset.path, split=dataset.split), {}
    if dataset.size is None:
        raise ValueError(f"dataset {dataset.path!r}: size is not set; a task makes as many rows as it is told.")
    task = build_task(dataset.path, size=dataset.size, seed=seed, options=dataset.options)
    rows = list(stream_rows(task, dataset.path, dataset.options))
    problems = {index: scorer_problem(task, row) for index, row in enumerate(rows)}
    return rows, {index: problem for index, problem in problems.items() if problem is not None}


def _build(row: Any, format_name: str, tokenizer: PreTrainedTokenizerBase, source: str, number: int) -> Prompt:
    """Raises ValueError with the reason for a row that can't be used."""
    if isinstance(row, UnreadableRow):
        raise ValueError(row.reason)
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with columns, got {type(row).__name__}")
    refuse_fields(row, UNSUPPORTED_ROW_FIELDS, "row")
    asked = row.get("prompt")
    if not asked:
        raise ValueError("prompt: missing, or empty")
    turns = asked if isinstance(asked, list) else []
    for place, turn in enumerate(turns):
        if isinstance(turn, Mapping):
            refuse_fields(turn, UNSUPPORTED_TURN_FIELDS, f"prompt[{place}]")
    if turns and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant":
        raise ValueError("prompt: ends with the assistant's turn, and the model can't be made to go on within one")
    if format_name == "verl":
        _check_verl(row)
    text, tokens = encode_one(to_prompt(row, is_chat=bool(tokenizer.chat_template)), tokenizer)
    kept = {**row, "data_source": source if row.get("data_source") is None else row["data_source"]}
    return Prompt(number=number, tokens=tuple(tokens), text=text, row=kept)


def _check_verl(row: Mapping[str, Any]) -> None:
    if not isinstance(row["prompt"], list):
        raise ValueError(f"prompt: expected a list of turns, got {type(row['prompt']).__name__}")
    if not isinstance(row.get("data_source"), str):
        raise ValueError(f"data_source: expected text, got {type(row.get('data_source')).__name__}")
    if not isinstance(row.get("reward_model"), Mapping):
        raise ValueError(f"reward_model: expected an object, got {type(row.get('reward_model')).__name__}")


class PromptOrder:
    """The prompts of a run, without end: epoch by epoch, each a shuffle by (seed, epoch); the same on every rank.

    Steps don't end with epochs. Example, 5 prompts, 2 a step; the second epoch's order is d b a e c::

        epoch 0   c a | e b | d
        epoch 1                 b | a e | c ...       d came up, and was passed over: the step has it already

    Raises:
        ValueError: fewer prompts than a step asks.
    """

    def __init__(self, prompts: Sequence[Prompt], *, global_batch_size: int, seed: int) -> None:
        if len(prompts) < global_batch_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}: a step asks different prompts, and there are {len(prompts)}; "
                "set less, or add data."
            )
        self._prompts = tuple(prompts)
        self._global_batch_size = global_batch_size
        self._identity = {"seed": seed, "num_prompts": len(prompts), "prompts_crc": _crc_of(prompts)}
        self._epoch = 0
        self._index = 0
        self._order = self._shuffle()

    @property
    def epoch(self) -> int:
        """Of the next prompt, from 0."""
        return self._epoch

    @property
    def num_steps_per_epoch(self) -> int:
        """ceil(prompts / global_batch_size)."""
        return -(-len(self._prompts) // self._global_batch_size)

    def next(self, num: int | None = None, *, without: Iterable[Prompt] = ()) -> list[Prompt]:
        """The next ``num`` prompts, all different.

        Args:
            num: None: ``global_batch_size``.
            without: what the step has asked already: passed over where an epoch ends in its midst. Where few others are
                left, fewer are returned, or none.
        """
        numbers = {prompt.number for prompt in without}
        left = sum(prompt.number not in numbers for prompt in self._prompts)
        taken: list[Prompt] = []
        wanted = min(self._global_batch_size if num is None else num, left)
        while len(taken) < wanted:
            prompt = self._prompts[self._order[self._index]]
            self._index += 1
            if self._index == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._shuffle()
            if prompt.number not in numbers:
                numbers.add(prompt.number)
                taken.append(prompt)
        return taken

    def state_dict(self) -> dict[str, int]:
        """The place of the next prompt, equal on all ranks, and what fixes the order."""
        return {"epoch": self._epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there. ``global_batch_size`` may have changed.

        Raises:
            ValueError: the state belongs to other prompts, or answers, or to another seed.
        """
        require_same_order(self._identity, state)
        self._epoch, self._index = state["epoch"], state["index"]
        self._order = self._shuffle()

    def _shuffle(self) -> list[int]:
        return shuffle_indices(len(self._prompts), f"{self._identity['seed']}/{self._epoch}")


def _crc_of(prompts: Sequence[Prompt]) -> int:
    """Of all tokens and right answers, in order: a data set that was corrected is another one."""
    crc = 0
    for prompt in prompts:
        crc = zlib.crc32(array("i", [len(prompt.tokens), *prompt.tokens]), crc)
        crc = zlib.crc32(str(ground_truth_of(prompt.row)).encode(), crc)
    return crc
