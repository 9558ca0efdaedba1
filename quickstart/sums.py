"""Sums in chat format, from ``reasoning-gym``, split so that no operands seen in training are asked about afterwards.

    python -m quickstart.sums --out-folder build/quickstart/data     # train.jsonl and heldout.jsonl

One line of either file: ``{"messages": [system, user, assistant]}``, with ``45 + 32 =`` from the user and ``77`` from
the assistant. Two sums have the same operands if the numbers are the same in any order: ``45 + 32`` and ``32 + 45`` are
on the same side of the split.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path

SYSTEM_PROMPT = "Answer with the number only."
NUM_TRAIN = 3072
NUM_HELDOUT = 128
SEED = 7
# One of so many groups of operands is held out.
HELDOUT_SHARE = 6
NUM_TERMS = 2
MIN_DIGITS, MAX_DIGITS = 1, 2
NUM_CLASHES_SHOWN = 5

Row = Mapping[str, Sequence[Mapping[str, str]]]


def stream_rows(seed: int) -> Iterator[Row]:
    """Sums of two numbers, both of one digit or both of two, without end, the same for the same seed.

    ``chain_sum`` mixes sums and differences; the differences are left out.
    """
    import reasoning_gym  # here alone: reading and checking rows, and scoring, do without it

    size = 4096
    while True:
        questions = reasoning_gym.create_dataset(
            "chain_sum",
            seed=seed,
            size=size,
            min_terms=NUM_TERMS,
            max_terms=NUM_TERMS,
            min_digits=MIN_DIGITS,
            max_digits=MAX_DIGITS,
        )
        for question in questions:
            if "-" not in question["metadata"]["expression"]:
                yield build_row(question["metadata"]["expression"], question["answer"])
        seed += size  # reasoning-gym's question i of seed s is question 0 of seed s + i


def build_row(expression: str, answer: str) -> Row:
    """One chat: ``build_row("45 + 32", "77")`` asks ``45 + 32 =`` and answers ``77``."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"{expression} ="},
            {"role": "assistant", "content": answer},
        ]
    }


def operands(row: Row) -> tuple[int, ...]:
    """The numbers that a row asks to add, ascending: (32, 45) for ``45 + 32 =``."""
    asked = next(message["content"] for message in row["messages"] if message["role"] == "user")
    return tuple(sorted(int(number) for number in re.findall(r"\d+", asked)))


def build_split(
    num_train: int = NUM_TRAIN, num_heldout: int = NUM_HELDOUT, seed: int = SEED
) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows with disjoint operands; no question twice, and no held-out operands twice.

    Raises:
        ValueError: there aren't so many different sums.
    """
    groups = [pair for numbers in (range(10), range(10, 100)) for pair in combinations_with_replacement(numbers, 2)]
    chosen = set(random.Random(seed).sample(groups, len(groups) // HELDOUT_SHARE))
    num_groups_left = len(groups) - len(chosen)
    if not (1 <= num_heldout <= len(chosen) and 1 <= num_train <= num_groups_left):
        raise ValueError(
            f"num_train={num_train}, num_heldout={num_heldout}: there are {len(groups)} pairs of operands, a sixth of "
            f"them held out; ask for 1 to {num_groups_left} and for 1 to {len(chosen)}."
        )
    train: dict[str, Row] = {}
    heldout: dict[tuple[int, ...], Row] = {}
    for row in stream_rows(seed):
        group, question = operands(row), row["messages"][1]["content"]
        if group in chosen and len(heldout) < num_heldout:
            heldout.setdefault(group, row)
        elif group not in chosen and len(train) < num_train:
            train.setdefault(question, row)
        if len(train) == num_train and len(heldout) == num_heldout:
            break
    return list(train.values()), list(heldout.values())


def check_disjoint(train: Iterable[Row], heldout: Iterable[Row]) -> None:
    """Refuse a split in which a held-out sum's operands, in any order, occur in training.

    Raises:
        ValueError: names the first clashes.
    """
    trained = {operands(row) for row in train}
    clashes = sorted({operands(row) for row in heldout} & trained)
    if clashes:
        shown = ", ".join(" and ".join(map(str, clash)) for clash in clashes[:NUM_CLASHES_SHOWN])
        raise ValueError(
            f"heldout: {len(clashes)} groups of operands occur in training too, first {shown}; held-out sums must be "
            "new. Remove them from one of the two, or build both with quickstart.sums."
        )


def load_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def save_split(out_folder: Path, train: Sequence[Row], heldout: Sequence[Row]) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``; an overlap is refused (``check_disjoint``) before that."""
    check_disjoint(train, heldout)
    out_folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        (out_folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-folder", type=Path, default=Path("build/quickstart/data"))
    parser.add_argument("--num-train", type=int, default=NUM_TRAIN)
    parser.add_argument("--num-heldout", type=int, default=NUM_HELDOUT)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    train, heldout = build_split(arguments.num_train, arguments.num_heldout, arguments.seed)
    save_split(arguments.out_folder, train, heldout)
    print(f"{len(train)} sums to train on, {len(heldout)} held out, in {arguments.out_folder}")


if __name__ == "__main__":
    main()
