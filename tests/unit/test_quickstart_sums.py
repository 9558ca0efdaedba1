"""The quickstart's data: disjoint operands, fixed seeds, right answers; and how an answer is scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickstart.evaluate import is_right
from quickstart.sums import build_row, build_split, check_disjoint, load_rows, operands, save_split


def test_split_is_disjoint_unique_and_fixed() -> None:
    train, heldout = build_split()
    assert len(heldout) >= 120
    assert not {operands(row) for row in train} & {operands(row) for row in heldout}
    questions = [row["messages"][1]["content"] for row in [*train, *heldout]]
    assert len(set(questions)) == len(questions)
    assert build_split() == (train, heldout)
    assert build_split(seed=8)[1] != heldout


def test_answers_are_right() -> None:
    for row in build_split(num_train=200, num_heldout=50)[0]:
        assert int(row["messages"][-1]["content"]) == sum(operands(row))
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]


def test_largest_split_ends() -> None:
    """Every operand pair that can be held out does come up (4150 pairs, a sixth of them)."""
    assert len(build_split(num_train=1, num_heldout=691)[1]) == 691


@pytest.mark.parametrize("sizes", [(10, 692), (10, 0), (0, 10), (3460, 10)])
def test_impossible_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"num_train={sizes[0]}, num_heldout={sizes[1]}"):
        build_split(*sizes)


def test_overlap_is_refused_in_any_order_and_nothing_written(tmp_path: Path) -> None:
    train = [build_row("45 + 32", "77"), build_row("1 + 1", "2")]
    with pytest.raises(ValueError, match="1 groups of operands occur in training too, first 32 and 45;"):
        save_split(tmp_path / "data", train, [build_row("32 + 45", "77"), build_row("4 + 5", "9")])
    assert not (tmp_path / "data").exists()


def test_overlap_names_only_the_first() -> None:
    rows = [build_row(f"{number} + 0", str(number)) for number in range(9)]
    with pytest.raises(ValueError, match=r"9 groups .* first 0 and 0, 0 and 1, 0 and 2, 0 and 3, 0 and 4;"):
        check_disjoint(rows, rows)


def test_shared_single_operand_is_no_overlap() -> None:
    check_disjoint([build_row("45 + 32", "77")], [build_row("45 + 33", "78"), build_row("45 + 45", "90")])


def test_files_keep_rows(tmp_path: Path) -> None:
    train, heldout = build_split(num_train=5, num_heldout=3)
    save_split(tmp_path, train, heldout)
    assert load_rows(tmp_path / "train.jsonl") == train
    assert load_rows(tmp_path / "heldout.jsonl") == heldout


@pytest.mark.parametrize(
    ("generated", "answer", "expected"),
    [
        ("77", "77", True),
        ("2 + 5 is 7.", "7", True),
        ("1,024", "1024", True),
        ("-7", "7", False),
        ("7 or 8", "7", False),
        ("177", "77", False),
        ("seven", "7", False),
        ("", "7", False),
    ],
)
def test_scoring(generated: str, answer: str, expected: bool) -> None:
    assert is_right(generated, answer) is expected
