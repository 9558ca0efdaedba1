"""Every format, from every kind of file, becomes the same samples; every bad row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from moesaic.data import build_dataset, build_dataset_from_rows, choose_pad_token_id
from moesaic.data.formats import FORMATS, Message, detect_format, load_rows, to_messages
from tests.unit.data_tokenizers import build_tokenizer

SYSTEM, FIRST, SECOND = ("be kind", ("hi", "hello"), ("what is\n2 + 2", "2024-01-01"))
CONVERSATION = [
    Message("system", SYSTEM),
    Message("user", FIRST[0]),
    Message("assistant", FIRST[1]),
    Message("user", SECOND[0]),
    Message("assistant", SECOND[1]),
]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": message.role, "content": message.content} for message in CONVERSATION]},
    "alpaca": {
        "instruction": "what is",
        "input": "2 + 2",
        "output": SECOND[1],
        "system": SYSTEM,
        "history": [list(FIRST)],
    },
    "sharegpt": {
        "system": SYSTEM,
        "conversations": [
            {"from": "human", "value": FIRST[0]},
            {"from": "gpt", "value": FIRST[1]},
            {"from": "human", "value": SECOND[0]},
            {"from": "gpt", "value": SECOND[1]},
        ],
    },
}


@pytest.fixture(autouse=True)
def _datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, name: str, rows: list[Any]) -> str:
    path = folder / name
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_formats_and_files(name, suffix, tmp_path):
    rows = load_rows(write(tmp_path, f"data.{suffix}", [ROWS[name]] * 2))
    assert detect_format(rows[0]) == name
    # The date in the second answer stays the text it was: datasets' own JSON reader makes a timestamp of it.
    assert [to_messages(rows[index], name) for index in range(len(rows))] == [CONVERSATION] * 2


def test_prompt_completion():
    row = {"prompt": "a", "completion": "b"}
    assert to_messages(row, detect_format(row)) == [Message("user", "a"), Message("assistant", "b")]


def test_text_parts_are_joined():
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
        ]
    }
    assert to_messages(row, "messages") == [Message("user", "ab"), Message("assistant", "c")]


def test_folders(tmp_path):
    datasets.Dataset.from_list([ROWS["messages"]]).save_to_disk(tmp_path / "saved")
    split = datasets.Dataset.from_list([ROWS["messages"]] * 2)
    datasets.DatasetDict({"train": split, "test": split.select([0])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files", "train.parquet", [ROWS["messages"]] * 3)
    assert len(load_rows(str(tmp_path / "saved"))) == 1
    assert len(load_rows(str(tmp_path / "splits"))) == 2
    assert len(load_rows(str(tmp_path / "splits"), split="test")) == 1
    assert len(load_rows(str(tmp_path / "files"))) == 3


def test_json_lines_in_a_json_file(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "c", "completion": "d"}\n', encoding="utf-8")
    assert len(load_rows(str(path))) == 2


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (["text"], r"columns \['text'\] fit no known dataset format; known.*messages: messages.*alpaca"),
        (["messages", "prompt", "completion"], r"fit several formats \(messages, prompt_completion\)"),
        (["prompt"], "no known"),
    ],
)
def test_unknown_and_ambiguous_columns(columns, match):
    with pytest.raises(ValueError, match=match):
        detect_format(columns)


def test_named_format():
    assert detect_format(["messages", "prompt", "completion"], "prompt_completion") == "prompt_completion"
    with pytest.raises(ValueError, match="don't fit the dataset format 'alpaca'"):
        detect_format(["messages"], "alpaca")
    with pytest.raises(ValueError, match="'alpacca' is unknown"):
        detect_format(["messages"], "alpacca")


@pytest.mark.parametrize("source", ["none.jsonl", "none.parquet", "./no/such/folder"])
def test_missing_source(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"dataset '.*(none|folder)"):
        load_rows(source)


def test_broken_json_list(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"prompt": "a"', encoding="utf-8")
    with pytest.raises(ValueError, match="starts as a JSON list but isn't one"):
        load_rows(str(path))


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


GOOD = turns(("user", "hi"), ("assistant", "hello"))
BAD_ROWS: list[tuple[Any, str]] = [
    (turns(), "empty: no user"),
    (turns(("system", "s")), "empty: no user"),
    (turns(("user", "a")), "no assistant turn"),
    (turns(("assistant", "a"), ("user", "b")), "wrong roles: turn 0 is 'assistant', expected 'user'"),
    (turns(("user", "a"), ("user", "b"), ("assistant", "c")), "wrong roles: turn 1 is 'user'"),
    (turns(("user", "a"), ("robot", "b")), "messages[1].role: 'robot' is not one of"),
    (turns(("user", "a"), ("assistant", None)), "messages[1].content: missing"),
    (turns(("user", "a"), ("assistant", " \n")), "messages[1].content: empty"),
    (turns(("user", 3), ("assistant", "b")), "messages[0].content: expected text, got int"),
    (turns(("user", [{"type": "image"}]), ("assistant", "b")), "only text content"),
    ({"messages": "hi"}, "expected a list of turns, got str"),
    ({"messages": ["hi"]}, "messages[0]: expected an object, got str"),
    ({"other": 1}, "messages: missing"),
    (["hi"], "expected an object with columns, got list"),
    ({**GOOD, "tools": [{"name": "f"}]}, "row uses 'tools'"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}]}, "uses 'tool_calls'"),
    (turns(("user", "long " * 40), ("assistant", "b")), "nothing left to learn"),
    (turns(("user", "a<|im_end|>"), ("assistant", "b")), "contains the end-of-turn token"),
]


def test_bad_samples_are_named_and_counted(tmp_path):
    path = Path(write(tmp_path, "data.jsonl", [row for row, _ in BAD_ROWS] + [GOOD]))
    path.write_text(path.read_text(encoding="utf-8") + '{"messages": [\n', encoding="utf-8")
    samples, report = build_dataset(str(path), build_tokenizer(), 32)
    assert len(samples) == report.num_good == 1
    assert report.num_rows == len(BAD_ROWS) + 2
    reasons = [reason for _, reason in BAD_ROWS]
    assert [bad.index for bad in report.bad] == [*range(len(BAD_ROWS)), len(BAD_ROWS) + 1]
    for bad, reason in zip(report.bad, [*reasons, "not JSON"], strict=True):
        assert reason in bad.reason
        assert f"sample {bad.index}: {bad.reason}" in str(report)
    assert report.unused_columns == ("other", "tools")


def test_alpaca_and_sharegpt_reasons():
    tokenizer = build_tokenizer()
    for rows, reason in [
        ([{"instruction": "a", "output": ""}, {"instruction": "a", "output": "b"}], "output: empty"),
        ([{**ROWS["alpaca"], "history": ["ab"]}, ROWS["alpaca"]], r"history\[0\]: expected \[instruction, answer\]"),
        ([{"conversations": [{"from": "bot", "value": "a"}]}, ROWS["sharegpt"]], "from: 'bot' is not one of"),
    ]:
        _, report = build_dataset_from_rows(rows, tokenizer, 128)
        assert [bad.index for bad in report.bad] == [0]
        with pytest.raises(ValueError, match=rf"'rows' has no good sample\n(?s:.*){reason}"):
            build_dataset_from_rows(rows[:1], tokenizer, 128)


def test_printed_report_counts_what_it_does_not_name():
    _, report = build_dataset_from_rows([turns()] * 25 + [GOOD], build_tokenizer(), 32)
    assert "25 bad samples left out" in str(report)
    assert "5 more: empty: no user or assistant turn" in str(report)


def test_labels_are_shifted_and_cut():
    tokenizer = build_tokenizer()
    samples, report = build_dataset_from_rows([GOOD], tokenizer, 64)
    sample = samples[0]
    answer = tokenizer("hello<|im_end|>")["input_ids"]
    positions = [position for position, label in enumerate(sample.labels) if label != -100]
    assert [sample.labels[position] for position in positions] == answer
    assert [sample.input_ids[position + 1] for position in positions] == answer
    assert report.num_loss_tokens == len(answer) and report.num_cut == 0

    cut, report = build_dataset_from_rows([GOOD], tokenizer, positions[0] + 2)
    assert cut[0].input_ids == sample.input_ids[: positions[0] + 2]
    assert memoryview(sample.input_ids).itemsize == memoryview(sample.labels).itemsize == 4  # a list takes 44 a token
    # one answer token is left as a target; the last position has no next token
    assert list(cut[0].labels) == [-100] * positions[0] + [answer[0], -100]
    assert report.num_cut == 1


def test_prompt_completion_without_a_template():
    tokenizer = build_tokenizer(None)
    rows = [{"prompt": "the sum? ", "completion": "12"}]
    samples, report = build_dataset_from_rows(rows, tokenizer, 64)
    assert tokenizer.decode(samples[0].input_ids) == "the sum? 12<|im_end|>"
    assert [label for label in samples[0].labels if label != -100] == tokenizer("12<|im_end|>")["input_ids"]
    assert report.masking.method == "completion"
    with pytest.raises(ValueError, match="no chat_template"):
        build_dataset_from_rows([GOOD], tokenizer, 64)


def test_empty_dataset_and_tiny_cutoff():
    with pytest.raises(ValueError, match="is empty"):
        build_dataset_from_rows([], build_tokenizer(), 64)
    with pytest.raises(ValueError, match="cutoff_len=1"):
        build_dataset_from_rows([GOOD], build_tokenizer(), 1)


def test_pad_token():
    tokenizer = build_tokenizer()
    assert choose_pad_token_id(tokenizer) == tokenizer.pad_token_id == 0
    tokenizer.pad_token = None
    assert choose_pad_token_id(tokenizer) == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a pad_token nor"):
        choose_pad_token_id(tokenizer)


def test_every_format_is_tested():
    assert set(FORMATS) == {*ROWS, "prompt_completion"}
