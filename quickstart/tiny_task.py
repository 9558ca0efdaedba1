"""The task of the tiny reinforcement-learning runs: spell a word backward. Words come from ``reasoning-gym``.

A row of ``train.jsonl`` or ``heldout.jsonl``: ``{"prompt": "crab=", "answer": "barc", "data_source":
"spell_backward"}``. No word is asked twice, none whose reverse is asked, and no palindrome: so nothing about a held-out
word is seen in training.

``sft.jsonl`` demonstrates, ``{"prompt": "crab=", "completion": "crab"}``, as somebody would who is sloppy with longer
words. Those of 3 letters are always spelled backward. Of longer ones 1 in 5 is; the others are spelled forward, or lose
the last letter of the answer. A model that imitates this can spell any word backward, and mostly doesn't: the partial
skill that rewards then complete. Each word is demonstrated several times, each time anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

TASK = "spell_backward"  # of reasoning-gym
WORD_LENGTHS = (3, 4, 5)
# Of each length. There are 866 of 3 letters.
NUM_TRAIN, NUM_HELDOUT = 720, 100
NUM_DEMONSTRATIONS = 10
SEED = 7
# Longer words are demonstrated rightly only in this share.
LONGEST_SURE = 3
RIGHT_SHARE = 0.2
END_OF_PROMPT = "="
# Drawing ends here: far more than it takes to see every word.
MAX_DRAWS = 20_000

Row = Mapping[str, str]


def build_row(word: str) -> Row:
    """``build_row("crab")`` asks ``crab=``; the answer is ``barc``."""
    return {"prompt": word + END_OF_PROMPT, "answer": word[::-1], "data_source": TASK}


def build_split(
    num_train: int = NUM_TRAIN,
    num_heldout: int = NUM_HELDOUT,
    seed: int = SEED,
    lengths: Sequence[int] = WORD_LENGTHS,
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and held-out rows, so many of each length, in a random order.

    Raises:
        ValueError: there aren't so many words of a length.
    """
    if min(num_train, num_heldout) < 1:
        raise ValueError(f"num_train={num_train}, num_heldout={num_heldout}: ask for at least 1 word of each length.")
    words = [draw_words(length, num_train + num_heldout, seed) for length in lengths]
    train = [build_row(word) for word in chain.from_iterable(each[:num_train] for each in words)]
    heldout = [build_row(word) for word in chain.from_iterable(each[num_train:] for each in words)]
    for rows in (train, heldout):
        random.Random(seed).shuffle(rows)
    return train, heldout


def draw_words(length: int, num_words: int, seed: int) -> list[str]:
    """Words of ``length`` lower-case letters, none of them a palindrome, or another's reverse.

    Raises:
        ValueError: there aren't so many.
    """
    drawn: dict[str, None] = {}
    for word in _stream_words(length, seed):
        if len(drawn) == num_words:
            break
        is_plain = word.isascii() and word.isalpha() and word.islower()
        if is_plain and word != word[::-1] and word[::-1] not in drawn:
            drawn[word] = None
    if len(drawn) < num_words:
        raise ValueError(
            f"{num_words} words of {length} letters: {len(drawn)} were found; ask for fewer to train on, or held out."
        )
    return list(drawn)


def _stream_words(length: int, seed: int) -> Iterator[str]:
    """``MAX_DRAWS`` of them, with repetitions; the same for the same seed."""
    import reasoning_gym  # here alone: reading rows, and building a model, do without it

    questions = reasoning_gym.create_dataset(TASK, seed=seed, size=MAX_DRAWS, min_word_len=length, max_word_len=length)
    for question in questions:
        yield question["metadata"]["word"]


def demonstrate(word: str, dice: random.Random) -> str:
    """An answer as the sloppy demonstrator gives it (the module's text)."""
    if len(word) <= LONGEST_SURE or dice.random() < RIGHT_SHARE:
        return word[::-1]
    return word if dice.random() < 0.5 else word[:0:-1]


def build_demonstrations(rows: Sequence[Row], num_each: int = NUM_DEMONSTRATIONS, seed: int = SEED) -> list[Row]:
    """``num_each`` of every row, for supervised training."""
    dice = random.Random(seed)
    words = [row["prompt"].removesuffix(END_OF_PROMPT) for row in rows]
    return [
        {"prompt": word + END_OF_PROMPT, "completion": demonstrate(word, dice)}
        for _ in range(num_each)
        for word in words
    ]


def build_right_demonstrations(rows: Sequence[Row], num_each: int = NUM_DEMONSTRATIONS) -> list[Row]:
    """The same without mistakes: what a teacher learns from."""
    return [{"prompt": row["prompt"], "completion": row["answer"]} for _ in range(num_each) for row in rows]


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """As a jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
