"""Whether runs of reinforcement learning learn: held-out accuracy over the steps of the tiny recipes, on 4 processes.

    python -m bench.learn [--only grpo-1 ppo ...] [--write] [--out build/learn]   # all: a quarter of an hour on 2 cores

GRPO three times, each from a 5M Qwen3-MoE of its own (random weights, then supervised training to a partial skill, both
by the run's seed): accuracy must rise by 20 points, in 8 minutes. PPO, DAPO, GSPO and on-policy distillation once each:
by 10. ``--write`` puts the table into docs/rl.md. Exit code 1 where a run gained less, or took longer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quickstart.rewards import NUM_UPDATES, gain_of, read_accuracies, read_rewards
from quickstart.tiny_model import STUDENT_SIZES, TEACHER_SIZES
from quickstart.tiny_rl import prepare_data, prepare_model

NUM_PROCESSES = 4
MAX_SECONDS = 480
DOCS = Path(__file__).parents[1] / "docs" / "rl.md"
MARKS = ("<!-- learning -->\n", "<!-- end of learning -->\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recipe of recipes/rl, a seed, and how much accuracy must rise."""

    recipe: str
    seed: int
    min_gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run has learned.

    Attributes:
        accuracies: of greedy answers to held-out prompts, by step; 0: before the first.
        rewards: means of the first and of the last steps, as completions are sampled in training.
        seconds: of the run, without what it starts from.
    """

    name: str
    accuracies: Mapping[int, float]
    rewards: tuple[float, float]
    seconds: float

    @property
    def gain(self) -> float:
        """In accuracy, from before the first step to after the last."""
        return self.accuracies[max(self.accuracies)] - self.accuracies[0]


RUNS = {
    **{f"grpo-{seed}": Run(recipe="grpo", seed=seed, min_gain=0.2) for seed in range(3)},
    **{name: Run(recipe=name, seed=0, min_gain=0.1) for name in ("ppo", "dapo", "gspo", "opd")},
}


def train(name: str, run: Run, out: Path) -> Result:
    """Make what the run starts from, as far as it isn't there; then run it."""
    source, folder = out / f"seed-{run.seed}", out / name
    prepare_data(source)
    prepare_model(source, "", STUDENT_SIZES, run.seed)
    fields = [f"model={source / 'model'}", f"output_dir={folder}", f"seed={run.seed}"]
    fields += [f"train_dataset.path={source / 'train.jsonl'}", f"eval_dataset.path={source / 'heldout.jsonl'}"]
    if run.recipe == "opd":
        prepare_model(source, "teacher", TEACHER_SIZES, run.seed)
        fields.append(f"teacher.model={source / 'teacher'}")
    shutil.rmtree(folder, ignore_errors=True)
    command = ["train", f"recipes/rl/{run.recipe}_tiny.yaml", *fields, "--nproc", str(NUM_PROCESSES)]
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moesaic.cli", *command], check=True)
    seconds = time.perf_counter() - started_s
    metrics = folder / "metrics.jsonl"
    return Result(
        name=name, accuracies=read_accuracies(metrics), rewards=gain_of(read_rewards(metrics)), seconds=seconds
    )


def render(results: Sequence[Result]) -> str:
    """The table in docs/rl.md: one row a run; accuracies in percent."""
    steps = sorted({step for each in results for step in each.accuracies})
    head = ["run", *(f"step {step}" for step in steps), "gain", f"mean reward, first and last {NUM_UPDATES} steps", "s"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for each in results:
        accuracies = [f"{100 * each.accuracies[step]:.1f}" if step in each.accuracies else "" for step in steps]
        first, last = each.rewards
        cells = [each.name, *accuracies, f"{100 * each.gain:+.1f}", f"{first:.2f}, {last:.2f}", f"{each.seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(table: str) -> None:
    """Put it between the marks in docs/rl.md."""
    before, rest = DOCS.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    DOCS.write_text(f"{before}{MARKS[0]}{table}{MARKS[1]}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS), metavar="RUN")
    parser.add_argument(
        "--write", action="store_true", help="the table into docs/rl.md; all runs, and none that missed"
    )
    parser.add_argument("--out", type=Path, default=Path("build/learn"))
    arguments = parser.parse_args()
    if arguments.write and len(arguments.only) < len(RUNS):
        parser.error("--write is for all runs: drop --only")
    results = [train(name, RUNS[name], arguments.out) for name in arguments.only]
    print(render(results))
    missed = [
        f"{each.name}: {each.gain:+.3f} in {each.seconds:.0f} s, not {RUNS[each.name].min_gain} in {MAX_SECONDS} s"
        for each in results
        if each.gain < RUNS[each.name].min_gain or each.seconds > MAX_SECONDS
    ]
    if missed:
        print("\n".join(missed), file=sys.stderr)
        return 1
    if arguments.write:
        write(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
