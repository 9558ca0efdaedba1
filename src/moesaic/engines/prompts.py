"""Prompts from a file: lines of text, or rows with a prompt or a conversation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from moesaic.data.formats import UnreadableRow, load_rows

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
NUM_PROBLEMS = 5
MESSAGE_KEYS = ("role", "content")

Turns = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """``asked``: text, which the model is to go on with; or the turns of a conversation, whose next is the model's."""

    asked: str | Turns


def read_prompts(path: Path, *, limit: int | None = None, is_chat: bool = False) -> list[Prompt]:
    """The prompts of a file, in order: of ``.txt`` each line that isn't blank; of rows ``prompt`` (text, or turns), or
    ``messages`` (turns). Turns of the assistant at the end are cut off: they are what the model is asked for.

    Args:
        limit: so many rows, from the start.
        is_chat: a prompt that is text becomes a user's turn.

    Raises:
        ValueError: no such file, another kind, none in it, or rows that have neither; the first of them named.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"prompts={str(path)!r}: a file that ends in {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise ValueError(f"prompts={str(path)!r}: no such file.")
    prompts, problems = [], []
    for number, row in enumerate(_rows(path, limit), start=1):
        try:
            prompts.append(to_prompt(row, is_chat))
        except ValueError as error:
            problems.append(f"row {number}: {error}")
    if problems:
        more = f"\nand {len(problems) - NUM_PROBLEMS} more" if len(problems) > NUM_PROBLEMS else ""
        raise ValueError(f"prompts={str(path)!r}:\n" + "\n".join(problems[:NUM_PROBLEMS]) + more)
    if not prompts:
        raise ValueError(f"prompts={str(path)!r}: no prompt in it.")
    return prompts


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids: text as the tokenizer makes it (with its own beginning of text), turns by the chat template.

    Raises:
        ValueError: turns, and no chat template, or one that refuses them; a prompt of no tokens.
    """
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            encoded.append(encode_one(prompt, tokenizer)[1])
        except ValueError as error:
            raise ValueError(f"prompt {number} {error}") from error
    return encoded


def encode_one(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """The text that the model is to go on with (turns as the chat template writes them), and its token ids.

    Raises:
        ValueError: as ``encode``; the message goes on after the prompt's name.
    """
    is_text = isinstance(prompt.asked, str)
    text = prompt.asked if isinstance(prompt.asked, str) else _render(prompt.asked, tokenizer)
    ids = cast(list[int], tokenizer(text, add_special_tokens=is_text)["input_ids"])  # templates write their own
    if not ids:
        raise ValueError(f"is no token at all to the tokenizer: {prompt.asked!r}.")
    return text, ids


def own_stops(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """Tokens that end what the model of ``folder`` writes: as its tokenizer and its generation settings say."""
    stops: list[int] = []
    own: Any = tokenizer.eos_token_id
    stops += [] if own is None else [own]
    if (folder / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
        stops += [] if own is None else own if isinstance(own, list) else [own]
    return tuple(dict.fromkeys(stops))


def _render(turns: Turns, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "is a conversation, and the model's tokenizer has no chat_template; use a model that was trained to chat, "
            "or prompts of plain text."
        )
    try:
        return cast(str, tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
        raise ValueError(f"is refused by the chat template: {error}") from error


def _rows(path: Path, limit: int | None) -> list[Any]:
    if path.suffix == ".txt":
        rows: Any = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        rows = load_rows(str(path))
    return list(itertools.islice(rows, limit))


def to_prompt(row: Any, is_chat: bool) -> Prompt:
    """The prompt of one row, as ``read_prompts`` reads it.

    Raises:
        ValueError: it has none.
    """
    if isinstance(row, UnreadableRow):
        raise ValueError(row.reason)
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    asked = row.get("prompt") or row.get("messages")
    if isinstance(asked, str):
        return Prompt(asked=[{"role": "user", "content": asked}] if is_chat else asked)
    if not isinstance(asked, list):
        raise ValueError(f"has {', '.join(row) or 'nothing'}; needs prompt (text, or turns) or messages (turns)")
    if not all(
        isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in MESSAGE_KEYS) for turn in asked
    ):
        raise ValueError("each turn needs role and content, both text")
    turns = [{key: turn[key] for key in MESSAGE_KEYS} for turn in asked]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise ValueError("no turn before the assistant's")
    return Prompt(asked=turns)
