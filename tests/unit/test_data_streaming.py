"""Streams: one global order for any ranks, exact resume, bounded memory, each rank tokenizing its share."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.data import Sample, StreamLoader, StreamSource, build_stream_source
from moesaic.data.chat import Masking
from moesaic.data.encode import EncodedRow, RowEncoder
from moesaic.data.formats import SampleError, UnreadableRow
from moesaic.data.row_stream import JsonLines, NamedStream, Parquet, open_stream
from moesaic.train.data import RunData
from tests.unit.data_tokenizers import build_tokenizer

CUTOFF_LEN = 8


class Numbers:
    """Rows first, first + 1, ...; counts those read."""

    def __init__(self, first, size):
        self.first, self.size, self.num_read = first, size, 0

    def read_from(self, start):
        for index in range(start, self.size):
            self.num_read += 1
            yield self.first + index


class Encoder:
    """Row n is n, 1 + n % 3 times over; multiples of 7 are bad. Counts what it is asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, row):
        self.seen.append(row)
        if row % 7 == 0:
            raise SampleError("a multiple of 7")
        ids = [row] * (2 + row % 3)
        return EncodedRow(samples=(Sample(input_ids=ids, labels=[*ids[1:], -100]),), is_cut=False)


def build_source(first=1, size=23, weight=1.0, encoder=None, name="numbers", split="train"):
    masking = Masking(method="text", end_of_turn=None, end_of_turn_id=None)
    row_encoder = RowEncoder(format_name="n", known_columns=frozenset(), masking=masking, encode=encoder or Encoder())
    return StreamSource(name=name, rows=Numbers(first, size), encoder=row_encoder, weight=weight, split=split)


def build_loader(sources=None, **changes: Any) -> StreamLoader:
    options: dict[str, Any] = {
        "buffer_size": 10,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "cutoff_len": CUTOFF_LEN,
        "packing": False,
        "pad_token_id": 0,
        "seed": 7,
    }
    return StreamLoader(sources or [build_source(), build_source(101, 9, 0.5)], **(options | changes))


def rows_of(step):
    return [
        tuple(dict.fromkeys(token for token in row if token))
        for batch in step
        for row in (
            batch.input_ids.tolist()
            if batch.attention_mask is not None
            else batch.input_ids.view(-1, CUTOFF_LEN).tolist()
        )
    ]


def run(num, **changes):
    return [rows_of(step) for step in islice(build_loader(**changes), num)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    packing=st.booleans(),
    buffer_size=st.integers(3, 30),
    dp_sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    num_done=st.integers(0, 7),
)
def test_any_ranks_and_any_resume_give_the_same_order(packing, buffer_size, dp_sizes, num_done):
    whole = run(8, packing=packing, buffer_size=buffer_size)

    def go_on(dp_size, num, state):
        ranks = [
            build_loader(packing=packing, buffer_size=buffer_size, dp_rank=r, dp_size=dp_size) for r in range(dp_size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        per_rank = [[[rows_of([batch]) for batch in step] for step in islice(rank, num)] for rank in ranks]
        steps = [
            [row for round_ in zip(*step, strict=True) for rows in round_ for row in rows]
            for step in zip(*per_rank, strict=True)
        ]
        states = [rank.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        return steps, states[0]

    before, state = go_on(dp_sizes[0], num_done, None)
    after, _ = go_on(dp_sizes[1], 8 - num_done, state)
    assert before + after == whole


def test_a_pass_holds_every_good_row_once():
    steps = run(3, sources=[build_source(1, 24)], buffer_size=24)
    assert Counter(index for step in steps for row in step for index in row) == Counter(
        index for index in range(1, 25) if index % 7
    )
    assert sum(row == () for step in steps for row in step) == 3  # 7, 14, 21: their rows carry no loss


def test_packed_bad_rows_leave_no_gap():
    steps = run(2, sources=[build_source(1, 24)], buffer_size=24, packing=True, global_batch_size=4)
    assert all(row for step in steps for row in step)


def test_blocks_are_shuffled_and_mixed_by_weight():
    rows = [row[0] for step in run(4, buffer_size=30) for row in step if row]
    assert rows != sorted(rows) and rows == [row[0] for step in run(4, buffer_size=30) for row in step if row]
    assert rows != [row[0] for step in run(4, buffer_size=30, seed=8) for row in step if row]
    first_block = [row for step in run(30, buffer_size=30, global_batch_size=1, micro_batch_size=1) for row in step]
    assert sum(bool(row) and row[0] > 100 for row in first_block) + sum(row == () for row in first_block) >= 10


def test_each_rank_tokenizes_only_its_share():
    encoders = [Encoder() for _ in range(4)]
    for rank, encoder in enumerate(encoders):
        list(islice(build_loader([build_source(1, 40, encoder=encoder)], dp_rank=rank, dp_size=4, buffer_size=40), 5))
    assert [len(encoder.seen) for encoder in encoders] == [10] * 4
    assert sorted(row for encoder in encoders for row in encoder.seen) == list(range(1, 41))


def test_no_more_is_read_than_a_block_ahead():
    source = build_source(1, 10_000)
    list(islice(build_loader([source], buffer_size=16), 2))
    assert source.rows.num_read == 16
    list(islice(build_loader([source], buffer_size=16), 3))
    assert source.rows.num_read == 16 + 32


def test_bad_rows_are_told_by_the_rank_that_has_them():
    told = []
    for rank in range(2):
        loader = build_loader([build_source(1, 24)], buffer_size=24, dp_rank=rank, dp_size=2, on_bad_sample=told.append)
        list(islice(loader, 3))
    assert sorted((bad.index, bad.reason) for bad in told) == [(n, "a multiple of 7") for n in (6, 13, 20)]
    assert {bad.source for bad in told} == {"numbers"}


@pytest.mark.parametrize("packing", [False, True])
def test_a_whole_pass_of_bad_rows_ends_the_run(packing):
    """Also where another source's rows are good."""
    sources = [build_source(1, 6), build_source(7, 1, name="sevens")]
    with pytest.raises(ValueError, match="dataset 'sevens': 1 rows one after another are bad .row 0: a multiple of 7"):
        run(3, sources=sources, packing=packing)


@pytest.mark.parametrize("packing", [False, True])
def test_many_bad_rows_one_after_another_end_the_run(packing):
    """In a source whose end is far: those that this rank has in a block of 400."""

    def encode(row):
        if row > 150:
            raise SampleError("too late")
        return Encoder()(1)

    loader = build_loader([build_source(1, 10_000, encoder=encode)], buffer_size=400, dp_size=2, packing=packing)
    with pytest.raises(ValueError, match="'numbers': 200 rows one after another are bad .*too late; .*too late; .*too"):
        list(islice(loader, 1000))


def test_a_few_bad_rows_fill_a_small_block_without_harm():
    sources = [build_source(1, 24)]
    assert run(3, sources=sources, packing=True, buffer_size=1, global_batch_size=1) == [[(1,)], [(2,)], [(3,)]]
    assert len(run(50, sources=sources, packing=True, buffer_size=1, global_batch_size=1)) == 50


def test_a_source_that_begins_with_bad_rows_only_is_refused_at_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(
        ValueError, match="all of its first 3 rows are bad .row 0: .*; row 1: .*nothing would be trained"
    ):
        build_stream_source(str(tmp_path / "a.jsonl"), build_tokenizer(), 16, stage="pt")


def test_state_of_a_running_iterator_can_be_replaced():
    loader = build_loader()
    start = loader.state_dict()
    iterator = iter(loader)
    first = [rows_of(next(iterator)) for _ in range(5)]
    loader.load_state_dict(start)
    assert [rows_of(next(iterator)) for _ in range(5)] == first
    assert loader.epoch >= 1


def test_foreign_state_is_refused():
    state = build_loader().state_dict()
    other_split = [build_source(split="test"), build_source(101, 9, 0.5)]
    for sources in ([build_source()], other_split):
        with pytest.raises(ValueError, match="data position can't be resumed.* sources is"):
            build_loader(sources).load_state_dict(state)
    for changes in ({"seed": 8}, {"packing": True}, {"buffer_size": 11}):
        with pytest.raises(ValueError, match="data position can't be resumed"):
            build_loader(**changes).load_state_dict(state)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rows = [{"text": f"number {n}"} for n in range(25)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text("\n".join(lines) + "\n")
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "stored")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    return {name: str(tmp_path / name) for name in ("a.jsonl", "a.parquet", "folder", "stored", "splits")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", JsonLines),
        ("a.parquet", Parquet),
        ("folder", NamedStream),
        ("stored", NamedStream),
        ("splits", NamedStream),
    ],
)
def test_every_kind_of_source_is_read_from_any_row(files, name, kind):
    stream = open_stream(files[name])
    assert isinstance(stream, kind)
    for start in (0, 3, 4, 17, 24, 25, 30):
        assert [row["text"] for row in stream.read_from(start)] == [f"number {n}" for n in range(start, 25)]


def test_a_line_that_is_no_json_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnonsense\n')
    _, bad = open_stream(str(tmp_path / "a.jsonl")).read_from(0)
    assert isinstance(bad, UnreadableRow)


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet", "whole.json", "whole.txt"])
def test_what_cannot_be_streamed_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no such file|one value"):
        open_stream(str(tmp_path / name))


def test_real_text_is_streamed(files):
    source = build_stream_source(files["a.parquet"], build_tokenizer(), 16, stage="pt")
    loader = build_loader([source], stage="pt", cutoff_len=16, packing=True, buffer_size=25, global_batch_size=1)
    texts = [build_tokenizer().decode(batch.input_ids[0]) for step in islice(loader, 1) for batch in step]
    assert "number" in texts[0] and "<|im_end|>" in texts[0]


def test_a_source_says_what_it_is(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "id": 1}\n')
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant]{% endif %}"
    source = build_stream_source(str(tmp_path / "a.jsonl"), build_tokenizer(template), 64)
    data = RunData(loader=build_loader([source]), eval_loaders={}, train_reports=(), eval_reports=(), streams=(source,))
    (text,) = data.describe()
    assert "streamed, so nothing is counted" in text
    assert "format prompt_completion" in text and "method 'prefix'" in text
    assert "end of turn: none: the model can't learn to stop" in text
    assert "columns of its first rows not used: id" in text
