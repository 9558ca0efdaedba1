"""A conversation to token ids, and which of them the assistant wrote.

The chat template renders the whole conversation once; that text is tokenized once. What the assistant wrote is found
as spans of characters, by one of two methods:

``generation``
    The template marks it with ``{% generation %}``; transformers reports the marked spans.
``prefix``
    Without marks: turn i begins where the conversation before it, rendered with ``add_generation_prompt=True``, ends,
    and ends where the conversation up to and including it, rendered without, ends. Both must be prefixes of the whole
    text. A template that renders an earlier turn otherwise than the last one (Qwen3 drops its thinking) fails the
    second rule; the turn then ends at its first end-of-turn token.

A character position becomes a token position where tokenizing the text before it gives a prefix of the whole text's
tokens. Where a token lies across the position, that token goes by its character offsets: it is trained if it reaches
into the span. transformers' own ``return_assistant_tokens_mask`` looks up single characters instead, and loses (or
overruns) turns that begin or end with a space on tokenizers that trim offsets.

Each span then ends with the end-of-turn token: blanks after it are cut, and where a template closes its marks before
the token, it is added. Example, ChatML::

    <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
                                                            ^^^^^^^^^^^^^^^      trained
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moesaic.data.formats import Message, SampleError

Span = tuple[int, int]
"""Half-open range, of characters or of tokens."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How trained tokens are found with one tokenizer.

    Attributes:
        method: ``generation`` or ``prefix`` (the module's text); ``completion``: prompt + completion + eos; ``text``:
            all tokens of a document + eos.
        end_of_turn: text of the token that ends an assistant turn; None where the template writes none.
        end_of_turn_id: its id.
    """

    method: Literal["generation", "prefix", "completion", "text"]
    end_of_turn: str | None
    end_of_turn_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Token ids of one conversation and, for each, whether it is trained.

    ``num_split_tokens`` counts boundaries of spans that lie inside a token.
    """

    input_ids: list[int]
    trained: list[bool]
    num_split_tokens: int = 0


def build_masking(tokenizer: PreTrainedTokenizerBase) -> Masking:
    """Choose the method for this tokenizer's chat template and find its end-of-turn token by rendering a short probe.

    Raises:
        ValueError: there is no template, or it can't render one user and one assistant turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat_template: add one to the model's folder, or use data with prompt and completion"
        )
    has_marks = _GENERATION_MARK.search(tokenizer.get_chat_template()) is not None
    method: Literal["generation", "prefix"] = "generation" if has_marks else "prefix"
    masking = Masking(method=method, end_of_turn=None, end_of_turn_id=None)
    probe = [Message("user", "a"), Message("assistant", "b")]
    try:
        text, spans = _find_spans(tokenizer, probe, masking)
        ids = _tokenize(tokenizer, text)
        (start, end), _ = _token_span(tokenizer, text, ids, spans[-1])
    except SampleError as error:
        raise ValueError(f"the chat template can't mark the assistant's turn of a plain pair: {error}") from error
    special = _special_ids(tokenizer)
    last = _last_special(tokenizer, ids, (start, end), special)
    if last is None and method == "generation" and end < len(ids) and ids[end] in special:
        last = end
    token_id = None if last is None else ids[last]
    token = None if token_id is None else tokenizer.decode([token_id])
    return Masking(method=method, end_of_turn=str(token) if token is not None else None, end_of_turn_id=token_id)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], masking: Masking) -> Encoded:
    """Render, tokenize and mark one conversation (``masking`` from :func:`build_masking` of the same tokenizer).

    Raises:
        SampleError: the template refuses the conversation, or the assistant's turns can't be told from the rest.
    """
    for number, message in enumerate(messages):
        if masking.end_of_turn is not None and masking.end_of_turn in message.content:
            raise SampleError(f"the text of turn {number} contains the end-of-turn token {masking.end_of_turn!r}")
    text, spans = _find_spans(tokenizer, messages, masking)
    ids = _tokenize(tokenizer, text)
    special = _special_ids(tokenizer)
    trained = [False] * len(ids)
    num_split_tokens = 0
    for span in spans:
        (start, end), num_split = _token_span(tokenizer, text, ids, span)
        num_split_tokens += num_split
        last = _last_special(tokenizer, ids, (start, end), special)
        if last is not None:
            end = last + 1
        elif masking.end_of_turn_id is not None and end < len(ids) and ids[end] == masking.end_of_turn_id:
            end += 1
        trained[start:end] = [True] * (end - start)
    return Encoded(input_ids=ids, trained=trained, num_split_tokens=num_split_tokens)


def build_completion_masking(tokenizer: PreTrainedTokenizerBase) -> Masking:
    """For prompt and completion without a template.

    Raises:
        ValueError: the tokenizer has no eos token, so a completion would never end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has neither a chat_template nor an eos_token: completions would never end")
    return Masking(method="completion", end_of_turn=tokenizer.eos_token, end_of_turn_id=tokenizer.eos_token_id)


def encode_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> Encoded:
    """``[bos] prompt completion eos``, the last two trained. bos only where the tokenizer itself puts one.

    The two texts are joined as they are: a blank between them must be part of one of them.

    Raises:
        SampleError: the boundary can't be found.
    """
    text = prompt + completion
    ids = _tokenize(tokenizer, text)
    (start, _), num_split = _token_span(tokenizer, text, ids, (len(prompt), len(text)))
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert eos_id is not None, "build_completion_masking checks it"
    head = [bos_id] if bos_id is not None and tokenizer(text)["input_ids"][:1] == [bos_id] else []
    trained = [False] * (len(head) + start) + [True] * (len(ids) - start + 1)
    return Encoded(input_ids=[*head, *ids, eos_id], trained=trained, num_split_tokens=num_split)


# --- spans of characters ---------------------------------------------------------------------------------------------


def _find_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], masking: Masking
) -> tuple[str, list[Span]]:
    """The rendered conversation and the assistant's spans of it."""
    if masking.method == "generation":
        text, spans = _render_marked(tokenizer, messages)
    else:
        text = _render(tokenizer, messages)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        spans = [_turn_span(tokenizer, messages, turn, text, masking.end_of_turn) for turn in turns]
    if not any(start < end for start, end in spans):
        raise SampleError("the chat template renders nothing of the assistant's turns")
    return text, [(start, end) for start, end in spans if start < end]


def _turn_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turn: int, text: str, end_of_turn: str | None
) -> Span:
    before = _render(tokenizer, messages[:turn], add_generation_prompt=True)
    if not text.startswith(before):
        raise SampleError(f"turn {turn}: the text before it, rendered alone, isn't how the whole conversation begins")
    start = len(before)
    through = _render(tokenizer, messages[: turn + 1])
    if text.startswith(through) and len(through) >= start:
        return start, len(through)
    end = text.find(end_of_turn, start) if end_of_turn is not None else -1
    if end_of_turn is None or end < 0:
        raise SampleError(
            f"turn {turn}: rendered differently once other turns follow, and no end-of-turn token ends it"
        )
    return start, end + len(end_of_turn)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            _as_dicts(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise SampleError(f"the chat template refuses it: {error}") from error
    assert isinstance(text, str)
    return text


def _render_marked(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    try:
        # The function behind apply_chat_template, which keeps the spans to itself.
        texts, spans = render_jinja_template(
            conversations=[_as_dicts(messages)],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except TemplateError as error:
        raise SampleError(f"the chat template refuses it: {error}") from error
    return texts[0], [(start, end) for start, end in spans[0]]


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


# --- characters to tokens --------------------------------------------------------------------------------------------


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Templates write their own special tokens.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _token_span(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], span: Span) -> tuple[Span, int]:
    """Tokens of a span of characters, and how many of its two boundaries lie inside a token."""
    exact = [_token_boundary(tokenizer, text, ids, position) for position in span]
    num_split = exact.count(None)
    by_offset = _offset_span(tokenizer, text, ids, span) if num_split else (0, 0)
    start, end = (found if found is not None else other for found, other in zip(exact, by_offset, strict=True))
    if num_split and str(tokenizer.decode(ids[start:end])).strip() != text[span[0] : span[1]].strip():
        raise SampleError("a token reaches across the edge of an assistant turn and holds text of both sides")
    return (start, end), num_split


def _token_boundary(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], position: int) -> int | None:
    """Number of tokens before a character, or None where the text before it doesn't tokenize to a prefix of ``ids``."""
    before = _tokenize(tokenizer, text[:position])
    return len(before) if ids[: len(before)] == before else None


def _offset_span(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], span: Span) -> Span:
    """Tokens with at least one character in the span."""
    if not tokenizer.is_fast:
        raise SampleError("a token reaches across the edge of an assistant turn, and the tokenizer gives no offsets")
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [token for token, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    # Two sets: named tokens (eos, ...), and added ones marked special (Gemma's <end_of_turn> has no name).
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids) | frozenset(added)


def _last_special(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], span: Span, special: frozenset[int]
) -> int | None:
    """Position of the special token that ends the span with nothing but blanks after it; None if there is none."""
    for token in range(span[1] - 1, span[0] - 1, -1):
        if ids[token] in special:
            return token if not str(tokenizer.decode(ids[token + 1 : span[1]])).strip() else None
    return None
