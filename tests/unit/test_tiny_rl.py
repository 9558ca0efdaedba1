"""The tiny reinforcement-learning task: a clean split, the demonstrator's mistakes, and the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from moesaic.config.load import read_mapping
from moesaic.config.rl_sections import RolloutConfig
from quickstart.tiny_model import STUDENT_SIZES, TEACHER_SIZES, build_tokenizer, save_random_model
from quickstart.tiny_task import (
    END_OF_PROMPT,
    RIGHT_SHARE,
    WORD_LENGTHS,
    build_demonstrations,
    build_right_demonstrations,
    build_row,
    build_split,
    demonstrate,
    draw_words,
    load_rows,
    save_rows,
)

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "rl").glob("*_tiny.yaml"))


def word_of(row: Mapping[str, str]) -> str:
    return row["prompt"].removesuffix(END_OF_PROMPT)


def test_split_asks_no_word_twice_nor_its_reverse() -> None:
    train, heldout = build_split()
    words = [word_of(row) for row in [*train, *heldout]]
    assert len({min(word, word[::-1]) for word in words}) == len(words) == 2460
    assert all(word != word[::-1] for word in words)
    for rows, num_each in ((train, 720), (heldout, 100)):
        lengths = [len(word_of(row)) for row in rows]
        assert [lengths.count(length) for length in WORD_LENGTHS] == [num_each] * 3
        assert lengths != sorted(lengths)


def test_split_follows_from_its_seed() -> None:
    sizes = {"num_train": 20, "num_heldout": 5}
    assert build_split(**sizes) == build_split(**sizes)
    assert build_split(**sizes, seed=8) != build_split(**sizes)


@pytest.mark.parametrize(("num_train", "num_heldout"), [(0, 5), (5, 0)])
def test_empty_side_is_refused(num_train: int, num_heldout: int) -> None:
    with pytest.raises(ValueError, match=f"num_train={num_train}, num_heldout={num_heldout}: ask for at least 1"):
        build_split(num_train, num_heldout)


def test_more_words_than_there_are() -> None:
    with pytest.raises(ValueError, match="867 words of 3 letters: 866 were found"):
        draw_words(3, 867, seed=1)


def test_row() -> None:
    assert build_row("crab") == {"prompt": "crab=", "answer": "barc", "data_source": "spell_backward"}


def test_demonstrator_is_sloppy_with_longer_words_only() -> None:
    dice = random.Random(0)
    assert {demonstrate("cab", dice) for _ in range(50)} == {"bac"}
    answers = [demonstrate("crab", dice) for _ in range(4000)]
    assert set(answers) == {"barc", "crab", "bar"}
    shares = [answers.count(answer) / 4000 for answer in ("barc", "crab", "bar")]
    assert shares == pytest.approx([RIGHT_SHARE, (1 - RIGHT_SHARE) / 2, (1 - RIGHT_SHARE) / 2], abs=0.03)


def test_demonstrations_are_made_anew_each_time() -> None:
    rows = [build_row(word) for word in ("cab", "crab", "horse")]
    demonstrations = build_demonstrations(rows, num_each=20)
    assert [row["prompt"] for row in demonstrations] == [row["prompt"] for row in rows] * 20
    assert len({row["completion"] for row in demonstrations if row["prompt"] == "horse="}) == 3
    assert build_demonstrations(rows, num_each=20) == demonstrations
    right = build_right_demonstrations(rows, num_each=2)
    assert [row["completion"] for row in right] == ["bac", "barc", "esroh"] * 2


def test_files_keep_rows(tmp_path: Path) -> None:
    rows = [build_row("crab"), build_row("cab")]
    save_rows(rows, tmp_path / "rows.jsonl")
    assert load_rows(tmp_path / "rows.jsonl") == rows


def test_saved_tokenizer_has_a_token_per_character(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("crab=").input_ids
    assert len(set(ids)) == len(ids) == 5
    assert max(ids) < len(tokenizer) == 29
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "crab="
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("sizes", [STUDENT_SIZES, TEACHER_SIZES])
def test_model_has_five_million_parameters(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    assert save_random_model(tmp_path / "a", sizes, seed=0) == pytest.approx(5e6, rel=0.1)
    assert AutoConfig.from_pretrained(tmp_path / "a").num_experts == 8
    save_random_model(tmp_path / "b", sizes, seed=0)
    save_random_model(tmp_path / "c", sizes, seed=1)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_room_for_the_task(path: Path) -> None:
    """The prompt's letters and its end; the answer's letters and the end of text, short of overlong completions."""
    data, problems = read_mapping(path)
    assert not problems
    rollout = RolloutConfig.model_validate(data["rollout"])
    longest = max(WORD_LENGTHS) + 1
    assert rollout.max_prompt_length >= longest
    assert rollout.sampling.max_tokens - data["reward"].get("overlong_buffer_len", 0) >= longest
