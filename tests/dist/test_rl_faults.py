"""What goes wrong in a run of reinforcement learning: a rank that fails ends all of them; what is the user's own never
ends it; and steps with nothing to learn, or with groups that aren't whole, are steps all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moesaic.config import Recipe
from moesaic.engines.base import Completion
from moesaic.engines.hf import HfEngine
from moesaic.rl import learn, loop, rollout, update
from moesaic.rl.loop import train_rl
from moesaic.rl.rewards import RewardFunctions
from moesaic.rl.types import Trajectory
from tests.dist.rl_runs import NUM_PROMPTS, SAMPLING, SkewedTurns, recipe_of, save_sources
from tests.dist.test_rl_run import read_metrics, read_samples, read_weights
from tests.pool import RankFailed, RunRanks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sources(tmp_path_factory.mktemp("rl-faults"))


def poisoned(*args: Any, **options: Any) -> Any:
    raise ArithmeticError("poisoned")


def poisoned_run(self: HfEngine, *args: Any) -> Any:
    """Its third forward fails; ranks that share the model wait in that one."""
    count = iter((None, None))
    with self.model.register_forward_pre_hook(lambda *_: next(count, "over") and poisoned()):
        return run_engine(self, *args)


run_engine = HfEngine._run

# Where a rank fails: what is replaced there, on which rank, and fields of the recipe.
PLACES: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "a forward": (learn, "compute_columns", 1, {}),
    "an update": (update, "optimize", 1, {}),
    "its engine": (HfEngine, "_run", 1, {}),
    "an engine of two ranks": (HfEngine, "_run", 1, {"rollout": {"tp_size": 2}}),
    "an engine with half of the experts": (HfEngine, "_run", 1, {"rollout": {"ep_size": 2}}),
    "scoring": (RewardFunctions, "score", 1, {}),
    "writing samples": (loop, "save_samples", 0, {}),
}


def fail_on_rank(rank: int, recipe: Recipe, place: str) -> None:
    where, name, failing, _ = PLACES[place]
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(where, name, poisoned_run if where is HfEngine else poisoned)
        train_rl(recipe)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_ends_all(run_ranks: RunRanks, source: Path, tmp_path: Path, place: str) -> None:
    recipe = recipe_of(source, tmp_path, 2, **PLACES[place][3])
    began = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(fail_on_rank, 2, recipe, place, timeout_s=60)
    assert time.monotonic() - began < 40, "it didn't wait for the others"
    assert "ArithmeticError: poisoned" in failure.value.report


def run(rank: int, recipe: Recipe) -> None:
    train_rl(recipe)


def test_a_step_with_nothing_to_learn_is_a_step(run_ranks: RunRanks, source: Path, tmp_path: Path) -> None:
    """No group's rewards differ: weights stay, versions go on, checkpoints are written, and the next step begins."""
    recipe = recipe_of(
        source,
        tmp_path,
        2,
        reward={"functions": [f"{source}/functions.py:none"]},
        algorithm={"filter_groups": True, "max_num_gen_batches": 2},
        save_steps=1,
    )
    run_ranks(run, 2, recipe)
    steps = read_metrics(tmp_path, "rl")
    assert [each["rollout/weight_version"] for each in steps] == [0, 1]
    for metrics in steps:
        assert metrics["rollout/missing_groups"] == 4 and metrics["rollout/filtered_groups"] == 8
        assert "actor/lr" not in metrics and metrics["timing_s/gen"] > 0
    before, after = read_weights(source / "model"), read_weights(tmp_path / "export")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "step-000001" / ".metadata").is_file() and not (tmp_path / "samples").exists()


def test_held_out_prompts_are_judged_by_the_reward_model(run_ranks: RunRanks, source: Path, tmp_path: Path) -> None:
    """Of two data sets, each by itself. It takes the device for that, and the engines have it back for the next."""
    prompts = [{"path": str(source / f"{name}.jsonl"), "format": "prompt"} for name in ("train", "held_out")]
    rows = [{"prompt": f"{number}!", "data_source": "marks"} for number in range(3)]
    (source / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_of(
        source,
        tmp_path,
        2,
        reward={"functions": [], "model": str(source / "scorer"), "weights": [2.0], "overlong_buffer_len": 5},
        rollout={"val_sampling": {"n": 2, "max_tokens": 8}},
        eval_dataset=prompts,
        eval_steps=1,
    )
    run_ranks(run, 2, recipe)
    found = read_metrics(tmp_path, "val")
    assert len(found) == 3
    for metrics in found:
        for name in (str(source / "train.jsonl"), "marks"):
            score = metrics[f"val-aux/{name}/reward_model/mean@2"]
            assert metrics[f"val-core/{name}/reward/mean@2"] == pytest.approx(2 * score) and score != 0
    assert len({each["val-core/marks/reward/mean@2"] for each in found}) == 3
    sample = read_samples(tmp_path, 1)[0]
    assert sample["reward"] == pytest.approx(2 * sample["rewards"]["reward_model"] + sample["rewards"]["overlong"])
    assert read_metrics(tmp_path, "rl")[1]["rollout/weight_version"] == 1


def end_in_the_last_validation(rank: int, recipe: Recipe) -> None:
    validate = loop._validate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_validate", lambda run, step, writer: (poisoned if step else validate)(run, step, writer))
        train_rl(recipe)


def test_a_validation_that_was_broken_off_is_made_by_the_resumed_run(
    run_ranks: RunRanks, source: Path, tmp_path: Path
) -> None:
    """Its step is in the checkpoint; the run may have had no further one."""
    fields = {"max_steps": 1, "eval_dataset": {"path": str(source / "train.jsonl"), "format": "prompt"}}
    with pytest.raises(RankFailed):
        run_ranks(end_in_the_last_validation, 2, recipe_of(source, tmp_path / "run", 2, **fields))
    run_ranks(run, 2, recipe_of(source, tmp_path / "run", 2, **fields, resume_from_checkpoint="auto"))
    run_ranks(run, 2, recipe_of(source, tmp_path / "straight", 2, **fields))
    assert read_metrics(tmp_path / "run", "val") == read_metrics(tmp_path / "straight", "val")
    ours, theirs = (read_weights(tmp_path / name / "export") for name in ("run", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class TurnsBrokenOff(SkewedTurns):
    """The engine breaks a fresh request of place 1 off after two tokens, as often as it is asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fresh = {place for place, line in self._lines.items() if not line.trajectory.tokens}

    def _add(self, lines: Sequence[Any], answers: Sequence[Sequence[Completion]]) -> None:
        super()._add(
            lines,
            [
                [self._broken_off(line.trajectory, each) for each in group]
                if line.place == 1 and line.place in self._fresh
                else group
                for line, group in zip(lines, answers, strict=True)
            ],
        )

    def _broken_off(self, trajectory: Trajectory, whole: Completion) -> Completion:
        room = max(0, 2 - len(trajectory.tokens))
        return replace(whole, tokens=whole.tokens[:room], logprobs=whole.logprobs[:room], finish_reason="aborted")


def run_broken_off(rank: int, recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "Turns", TurnsBrokenOff)
        train_rl(recipe)


def test_what_was_begun_is_gone_on_with_also_in_a_resumed_run(
    run_ranks: RunRanks, source: Path, tmp_path: Path
) -> None:
    # No stop tokens: completions are six tokens, so that one is still going on after two.
    fields: dict[str, Any] = {"rollout": {"stop_token_ids": [], "sampling": SAMPLING}, "save_steps": 1, "max_steps": 3}
    run_ranks(run_broken_off, 2, recipe_of(source, tmp_path / "straight", 2, **fields))
    steps = read_metrics(tmp_path / "straight", "rl")
    assert [each["rollout/partial_groups"] for each in steps] == [1, 0, 1]
    assert [each["rollout/groups"] for each in steps] == [3, 4, 3]
    assert [each["rollout/continued"] for each in steps] == [0, 1, 0]
    samples = read_samples(tmp_path / "straight", 2)
    assert [each["versions"] for each in samples[:3]] == [[0, 0], [0, 1], [1, 1]], "the group that waited comes first"
    assert all(each["num_tokens"] == 6 for each in samples)
    start = {"resume_from_checkpoint": str(tmp_path / "straight" / "step-000001")}
    run_ranks(run_broken_off, 2, recipe_of(source, tmp_path / "resumed", 2, **fields, **start))
    for step in (2, 3):
        assert read_samples(tmp_path / "straight", step) == read_samples(tmp_path / "resumed", step)
    straight, resumed = (read_weights(tmp_path / name / "export") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_the_prompt_of_a_group_that_waits_is_not_asked_again(run_ranks: RunRanks, source: Path, tmp_path: Path) -> None:
    """A step asks all prompts there are: the next epoch has the one that waits, too."""
    fields = {"rollout": {"stop_token_ids": [], "sampling": SAMPLING}, "global_batch_size": NUM_PROMPTS}
    run_ranks(run_broken_off, 2, recipe_of(source, tmp_path, 2, **fields))
    assert [each["rollout/partial_groups"] for each in read_metrics(tmp_path, "rl")] == [1, 0]
    prompts = [each["prompt"] for each in read_samples(tmp_path, 2)]
    assert len(prompts) == 2 * NUM_PROMPTS and len(set(prompts)) == NUM_PROMPTS


# ------------------------------------------------------------------------------------------- through the command line


def write_recipe(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    return path


Train = Callable[[Path], subprocess.Popen[str]]
# A shell's background jobs ignore Ctrl-C, and so would what they start.
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from moesaic.cli import main; main()"


@pytest.fixture
def train() -> Iterator[Train]:
    """``moesaic train`` of a recipe's file in two processes; ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MAIN, "train", str(path), "--nproc", "2"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()  # its ranks end with it
        process.communicate()


def test_functions_that_fail_are_counted_and_stop_nothing(train: Train, source: Path, tmp_path: Path) -> None:
    """Two processes, as a user starts them. One function raises always; one hangs for odd answers."""
    names = [f"{source}/functions.py:{name}" for name in ("raises", "hangs", "ids")]
    reward = {"functions": names, "weights": [1.0, 2.0, 1.0], "timeout_s": 0.3}
    process = train(write_recipe(tmp_path, recipe_of(source, tmp_path / "out", 2, reward=reward)))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "step 1: " in err and "KeyError" in err and "no answer within 0.3 s" in err
    assert "step 2/2" in out
    for step, metrics in enumerate(read_metrics(tmp_path / "out", "rl"), 1):
        samples = read_samples(tmp_path / "out", step)
        num_odd = sum(int(each["prompt"].split("?")[0].split()[-1]) % 2 for each in samples)
        assert metrics["reward/num_failed"] == 8 + num_odd and 0 < num_odd < 8
        for each in samples:
            values = each["rewards"]
            assert values["raises"] == 0 and values["hangs"] in (0, 0.25)
            assert each["reward"] == pytest.approx(2 * values["hangs"] + values["ids"])
        assert metrics["actor/grad_norm"] > 0
    assert len(read_weights(tmp_path / "out" / "export")) > 20


POISON = """
import torch.distributed as dist
from moesaic.engines.hf import HfEngine

def broken(*args, **options):
    raise ArithmeticError("poisoned")

if dist.get_rank() == 1:
    HfEngine._run = broken

def score(data_source, solution_str, ground_truth):
    return 0.0
"""


@pytest.mark.slow
def test_the_failing_rank_is_the_one_that_is_shown(train: Train, source: Path, tmp_path: Path) -> None:
    """Though the other rank, which is told of it, is done sooner."""
    (tmp_path / "poison.py").write_text(POISON)
    reward = {"functions": [f"{tmp_path}/poison.py:score"]}
    process = train(write_recipe(tmp_path, recipe_of(source, tmp_path / "out", 2, reward=reward)))
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    report = err[err.rindex("rank 1 failed") :]
    assert "in _generate" in report and report.rstrip().endswith("ArithmeticError: poisoned")


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(train: Train, source: Path, tmp_path: Path) -> None:
    process = train(write_recipe(tmp_path, recipe_of(source, tmp_path / "out", 2, max_steps=10_000, save_steps=10_000)))
    assert process.stdout is not None
    while " 2/10000" not in (line := process.stdout.readline()):
        assert line, "the run ended by itself"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.rstrip().endswith("interrupted: all 2 ranks ended")
    parked = tmp_path / "out" / "parked"
    assert not parked.exists() or not list(parked.iterdir())
