"""Accuracy of a saved model on held-out sums: plain transformers, one process, greedy answers.

python -m quickstart.evaluate build/quickstart/model build/quickstart/data/heldout.jsonl --out before.json
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quickstart.sums import Row, load_rows

# One takes 22 s. Two wait for each other where other work keeps the cores busy: 182 s, measured on two busy cores.
NUM_THREADS = 1
BATCH_SIZE = 64
MAX_NEW_TOKENS = 12
NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One held-out sum: the question, the right answer, the model's text, and whether its last number is right."""

    question: str
    answer: str
    generated: str
    is_right: bool


def is_right(generated: str, answer: str) -> bool:
    """Whether the last whole number in ``generated`` is ``answer``: "2 + 5 is 7." is right for "7", "7 or 8" is not."""
    numbers = re.findall(r"-?\d+", generated.replace(",", ""))
    return bool(numbers) and int(numbers[-1]) == int(answer)


@torch.no_grad()
def score(model_folder: Path, rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> list[Scored]:
    """Ask the model every row's question, all but its last message, and score what it says."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
    scored: list[Scored] = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        inputs = tokenizer.apply_chat_template(
            [list(row["messages"][:-1]) for row in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, text in zip(batch, texts, strict=True):
            question, answer = row["messages"][-2]["content"], row["messages"][-1]["content"]
            right = is_right(text, answer)
            scored.append(Scored(question=question, answer=answer, generated=text, is_right=right))
    return scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", type=Path)
    parser.add_argument("heldout", type=Path, help="jsonl with messages, the last one the right answer")
    parser.add_argument("--out", type=Path, help="where to write accuracy and every answer, as JSON")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-threads", type=int, default=NUM_THREADS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    started_s = time.perf_counter()
    dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    scored = score(arguments.model_folder, load_rows(arguments.heldout), dtype)
    accuracy = sum(one.is_right for one in scored) / len(scored)
    print(f"accuracy {accuracy:.3f} on {len(scored)} held-out sums, {time.perf_counter() - started_s:.1f} s")
    for one in scored[:NUM_SHOWN]:
        print(f"  {one.question} {one.generated!r} ({'right' if one.is_right else f'wrong: {one.answer}'})")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        results = {"accuracy": accuracy, "num_sums": len(scored), "sums": [asdict(one) for one in scored]}
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
