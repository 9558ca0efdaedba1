"""One rank's whole run of reinforcement learning: roll out, score, learn, hand the weights over, again and again.

    SYNC      the actor's weights, as version v, into the engines
    ROLLOUT   prompts become trajectories, trajectories get rewards
    TRAIN     log-probabilities, values, advantages, updates: the actor's weights are those of version v + 1

A step is one round of this; its samples were made by the weights that it then trains, but for what completions that an
engine had broken off already had.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch.distributed as dist

from moesaic.checkpoint import delete_old_checkpoints
from moesaic.config import Recipe
from moesaic.config.rl_sections import SamplingConfig
from moesaic.config.run_folder import EXPORT
from moesaic.rl.budget import State
from moesaic.rl.learn import Learned, Rewarded
from moesaic.rl.metrics import RlWriter, save_samples
from moesaic.rl.rewards import Reward
from moesaic.rl.rollout import Collected
from moesaic.rl.setup import RlRun, build_rl_run
from moesaic.rl.types import Prompt, Trajectory
from moesaic.rl.validation import Scored, summarize
from moesaic.runtime import shutdown, start_errors
from moesaic.train.boards import build_boards
from moesaic.train.metrics import memory_bytes
from moesaic.train.setup import DTYPES
from moesaic.weights import export_hf

logger = logging.getLogger(__name__)


def train_rl(recipe: Recipe, reward_fns: Sequence[Callable[..., Any]] = ()) -> None:
    """Run a recipe of ``stage: rl`` to its end. Every rank must call it, after the recipe was checked for the number of
    ranks.

    The run's folder then holds what a run of supervised training has (``recipe.yaml``, ``metrics.jsonl``, checkpoints,
    ``export/`` with the actor, ...), and ``samples/``: each step's trajectories with rewards and advantages.

    Args:
        reward_fns: reward functions beside those that the recipe names.

    Raises:
        StartError: bad prompts, functions that can't be read, weights that don't fit, a folder in the way.
    """
    with start_errors():
        run = build_rl_run(recipe, reward_fns)
    try:
        with _open_writer(run) as writer:
            _train_steps(run, writer)
        folder = run.output_dir / EXPORT
        if dist.get_rank() == 0 and folder.exists():  # only a resumed run finds one: its own, from before
            shutil.rmtree(folder)
        dist.barrier()
        actor = run.roles.actor
        run.hand_over.enter(State.TRAIN, actor.name)
        export_hf(actor.model, folder, dtype=DTYPES[recipe.compute_dtype], tokenizer_folder=actor.recipe.model)
    finally:
        run.close()
    shutdown()


@contextmanager
def _open_writer(run: RlRun) -> Iterator[RlWriter | None]:
    """The metrics writer on rank 0, None elsewhere; closed at the end, also by an error."""
    if dist.get_rank() != 0:
        yield None
        return
    config = run.recipe.model_dump(mode="json")
    boards = build_boards(run.recipe.report_to, run.output_dir, config, is_resumed=run.first_step > 0)
    with closing(RlWriter(run.output_dir, run.num_steps, run.first_step, boards=boards)) as writer:
        for text in run.describe():
            writer.print(text)
        yield writer


def _train_steps(run: RlRun, writer: RlWriter | None) -> None:
    """All steps; ``writer`` is rank 0's."""
    recipe = run.recipe
    _sync(run, run.first_step)
    if _is_validated(run, run.first_step):  # a resumed run can't know whether it was
        _validate(run, run.first_step, writer)
    run.timer.take()  # a step's times are those of a step
    for step in range(run.first_step + 1, run.num_steps + 1):
        metrics = _one_step(run, step)
        is_last = step == run.num_steps
        if is_last or (recipe.save_steps is not None and step % recipe.save_steps == 0):
            with run.timer.measure("save_checkpoint"):
                folder = run.save(step)
                if recipe.save_total_limit is not None:
                    delete_old_checkpoints(run.output_dir, folder, recipe.save_total_limit)
        if not is_last or run.held_out:
            _sync(run, step)
        if _is_validated(run, step):
            _validate(run, step, writer)
        metrics |= run.timer.take()
        num_tokens = metrics.get("perf/total_num_tokens", 0.0)
        metrics["perf/throughput"] = num_tokens / metrics["timing_s/step"] / dist.get_world_size()
        if writer is not None:
            writer.advance(step)
            if is_last or step % recipe.logging_steps == 0:
                writer.write_step(step, metrics)


def _is_validated(run: RlRun, step: int) -> bool:
    """Whether held-out prompts are scored after ``step`` steps: none, every ``eval_steps``, and all."""
    every = run.recipe.eval_steps
    return bool(run.held_out) and (step in (0, run.num_steps) or (every is not None and step % every == 0))


def _sync(run: RlRun, version: int) -> None:
    """The actor's weights into the engines, which are awake afterwards."""
    with run.timer.measure("update_weights"):
        run.hand_over.enter(State.SYNC)
        run.engines.sync(version)
        run.hand_over.enter(State.ROLLOUT)


def _one_step(run: RlRun, step: int) -> dict[str, float]:
    """Roll out with the weights of the step before, and learn; the engines sleep afterwards."""
    epoch = run.prompts.epoch  # of the step's first prompt
    collected, greedy = _roll_out(run, step)
    metrics = dict(collected.metrics)
    metrics |= {
        "training/global_step": float(step),
        "training/epoch": float(epoch),
        "rollout/weight_version": float(run.engines.engine.version),
    }
    if not collected.trajectories:
        if dist.get_rank() == 0:
            kinds = [f"{metrics[f'rollout/{kind}_groups']:.0f} {kind}" for kind in ("filtered", "partial")]
            logger.warning("step %d: no group of completions to learn from: %s", step, ", ".join(kinds))
        return metrics
    learned = run.learner.learn(step, collected.trajectories, collected.rewards, greedy)
    if dist.get_rank() == 0:
        save_samples(run.output_dir, step, learned.experience, learned.rewards, learned.mask_BT, run.tokenizer)
    return metrics | learned.metrics | _throughput(run, learned)


def _score(run: RlRun, step: int, trajectories: Sequence[Trajectory]) -> list[Reward]:
    """As functions and environments reward; what failed is logged, and counted."""
    with run.timer.measure("reward"):
        rewards = run.scorer(trajectories)
    for failure in run.functions.take_failures():
        what = f"{failure.count} scores of {failure.function} failed ({failure.kind}), the first: {failure.message}"
        logger.warning("step %d: %s", step, what)
    return rewards


def _roll_out(run: RlRun, step: int) -> tuple[Collected[Reward], Rewarded | None]:
    """Trajectories with rewards; under ReMax the likeliest completions, too."""
    recipe = run.recipe
    sampling, algorithm = recipe.rollout.sampling, recipe.algorithm

    asked = [group[0].prompt for group in run.rollout.partials]  # no prompt twice in a step

    def draw(num: int) -> list[Prompt]:
        drawn = run.prompts.next(num, without=asked)
        asked.extend(drawn)
        return drawn

    with run.timer.measure("gen"):
        collected = run.rollout.collect(
            step,
            draw,
            lambda trajectories: _score(run, step, trajectories),
            sampling,
            run.num_groups,
            filters=algorithm.filter_groups,
            max_batches=algorithm.max_num_gen_batches,
        )
    greedy = None
    if algorithm.adv_estimator == "remax" and collected.trajectories:
        prompts = {each.group: each.prompt for each in collected.trajectories}
        with run.timer.measure("gen_max"):
            likeliest = run.rollout.generate_greedy(list(prompts.values()), sampling, step)
            greedy = likeliest, _score(run, step, likeliest)
    run.engines.sleep()
    return collected, greedy


def _validate(run: RlRun, step: int, writer: RlWriter | None) -> None:
    """Scores of the held-out prompts' completions; the engines hold the weights of ``step``, and are awake before and
    after."""
    sampling = run.recipe.rollout.val_sampling
    if sampling is None:
        sampling = SamplingConfig(temperature=0.0, max_tokens=run.recipe.rollout.sampling.max_tokens)
    with run.timer.measure("testing"):
        trajectories = run.rollout.generate(run.held_out, sampling, step)
        rewards = run.learner.judge(trajectories, _score(run, step, trajectories), is_held_out=True)
        if run.hand_over.state is not State.ROLLOUT:  # a reward model was at work
            run.hand_over.enter(State.ROLLOUT)
    if writer is not None:
        scored = [_scored(each, reward) for each, reward in zip(trajectories, rewards, strict=True)]
        writer.write_validation(step, summarize(scored))


def _scored(trajectory: Trajectory, reward: Reward) -> Scored:
    row, extra = trajectory.prompt.row, reward.extra
    scores = {name: float(value) for name, value in extra.items() if isinstance(value, int | float | bool)}
    scores |= {**reward.components, "reward": reward.total}
    answer = extra.get("pred")
    return Scored(
        source=str(row.get("data_source") or "all"),
        prompt=trajectory.prompt.number,
        scores=scores,
        answer=None if answer is None else str(answer),
    )


def _throughput(run: RlRun, learned: Learned) -> dict[str, float]:
    """``perf/...``: tokens of the step, over all ranks, and this rank's peak memory."""
    trajectories = learned.experience.trajectories
    num_tokens = sum(len(each.prompt.tokens) + len(each.tokens) for each in trajectories)
    return {"perf/total_num_tokens": float(num_tokens), "perf/max_memory_gib": memory_bytes() / 2**30}
