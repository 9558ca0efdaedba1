"""Everything that the recipes in recipes/rl/*_tiny.yaml name: data, and a 5M model that has learned a partial skill.

    python -m quickstart.tiny_rl --out build/tiny_rl              # about a minute and a half
    python -m quickstart.tiny_rl --out build/tiny_rl --teacher    # and the teacher of opd_tiny.yaml
    moesaic train recipes/rl/grpo_tiny.yaml --nproc 4             # what it is for

It makes, as far as it isn't there yet::

    train.jsonl heldout.jsonl    words to spell backward (quickstart/tiny_task.py)
    sft.jsonl teacher_sft.jsonl  demonstrations of the words in train.jsonl: sloppy ones, and right ones
    start/ teacher_start/        random weights
    model/ teacher/              the same, after `moesaic train recipes/sft/tiny.yaml` on the demonstrations

A folder gets its name when it is complete. ``quickstart.rewards`` says what a run then made of it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from quickstart.tiny_model import STUDENT_SIZES, TEACHER_SIZES, save_random_model
from quickstart.tiny_task import build_demonstrations, build_right_demonstrations, build_split, load_rows, save_rows

RECIPE = Path("recipes/sft/tiny.yaml")
NUM_PROCESSES = 2
SEED = 0


def prepare_data(out: Path) -> None:
    """The four jsonl files."""
    names = ("train", "heldout", "sft", "teacher_sft")
    if all((out / f"{name}.jsonl").exists() for name in names):
        return
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = build_split()
    contents = (train, heldout, build_demonstrations(train), build_right_demonstrations(train))
    for name, rows in zip(names, contents, strict=True):
        save_rows(rows, out / f"{name}.jsonl")


def prepare_model(out: Path, name: str, sizes: tuple[int, int, int], seed: int) -> None:
    """``start`` and ``model`` for the name ``""``, ``teacher_start`` and ``teacher`` for ``teacher``."""
    start, run = out / f"{name}_start".lstrip("_"), out / f"{name}_sft".lstrip("_")
    trained = out / (name or "model")
    if trained.exists():
        return
    for leftover in (start, run):  # of an attempt that was interrupted
        shutil.rmtree(leftover, ignore_errors=True)
    num_parameters = save_random_model(start, sizes, seed)
    print(f"{start}: {num_parameters / 1e6:.1f}M parameters", flush=True)
    fields = (f"model={start}", f"train_dataset.path={run}.jsonl", f"output_dir={run}", f"seed={seed}")
    command = ("train", str(RECIPE), *fields, "--nproc", str(NUM_PROCESSES))
    print("moesaic", *command, flush=True)
    subprocess.run([sys.executable, "-m", "moesaic.cli", *command], check=True)
    (run / "export").rename(trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/tiny_rl"))
    parser.add_argument("--teacher", action="store_true", help="make the teacher too")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random weights and the order of the data")
    arguments = parser.parse_args()
    prepare_data(arguments.out)
    prepare_model(arguments.out, "", STUDENT_SIZES, arguments.seed)
    if arguments.teacher:
        prepare_model(arguments.out, "teacher", TEACHER_SIZES, arguments.seed)
    num_train, num_heldout = (len(load_rows(arguments.out / f"{name}.jsonl")) for name in ("train", "heldout"))
    print(f"{arguments.out}: {num_train} words to train on, {num_heldout} held out; {arguments.out / 'model'} is ready")


if __name__ == "__main__":
    main()
