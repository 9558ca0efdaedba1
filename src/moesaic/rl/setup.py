"""Everything a run of reinforcement learning needs before its first step, made from the recipe: on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from moesaic.config import Recipe
from moesaic.engines.prompts import own_stops
from moesaic.ops.parking import build_tier
from moesaic.rl.budget import State, budget_text
from moesaic.rl.environment import load_environment
from moesaic.rl.kl import KlController
from moesaic.rl.learn import Learner
from moesaic.rl.memory import HandOver
from moesaic.rl.phases import PhaseTimer
from moesaic.rl.prompts import PromptOrder, PromptSet, build_prompts
from moesaic.rl.rewards import RewardFunctions
from moesaic.rl.roles import Role, Roles, build_roles
from moesaic.rl.rollout import Rollout
from moesaic.rl.rollout_engines import PARKED, RolloutEngines, build_rollout
from moesaic.rl.scoring import Scorer
from moesaic.rl.state import RlState, load_rl_checkpoint, save_rl_checkpoint
from moesaic.rl.types import Prompt
from moesaic.rl.vocabulary import require_same_tokens
from moesaic.runtime import device_type
from moesaic.train.router import build_router_training
from moesaic.train.setup import (
    agree_on_checkpoint,
    join,
    refuse_later_steps,
    router_options,
    save_kernel_facts,
    save_run_facts,
)
from moesaic.weights.family import require_known_layout

BUDGET = "memory.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRun:
    """A run that is ready for step ``first_step + 1`` of ``num_steps``."""

    recipe: Recipe
    roles: Roles
    hand_over: HandOver
    engines: RolloutEngines
    rollout: Rollout
    prompts: PromptOrder
    held_out: tuple[Prompt, ...]
    functions: RewardFunctions
    scorer: Scorer
    learner: Learner
    timer: PhaseTimer
    tokenizer: PreTrainedTokenizerBase
    prompt_sets: tuple[PromptSet, ...]
    num_steps: int
    first_step: int

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.output_dir)

    @property
    def num_groups(self) -> int:
        """Prompts of a step."""
        return global_batch_size(self.recipe)

    def describe(self) -> list[str]:
        """What became of the prompts, as text."""
        lines = [str(report) for each in self.prompt_sets for report in each.reports]
        if len(self.prompt_sets) > 1 and (shared := self.prompt_sets[1].count_shared(self.prompt_sets[0])):
            lines.append(f"{shared} of {len(self.prompt_sets[1])} held-out prompts are trained on, too")
        return lines

    def save(self, step: int) -> Path:
        """A checkpoint after ``step``; everything that it holds is on the device meanwhile. Every rank must call it."""
        return save_rl_checkpoint(self.output_dir, self.state, step)

    @property
    def state(self) -> RlState:
        """What a checkpoint holds."""
        return RlState(
            roles=self.roles, prompts=self.prompts, kl=self.learner.kl, rollout=self.rollout, hand_over=self.hand_over
        )

    def close(self) -> None:
        """End engines and functions, drop what is parked. A second call does nothing."""
        self.functions.close()
        self.engines.close()
        self.hand_over.close()


def build_rl_run(recipe: Recipe, reward_fns: Sequence[Callable[..., Any]] = ()) -> RlRun:
    """Process group, prompts, roles, engines, and the checkpoint to go on from. Every rank must call it.

    Args:
        reward_fns: beside those that the recipe names, of weight 1.

    Raises:
        ValueError: what only shows here: bad prompts, functions that can't be loaded, roles that read other
            tokens than the actor's, weights that don't fit, a checkpoint folder in the way.
    """
    join(recipe)
    checkpoint = agree_on_checkpoint(recipe)
    folder = recipe.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    require_same_tokens(recipe, tokenizer)
    prompt_sets = _build_prompt_sets(recipe, tokenizer)
    prompts = PromptOrder(prompt_sets[0].prompts, global_batch_size=global_batch_size(recipe), seed=recipe.seed)
    functions = _build_functions(recipe, reward_fns, prompt_sets)
    num_steps = recipe.max_steps or recipe.num_train_epochs * prompts.num_steps_per_epoch
    tier = build_tier(device_type(), Path(recipe.output_dir) / PARKED)
    hand_over = HandOver(tier=tier, parks=recipe.park_idle_roles, sleeps=recipe.rollout.free_cache_engine)
    try:
        roles = build_roles(recipe, num_steps=num_steps, when_built=hand_over.add)
        engines = build_rollout(recipe, roles.actor)
        hand_over.add_engines(engines.engines)
        require_known_layout(roles.actor.model)
        make_environment = None
        if recipe.rollout.environment is not None:
            make_environment = load_environment(recipe.rollout.environment)
        stops = own_stops(tokenizer, Path(folder))
        rollout = Rollout.from_recipe(recipe, engines, tokenizer, stops, make_environment)
        timer = PhaseTimer()
        learner = _build_learner(recipe, roles, hand_over, timer)
        run = RlRun(
            recipe=recipe,
            roles=roles,
            hand_over=hand_over,
            engines=engines,
            rollout=rollout,
            prompts=prompts,
            held_out=prompt_sets[1].prompts if len(prompt_sets) > 1 else (),
            functions=functions,
            scorer=Scorer(functions, tokenizer),
            learner=learner,
            timer=timer,
            tokenizer=tokenizer,
            prompt_sets=prompt_sets,
            num_steps=num_steps,
            first_step=0,
        )
        if checkpoint is not None:
            run = replace(run, first_step=load_rl_checkpoint(checkpoint, run.state))
            refuse_later_steps(run.first_step, num_steps)
        # Last: where a resumption is refused, the folder says what the run was.
        _save_facts(recipe, roles, hand_over)
        return run
    except BaseException:
        hand_over.close()
        raise


def global_batch_size(recipe: Recipe) -> int:
    """Prompts of a step: the recipe's, which ``check`` asks for."""
    assert recipe.global_batch_size is not None, "check_recipe refuses this"
    return recipe.global_batch_size


def _build_prompt_sets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, ...]:
    """Those to train on, and the held-out ones where there are any."""
    most, seed = recipe.rollout.max_prompt_length, recipe.seed
    vocab_size = AutoConfig.from_pretrained(recipe.model, local_files_only=True).get_text_config().vocab_size
    sets = [build_prompts(recipe.train_dataset, tokenizer, most, seed=seed, vocab_size=vocab_size)]
    if recipe.eval_dataset:
        held_out = recipe.eval_dataset
        sets.append(build_prompts(held_out, tokenizer, most, seed=seed, vocab_size=vocab_size, is_held_out=True))
    return tuple(sets)


def _build_functions(
    recipe: Recipe, reward_fns: Sequence[Callable[..., Any]], prompt_sets: Sequence[PromptSet]
) -> RewardFunctions:
    names: list[str | Callable[..., Any]] = [*recipe.reward.functions, *reward_fns]
    weights = recipe.reward.weights[: len(recipe.reward.functions)]  # what follows is the model's
    if weights:
        weights = (*weights, *(1.0 for _ in reward_fns))
    functions = RewardFunctions(names, weights=weights, timeout_s=recipe.reward.timeout_s)
    functions.check([prompt for each in prompt_sets for prompt in each.prompts])
    return functions


def _build_learner(recipe: Recipe, roles: Roles, hand_over: HandOver, timer: PhaseTimer) -> Learner:
    @contextmanager
    def at_work(phase: str, role: Role) -> Iterator[None]:
        with timer.measure(phase):
            hand_over.enter(State.TRAIN, role.name)
            yield

    actor = roles.actor
    return Learner(
        recipe=recipe,
        roles=roles,
        kl=KlController(recipe.kl_config),
        router=build_router_training(actor.model, router_options(actor.recipe, actor.model), actor.meshes),
        at_work=at_work,
    )


def _save_facts(recipe: Recipe, roles: Roles, hand_over: HandOver) -> None:
    """What the run is, into its folder; the meshes of every role, and what each state has on rank 0's device."""
    save_run_facts(recipe, roles.actor.meshes)
    save_kernel_facts(recipe, roles.actor.model)
    if dist.get_rank() != 0:
        return
    folder = Path(recipe.output_dir)
    tables = [f"{role.name}\n{role.meshes.table()}\n" for role in roles.present]
    (folder / "meshes.txt").write_text("\n".join(tables), encoding="utf-8")
    text = budget_text(hand_over.budget(), parks=recipe.park_idle_roles)
    (folder / BUDGET).write_text(text + "\n", encoding="utf-8")
