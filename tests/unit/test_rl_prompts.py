"""Prompts: three formats, rows left out by name, and an order that no step repeats and every rank shares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moesaic.config import DatasetConfig
from moesaic.rl.prompts import PromptOrder, PromptSet, build_prompts, build_prompts_from_rows
from moesaic.rl.reasoning_tasks import build_task, scorer_problem
from moesaic.rl.types import Prompt
from tests.unit.data_tokenizers import build_tokenizer

CHAT = build_tokenizer()
PLAIN = build_tokenizer(None, bos=True)
TURNS = [{"role": "system", "content": "sum it"}, {"role": "user", "content": "1 + 2"}]


def write(path: Path, rows: Sequence[Any]) -> DatasetConfig:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetConfig(path=str(path))


def build(*datasets: DatasetConfig, tokenizer: Any = CHAT, most: int = 200, **options: Any) -> PromptSet:
    return build_prompts(datasets, tokenizer, most, **({"seed": 1} | options))


def prompts_of(count: int, first: int = 0, answer: str = "a") -> list[Prompt]:
    return [
        Prompt(number=number, tokens=(number, 7), text="", row={"prompt": "", "answer": answer})
        for number in range(first, first + count)
    ]


def test_text_and_turns_become_what_the_template_writes(tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": "1 + 2", "answer": 3}, {"prompt": TURNS, "answer": 4, "extra": [1]}])
    built = build(data)
    assert [prompt.number for prompt in built.prompts] == [0, 1]
    for prompt, turns in zip(built.prompts, (TURNS[1:], TURNS), strict=True):
        ids = CHAT.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert list(prompt.tokens) == ids
        assert prompt.text == CHAT.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert built.prompts[0].row == {"prompt": "1 + 2", "answer": 3, "data_source": data.path}
    assert built.prompts[1].row == {"prompt": TURNS, "answer": 4, "extra": [1], "data_source": data.path}
    assert built.reports[0].format_name == "prompt" and not built.reports[0].bad


def test_without_a_template_text_goes_as_it_is_and_turns_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": "1 + 2"}, {"prompt": TURNS}])
    built = build(data, tokenizer=PLAIN)
    assert built.prompts[0].text == "1 + 2"
    assert list(built.prompts[0].tokens) == PLAIN("1 + 2")["input_ids"] and built.prompts[0].tokens[0] == 1
    assert [bad.index for bad in built.reports[0].bad] == [1]
    assert "no chat_template" in built.reports[0].bad[0].reason


def test_bad_rows_are_named_and_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ok"},
        "{not json\n",
        [1, 2],
        {"prompt": None, "answer": 1},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        {"prompt": "look", "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}]},
        {"prompt": "hello " * 300},
        {"prompt": [{"role": "assistant", "content": "x"}]},
        {"prompt": "also ok"},
        {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]},
        {"prompt": "", "messages": [{"role": "user", "content": "not this"}]},
    ]
    built = build(write(tmp_path / "p.jsonl", rows))
    assert [prompt.number for prompt in built.prompts] == [0, 9], "numbers are those of rows"
    (report,) = built.reports
    assert (report.num_rows, len(report.bad), report.num_too_long) == (12, 10, 1)
    reasons = {bad.index: bad.reason for bad in report.bad}
    for index, text in (
        *((1, "not JSON"), (2, "expected an object"), (3, "prompt: missing"), (4, "role and content, both text")),
        *((5, "row uses 'images'"), (6, "prompt[0] uses 'tool_calls'"), (7, "max_prompt_length=200")),
        *((8, "ends with the assistant's turn"), (10, "ends with the assistant's turn"), (11, "prompt: missing")),
    ):
        assert text in reasons[index], (index, reasons[index])
    assert "10 rows left out, 1 of them too long" in str(report) and "row 5: row uses 'images'" in str(report)
    assert (report.num_tokens, report.longest) == (
        sum(len(prompt.tokens) for prompt in built.prompts),
        max(len(prompt.tokens) for prompt in built.prompts),
    )


def test_verl_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number} + 1"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(3)
    ]
    rows[1]["reward_model"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    built = build(DatasetConfig(path=str(tmp_path / "train.parquet")), most=60)
    assert built.reports[0].format_name == "verl"
    assert [prompt.row for prompt in built.prompts] == [rows[0], rows[2]]
    assert built.reports[0].bad[0].reason == "reward_model: expected an object, got NoneType"
    # Some rows have it, and none does: a verl file by name, and a plain one by its columns.
    bare = write(tmp_path / "p.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match="fit no format 'verl'"):
        build(bare.model_copy(update={"format": "verl"}))


def test_what_cannot_be_used_at_all_is_refused(tmp_path: Path) -> None:
    for rows, message in (
        ([{"messages": TURNS}], "fit no format of prompts; formats and their columns"),
        ([{"prompt": "x " * 400}], "no prompt that can be used"),
        ([], "is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            build(write(tmp_path / "p.jsonl", rows))
    with pytest.raises(ValueError, match="beyond the model's vocabulary of 10"):
        build(write(tmp_path / "p.jsonl", [{"prompt": "x"}]), vocab_size=10)


def task(name: str = "chain_sum", size: int | None = 4, **options: Any) -> DatasetConfig:
    return DatasetConfig(path=name, format="reasoning_gym", size=size, options=options)


def test_tasks_make_rows_by_seed_and_numbers_go_on(tmp_path: Path) -> None:
    data = (task(min_terms=2, max_terms=2), write(tmp_path / "p.jsonl", [{"prompt": "x"}]))
    built = build(*data)
    assert [prompt.number for prompt in built.prompts] == [0, 1, 2, 3, 4]
    row = built.prompts[0].row
    assert row["prompt"] == row["question"] and row["question"] in built.prompts[0].text
    assert row["data_source"] == "chain_sum" and row["options"] == {"min_terms": 2, "max_terms": 2}
    assert row["metadata"]["source_dataset"] == "chain_sum" and isinstance(row["answer"], str)
    assert build(*data).prompts == built.prompts
    assert build(*data, seed=2).prompts[0] != built.prompts[0]
    assert build(task(seed=9)).prompts == build(task(seed=9), seed=5).prompts, "the options' seed comes first"


def test_held_out_rows_of_a_task_are_not_its_training_rows() -> None:
    """The library's row i of seed s is row 0 of seed s + i: the next seed would repeat all but one of them."""
    train, neighbour = build(task(size=50)), build(task(size=50), seed=2)
    assert neighbour.count_shared(train) == 49
    assert build(task(size=50), is_held_out=True).count_shared(train) == 0
    assert train.count_shared(train) == 50


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (task("chain_sums"), "did you mean chain_sum"),
        (task(min_term=2), "options min_term aren't known to it; it has .*min_terms"),
        (task(min_terms=0), "AssertionError"),
        (task(size=None), "size is not set"),
    ],
)
def test_faults_of_a_task_are_told(dataset: DatasetConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(dataset)


def test_tasks_whose_scorer_cannot_be_trained_on_are_refused() -> None:
    """It gives any text all: Python's truth of a text that isn't empty."""
    with pytest.raises(ValueError, match="gives nonsense as much as the row's own answer"):
        build(task("game_of_life_halting", size=2), most=5000)
    # These have no stored answer: their scorers judge what is proposed.
    assert len(build(task("graph_color", size=2), most=5000)) == 2


class Broken:
    """A task by its scores of the row's own answer and of anything else."""

    def __init__(self, own: float | Exception, other: float | Exception = 0.0) -> None:
        self.own, self.other = own, other

    def score_answer(self, answer: str, row: Mapping[str, Any]) -> float:
        score = self.own if answer == row["answer"] else self.other
        if isinstance(score, Exception):
            raise score
        return score


def test_what_is_wrong_with_a_scorer() -> None:
    row = {"answer": "5"}
    assert scorer_problem(Broken(1.0, 0.01), row) is None
    assert scorer_problem(Broken(1.0, ValueError("no number")), row) is None
    assert "own answer 0" in (scorer_problem(Broken(0.0), row) or "")
    assert "fails on the row's own answer: KeyError" in (scorer_problem(Broken(KeyError(1)), row) or "")
    assert "nonsense as much" in (scorer_problem(Broken(0.5, 0.5), row) or "")
    assert scorer_problem(build_task("chain_sum", size=1, seed=1, options={}), {"answer": "5", "metadata": {}}) is None


def test_rows_in_memory() -> None:
    rows = [{"prompt": f"{number} + 1", "answer": number + 1} for number in range(3)]
    prompts, report = build_prompts_from_rows(rows, CHAT, 60, first_number=5)
    assert [prompt.number for prompt in prompts] == [5, 6, 7] and report.source == "rows"


# ---- order


def numbers(prompts: Sequence[Prompt]) -> list[int]:
    return [prompt.number for prompt in prompts]


def test_epochs_hold_every_prompt_and_steps_go_over_their_ends() -> None:
    def steps_of(seed: int) -> list[list[int]]:
        order = PromptOrder(prompts_of(10), global_batch_size=4, seed=seed)
        assert order.num_steps_per_epoch == 3
        return [numbers(order.next()) for _ in range(50)]

    steps = steps_of(3)
    assert all(len(set(step)) == 4 for step in steps), "a step repeats no prompt"
    assert sorted(steps[0] + steps[1] + steps[2][:2]) == list(range(10))
    # 20 epochs; a prompt is passed over where it ends one and begins the next within a step.
    counts = Counter(number for step in steps for number in step)
    assert 17 <= min(counts.values()) and max(counts.values()) <= 21 + 1
    assert steps == steps_of(3) and steps != steps_of(4)


def test_further_prompts_of_a_step_are_others() -> None:
    """As dynamic sampling takes them, also where the epoch ends, and until there are no more."""
    order = PromptOrder(prompts_of(5), global_batch_size=2, seed=0)
    order.next(1)
    asked = order.next()
    while further := order.next(2, without=asked):
        assert not set(numbers(further)) & set(numbers(asked))
        asked += further
    assert sorted(numbers(asked)) == list(range(5)) and order.epoch == 1
    assert order.next(2, without=asked) == []


def test_a_saved_place_is_gone_on_from() -> None:
    order = PromptOrder(prompts_of(10), global_batch_size=4, seed=3)
    order.next(), order.next(), order.next(3)
    state = order.state_dict()
    assert all(type(value) is int for value in state.values())
    rest = [numbers(order.next()) for _ in range(5)]
    resumed = PromptOrder(prompts_of(10), global_batch_size=4, seed=3)
    resumed.load_state_dict(state)
    assert [numbers(resumed.next()) for _ in range(5)] == rest


@pytest.mark.parametrize(
    ("prompts", "seed", "message"),
    [
        (prompts_of(11), 3, "num_prompts is 11 now and was 10"),
        (prompts_of(10, first=1), 3, "prompts_crc"),
        (prompts_of(10, answer="b"), 3, "prompts_crc"),
        (list(reversed(prompts_of(10))), 3, "prompts_crc"),
        (prompts_of(10), 4, "seed is 4 now and was 3"),
    ],
)
def test_a_place_among_other_prompts_is_refused(prompts: list[Prompt], seed: int, message: str) -> None:
    state = PromptOrder(prompts_of(10), global_batch_size=4, seed=3).state_dict()
    with pytest.raises(ValueError, match=message):
        PromptOrder(prompts, global_batch_size=4, seed=seed).load_state_dict(state)


def test_a_step_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size=4: a step asks different prompts, and there are 3"):
        PromptOrder(prompts_of(3), global_batch_size=4, seed=3)
