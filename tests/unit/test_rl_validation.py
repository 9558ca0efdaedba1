"""Scores over several completions: against all draws, counted one by one."""

from __future__ import annotations

from itertools import combinations

import pytest

from moesaic.rl.validation import Scored, expected_best, summarize

VALUES = [0.2, 1.0, 0.2, 0.7, 0.0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_expected_best_is_that_of_all_draws(size: int) -> None:
    draws = [max(draw) for draw in combinations(VALUES, size)]
    assert expected_best(VALUES, size) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def scored(prompt: int, reward: float, answer: str | None, source: str = "sums") -> Scored:
    return Scored(source=source, prompt=prompt, scores={"reward": reward}, answer=answer)


def test_means_are_over_prompts_and_apart_for_each_source() -> None:
    found = summarize(
        [
            *(scored(0, reward, answer) for reward, answer in ((1, "4"), (0, "5"), (1, "4"), (0, "3"))),
            *(scored(1, reward, answer) for reward, answer in ((0, "7"), (0, "7"), (0, "7"), (1, "8"))),
            scored(2, 0.5, None, source="words"),
        ]
    )
    assert found == {
        "val-core/sums/reward/mean@4": pytest.approx((0.5 + 0.25) / 2),
        "val-aux/sums/reward/best@2/mean": pytest.approx((5 / 6 + 0.5) / 2),
        "val-core/sums/reward/best@4/mean": 1.0,
        "val-core/sums/reward/maj@4/mean": 0.5,  # 4 wins and is right; 7 wins and isn't
        "val-core/words/reward/mean@1": 0.5,
    }


def test_of_answers_that_tie_the_mean_counts() -> None:
    found = summarize([scored(0, 1, "a"), scored(0, 0, "b")])
    assert found["val-core/sums/reward/maj@2/mean"] == 0.5


def test_completions_without_answers_have_no_majority() -> None:
    found = summarize([scored(0, 1, "a"), scored(0, 0, None)])
    assert set(found) == {"val-core/sums/reward/mean@2", "val-core/sums/reward/best@2/mean"}


def test_a_completion_without_a_score_hides_no_prompt() -> None:
    """A function of TRL's kind may give None: the first prompt has one score of two, the second both."""
    first = [scored(0, 1, None), Scored(source="sums", prompt=0, scores={}, answer=None)]
    assert summarize([*first, scored(1, 0, None), scored(1, 0.5, None)]) == {
        "val-core/sums/reward/mean@2": (1 + 0.25) / 2,
        "val-core/sums/reward/best@2/mean": 0.5,
    }


def test_accuracy_is_the_core_of_a_source_that_has_it() -> None:
    both = Scored(source="sums", prompt=0, scores={"reward": -1.0, "acc": 0.0}, answer=None)
    assert set(summarize([both, scored(1, 1, None, source="words")])) == {
        "val-core/sums/acc/mean@1",
        "val-aux/sums/reward/mean@1",
        "val-core/words/reward/mean@1",
    }
