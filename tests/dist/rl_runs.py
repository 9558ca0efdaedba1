"""Tiny runs of reinforcement learning for tests: a folder with models, prompts and functions, and a run that can be
repeated on other ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from moesaic.config import Recipe, check_recipe
from moesaic.engines.base import Completion
from moesaic.rl import rollout, update
from moesaic.rl.aggregation import aggregation_weights
from moesaic.rl.learn import Learned, Learner
from moesaic.rl.loop import train_rl
from moesaic.rl.turns import Turns
from tests.unit.data_tokenizers import build_tokenizer
from tests.unit.tiny_checkpoints import tiny_config

VOCAB_SIZE = 320
NUM_PROMPTS = 12
SAMPLING = {"n": 2, "max_tokens": 6}
FUNCTIONS = '''
import asyncio
import time

from moesaic.rl.environment import Step


def ids(prompts, completions, completion_ids, **columns):
    """Differs from completion to completion."""
    return [len(set(each)) / 6 + each[0] % 7 / 7 for each in completion_ids]


def some(prompts, completions, completion_ids, answer, **columns):
    """All completions of every other prompt are worth the same."""
    rewards = ids(prompts, completions, completion_ids)
    return [0.5 if int(right) % 2 == 0 else reward for right, reward in zip(answer, rewards)]


def none(prompts, completions, **columns):
    return [1.0] * len(prompts)


def raises(data_source, solution_str, ground_truth):
    raise KeyError("no such thing")


async def hangs(data_source, solution_str, ground_truth):
    await asyncio.sleep(1000 if int(ground_truth) % 2 else 0)
    return 0.25


class Game:
    """Two observations, then the end; each turn is worth the number of its tokens."""

    def __init__(self):
        self.turn = 0

    def step(self, text, tokens):
        self.turn += 1
        if self.turn == 3:
            return Step(reward=len(tokens), is_done=True)
        return Step(observation="it is " + "the sum " * self.turn, reward=tokens[0] % 5)


def make(row):
    return Game()
'''


def save_sources(folder: Path) -> Path:
    """``model``, ``teacher`` (larger), ``scorer`` (a classifier), ``train.jsonl``, ``functions.py``."""
    _save(folder / "model", 1, AutoModelForCausalLM)
    _save(folder / "teacher", 2, AutoModelForCausalLM, hidden_size=32, num_hidden_layers=3, num_experts=8)
    _save(folder / "scorer", 3, AutoModelForSequenceClassification, num_labels=1)
    rows = [{"prompt": f"{number}?" * (1 + number % 3), "answer": str(number)} for number in range(NUM_PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


def _save(folder: Path, seed: int, auto_class: Any, **fields: Any) -> None:
    """Every tensor differs from its initial value, and distributions are neither flat nor sharp."""
    torch.manual_seed(seed)
    config = tiny_config("qwen3_moe", vocab_size=VOCAB_SIZE, max_position_embeddings=128, **fields)
    model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def recipe_of(source: Path, output_dir: Path, world_size: int, **fields: Any) -> Recipe:
    """Of two steps of four prompts, two completions each, in fp32; ``fields`` over it, sections field by field."""
    data: dict[str, Any] = {
        "stage": "rl",
        "model": str(source / "model"),
        "train_dataset": {"path": str(source / "train.jsonl"), "format": "prompt"},
        "output_dir": str(output_dir),
        "global_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "optim_config": {"eps": 1e-3},  # else what is nearly no gradient moves a weight as far as any
        "bf16": False,
        "micro_batch_size": 2,
        # A sixth of all tokens end a completion: lengths differ.
        "rollout": {"max_prompt_length": 48, "sampling": SAMPLING, "stop_token_ids": list(range(0, VOCAB_SIZE, 6))},
        "reward": {"functions": [f"{source / 'functions.py'}:ids"]},
        "dist_config": {"name": "moesaic"},
    }
    for name, value in fields.items():
        is_section = isinstance(value, dict) and isinstance(data.get(name), dict)
        data[name] = {**data[name], **value} if is_section else value
    if "micro_batch_tokens" in fields:
        del data["micro_batch_size"]
    recipe = Recipe.model_validate(data)
    assert check_recipe(recipe, world_size) == []
    return recipe


class SkewedTurns(Turns):
    """``skew``: the engine's log-probabilities are off by up to twice this, as those of a quantized one would be."""

    skew = 0.0

    def _add(self, lines: Sequence[Any], answers: Sequence[Sequence[Completion]]) -> None:
        super()._add(lines, [[self._skewed(each) for each in group] for group in answers])

    def _skewed(self, completion: Completion) -> Completion:
        pairs = zip(completion.logprobs, completion.tokens, strict=True)
        return replace(completion, logprobs=tuple(value + self.skew * (token % 5 - 2) for value, token in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What a step of a run was, as one rank has it.

    Attributes:
        tokens, is_model: of each trajectory.
        columns, mask_BT: of the step.
        weights: of each optimizer update.
        crc: of the columns' bits.
    """

    tokens: list[tuple[int, ...]]
    is_model: list[tuple[bool, ...]]
    columns: dict[str, Tensor]
    mask_BT: Tensor
    weights: list[Tensor]
    crc: int


def run_seen(rank: int, recipe: Recipe, skew: float) -> list[StepSeen]:
    """The whole run; of each step that learned, what there was."""
    seen: list[StepSeen] = []
    weights: list[Tensor] = []
    learn = Learner.learn

    def learn_seen(self: Learner, *args: Any, **options: Any) -> Learned:
        weights.clear()
        learned = learn(self, *args, **options)
        columns = dict(learned.experience.columns)
        crc = 0
        for name in sorted(columns):
            crc = zlib.crc32(columns[name].numpy().tobytes(), crc)
        trajectories = learned.experience.trajectories
        step = StepSeen(
            tokens=[each.tokens for each in trajectories],
            is_model=[each.is_model for each in trajectories],
            columns=columns,
            mask_BT=learned.mask_BT,
            weights=list(weights),
            crc=crc,
        )
        seen.append(step)
        return learned

    def weights_seen(*args: Any, **options: Any) -> Tensor:
        weights.append(aggregation_weights(*args, **options))
        return weights[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SkewedTurns, "skew", skew)
        patch.setattr(rollout, "Turns", SkewedTurns)
        patch.setattr(Learner, "learn", learn_seen)
        patch.setattr(update, "aggregation_weights", weights_seen)
        train_rl(recipe)
    return seen
