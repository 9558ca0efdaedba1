"""Trained tokens are the assistant's turns and their end-of-turn token, whatever the template and the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data.chat import Encoded, build_completion_masking, build_masking, encode_chat, encode_completion
from moesaic.data.formats import Message, SampleError
from tests.unit.data_tokenizers import (
    CHATML,
    MARKED,
    MARKED_END_OUTSIDE,
    MARKED_NEWLINE_INSIDE,
    SPACED,
    THINKING,
    build_tokenizer,
)

END = "<|im_end|>"
TEMPLATES = {
    "plain": CHATML,
    "marked": MARKED,
    "marked, newline inside": MARKED_NEWLINE_INSIDE,
    "marked, end outside": MARKED_END_OUTSIDE,
}
TOKENIZERS = {
    (name, trim): build_tokenizer(template, trim_offsets=trim)
    for name, template in TEMPLATES.items()
    for trim in (False, True)
}
TEXT = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12),
    st.sampled_from(
        ["hello world", " the sum", "the sum ", "\n\nhello\n", "é 🎉 你好", "👩‍👧 ok", "<|im_start", "12\n"]
    ),
).filter(lambda text: bool(text.strip()))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [Message("user", draw(TEXT)), Message("assistant", draw(TEXT))]
    return messages


def trained_runs(tokenizer, encoded: Encoded) -> list[str]:
    """Text of each run of consecutive trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, is_trained in zip(encoded.input_ids, encoded.trained, strict=True):
        if is_trained and not before:
            runs.append([])
        if is_trained:
            runs[-1].append(token)
        before = is_trained
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_trained_text_is_the_assistants(key, messages):
    tokenizer = TOKENIZERS[key]
    encoded = encode_chat(tokenizer, messages, build_masking(tokenizer))
    answers = [message.content for message in messages if message.role == "assistant"]
    if encoded.num_split_tokens == 0:
        assert trained_runs(tokenizer, encoded) == [answer + END for answer in answers]
    else:  # the newline before an answer that begins with newlines is in one token with them
        runs = trained_runs(tokenizer, encoded)
        assert [run.strip() for run in runs] == [(answer + END).strip() for answer in answers]
    whole = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages], return_dict=True
    )
    assert encoded.input_ids == whole["input_ids"]


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
def test_trained_text_tokenizes_to_the_trained_tokens(key):
    tokenizer = TOKENIZERS[key]
    messages = [Message("user", "what is it?"), Message("assistant", "the sum: 12 é🎉")]
    encoded = encode_chat(tokenizer, messages, build_masking(tokenizer))
    expected = tokenizer("the sum: 12 é🎉" + END)["input_ids"]
    trained = [token for token, keep in zip(encoded.input_ids, encoded.trained, strict=True) if keep]
    assert trained == expected
    assert encoded.num_split_tokens == 0


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(messages=conversations())
def test_marked_spans_agree_with_transformers(messages):
    tokenizer = TOKENIZERS["marked", False]
    expected = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    encoded = encode_chat(tokenizer, messages, build_masking(tokenizer))
    assert [int(keep) for keep in encoded.trained] == expected["assistant_masks"]


@pytest.mark.parametrize(("name", "method"), [("plain", "prefix"), ("marked", "generation")])
def test_masking_says_how(name, method):
    masking = build_masking(TOKENIZERS[name, False])
    assert (masking.method, masking.end_of_turn) == (method, END)


def test_template_that_renders_earlier_turns_differently():
    tokenizer = build_tokenizer(THINKING)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    runs = trained_runs(tokenizer, encode_chat(tokenizer, messages, build_masking(tokenizer)))
    assert runs == ["b" + END, "<think>\n\n</think>\n\nd" + END]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_token_across_the_edge_is_trained_whole(trim_offsets):
    tokenizer = build_tokenizer(SPACED, trim_offsets=trim_offsets)
    messages = [Message("user", "what?"), Message("assistant", "the sum")]
    encoded = encode_chat(tokenizer, messages, build_masking(tokenizer))
    assert encoded.num_split_tokens == 1
    assert trained_runs(tokenizer, encoded) == [" the sum" + END]


def test_token_with_text_of_both_sides_is_refused():
    # "t" of the template and "he" of the answer are one token: training on it would train on the template's text
    template = SPACED.replace("Answer: ", "Answer: t")
    tokenizer = build_tokenizer(template)
    assert build_masking(tokenizer).method == "prefix"
    with pytest.raises(SampleError, match="text of both sides"):
        encode_chat(tokenizer, [Message("user", "a"), Message("assistant", "he sum")], build_masking(tokenizer))


def test_end_of_turn_inside_a_text_is_refused():
    tokenizer = TOKENIZERS["plain", False]
    messages = [Message("user", f"a{END}b"), Message("assistant", "c")]
    with pytest.raises(SampleError, match="turn 0 contains the end-of-turn token"):
        encode_chat(tokenizer, messages, build_masking(tokenizer))


def test_template_errors_name_the_reason():
    tokenizer = build_tokenizer(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML
    )
    messages = [Message("system", "s"), Message("user", "a"), Message("assistant", "c")]
    with pytest.raises(SampleError, match="no system turn"):
        encode_chat(tokenizer, messages, build_masking(tokenizer))


def test_template_without_end_of_turn_is_reported():
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert build_masking(tokenizer).end_of_turn is None


def test_no_template_is_an_error():
    with pytest.raises(ValueError, match="no chat_template"):
        build_masking(build_tokenizer(None))


@pytest.mark.parametrize("bos", [False, True])
def test_completion_and_eos_are_trained(bos):
    tokenizer = build_tokenizer(None, bos=bos)
    encoded = encode_completion(tokenizer, "what is the sum? ", "12 é")
    assert trained_runs(tokenizer, encoded) == ["12 é" + END]
    prompt = ("<bos>" if bos else "") + "what is the sum? "
    untrained = [token for token, keep in zip(encoded.input_ids, encoded.trained, strict=True) if not keep]
    assert tokenizer.decode(untrained) == prompt
    assert build_completion_masking(tokenizer).end_of_turn == END
