"""Plain text: every token is a target once, documents end with eos, nothing is dropped without a word."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.data import BatchLoader, build_dataset, build_dataset_from_rows
from moesaic.data.encode import split_document
from tests.unit.data_tokenizers import build_tokenizer

TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


def targets(samples):
    return [label for sample in samples for label in sample.labels if label != -100]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(2, 12))
def test_every_token_but_the_first_is_a_target_once(ids, cutoff_len):
    samples = split_document(ids, cutoff_len)
    assert targets(samples) == ids[1:]
    inputs = [token for sample in samples for token in sample.input_ids]
    assert inputs in (ids, ids[:-1])  # a lone last token predicts nothing, and is no piece
    assert all(0 < len(sample) <= cutoff_len and sample.num_loss_tokens for sample in samples)


def test_a_document_is_its_tokens_and_eos():
    (sample,), report = build_dataset_from_rows([{"text": "hello world"}], TOKENIZER, 64, stage="pt")
    ids = [*TOKENIZER("hello world")["input_ids"], EOS]
    assert list(sample.input_ids) == ids and list(sample.labels) == [*ids[1:], -100]
    assert (report.num_rows, report.num_samples, report.num_cut, report.bad) == (1, 1, 0, ())
    assert "every token is trained; documents end with '<|im_end|>'" in str(report)


def test_a_tokenizer_that_begins_with_bos_does_so_here():
    (sample,), _ = build_dataset_from_rows([{"text": "hello"}], build_tokenizer(bos=True), 64, stage="pt")
    assert sample.input_ids[0] == TOKENIZER.bos_token_id and sample.input_ids[-1] == EOS


def test_long_documents_are_split_and_counted():
    samples, report = build_dataset_from_rows([{"text": "the sum " * 20}, {"text": "hi"}], TOKENIZER, 8, stage="pt")
    whole = [*TOKENIZER("the sum " * 20)["input_ids"], EOS]
    assert targets(samples.samples[:-1]) == whole[1:]
    assert (report.num_rows, report.num_cut, report.num_samples) == (2, 1, len(samples)) and len(samples) > 2
    assert f"1 long documents split: {len(samples)} samples" in str(report)


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"text": " "}, "empty"), ({"text": 3}, "expected text, got int"), ({"other": "a"}, "missing"), (7, "int")],
)
def test_bad_documents_are_named(row, reason):
    _, report = build_dataset_from_rows([{"text": "good"}, row], TOKENIZER, 8, stage="pt")
    (bad,) = report.bad
    assert bad.index == 1 and reason in bad.reason


def test_files_of_text(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n\nworld\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "hello\n\nworld\n"}) + "\n")
    one, two = (build_dataset(str(tmp_path / name), TOKENIZER, 64, stage="pt")[0] for name in ("a.txt", "b.jsonl"))
    assert len(one) == 1 and one.samples == two.samples


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"messages": []}], {}, "have no 'text'"),
        ([{"text": "a"}], {"format_name": "alpaca"}, "'alpaca' is one of conversations"),
        ([{"text": "a"}], {"stage": "sft"}, "fit no known dataset format"),
    ],
)
def test_what_is_no_text_is_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        build_dataset_from_rows(rows, TOKENIZER, 64, **{"stage": "pt", **options})


def test_packed_documents_restart_positions():
    rows = [{"text": text} for text in ("hello world", "the sum of it", "what")]
    dataset, report = build_dataset_from_rows(rows, TOKENIZER, 64, stage="pt")
    sizes = {"micro_batch_size": 1, "global_batch_size": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    loader = BatchLoader(dataset, cutoff_len=64, packing=True, pad_token_id=0, **sizes)
    ((batch,),) = [next(iter(loader))]
    assert len(batch.document_lengths) == 3 and sum(batch.document_lengths) == report.num_tokens
    assert int((batch.position_ids == 0).sum()) == 4  # three documents and the padding
    assert int((batch.labels != -100).sum()) == report.num_loss_tokens == report.num_tokens - 3
