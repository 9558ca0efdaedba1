"""Rollouts on four ranks: whole copies, tp and ep give the same tokens; weights come and go; all fail together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from moesaic.config import Recipe
from moesaic.config.rl_sections import SamplingConfig
from moesaic.engines.hf import HfEngine
from moesaic.engines.states import EngineStateError
from moesaic.engines.sync import SyncFailed
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.rl.environment import Step
from moesaic.rl.requests import Group
from moesaic.rl.roles import Role
from moesaic.rl.rollout import Rollout
from moesaic.rl.rollout_engines import RolloutEngines, build_rollout
from moesaic.rl.types import Prompt, Trajectory
from moesaic.weights.agree import state_tensors
from moesaic.weights.load import load_weights
from tests.pool import RunRanks
from tests.unit.test_engine_hf import make_model, plain_tokens, recompute

GREEDY = SamplingConfig(max_tokens=6, temperature=0.0, n=1)
SIZES: Mapping[str, dict[str, Any]] = {"whole": {}, "tp": {"tp_size": 2, "dp_size": 2}, "ep": {"ep_size": 2}}


def prompts(count: int) -> list[Prompt]:
    """Of uneven lengths."""
    return [
        Prompt(number=number, tokens=tuple(range(3 + number, 5 + 3 * number)), text="", row={"number": number})
        for number in range(count)
    ]


def recipe_of(folder: Path, **rollout: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(folder),
            "train_dataset": "d",
            "stage": "rl",
            "bf16": False,
            "dist_timeout": 60,
            "seed": 3,
            "rollout": rollout,
        }
    )


def actor_of(recipe: Recipe) -> Role:
    """Sharded in another way than any rollout: experts over pairs, everything over the ranks."""
    meshes = build_meshes(ep_size=2)
    return Role(name="actor", recipe=recipe, meshes=meshes, model=from_pretrained(recipe.model, meshes))


def build(folder: Path, actor: Role | None = None, **rollout: Any) -> tuple[RolloutEngines, Rollout, Role]:
    recipe = recipe_of(folder, **rollout)
    actor = actor or actor_of(recipe)
    engines = build_rollout(recipe, actor)
    return engines, Rollout(engines.engine, engines.seat, seed=recipe.seed), actor


def everywhere(value: Any) -> None:
    """It is the same on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(each == values[0] for each in values)


def generate_in_every_way(rank: int, folder: Path) -> None:
    """Fewer prompts than ranks, as many, more, not divisible; one and several completions of each."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [tuple(plain_tokens(plain, each.tokens, 6)) for each in prompts(6)]
    actor, drawn_by = None, []
    for sizes in SIZES.values():
        engines, rollout, actor = build(folder, actor, **sizes)
        engines.sync(1)
        for count, n in ((1, 1), (1, 3), (2, 1), (4, 1), (6, 1), (3, 2)):
            trajectories = rollout.generate(prompts(count), GREEDY.model_copy(update={"n": n}), 0)
            everywhere(trajectories)
            assert [(each.group, each.index) for each in trajectories] == [
                (g, i) for g in range(count) for i in range(n)
            ]
            for each in trajectories:
                assert each.tokens == expected[each.group], (sizes, count, n)
                assert each.versions == (1,) * 6 and each.finish_reason == "length"
                logprobs, _ = recompute(plain, each.prompt.tokens, each.tokens)
                assert (torch.tensor(each.logprobs) - logprobs).abs().max() < 1e-5
        drawn = SamplingConfig(max_tokens=6, n=3)
        first = rollout.generate(prompts(3), drawn, 5)
        assert first == rollout.generate(prompts(3), drawn, 5), "a step that is repeated draws the same"
        assert first != rollout.generate(prompts(3), drawn, 6)
        assert len({each.tokens for each in first}) > 3
        everywhere(first)
        drawn_by.append([each.tokens for each in first])
        engines.close()
    assert all(each == drawn_by[0] for each in drawn_by), "whichever replica draws it, of whatever size"


def test_every_way_gives_the_tokens_of_the_whole_model(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(generate_in_every_way, 4, tmp_path / "model")


def come_and_go(rank: int, first: Path, second: Path, kind: str) -> None:
    engines, rollout, actor = build(first, **SIZES[kind])
    engine = engines.engine
    assert isinstance(engine, HfEngine) and engine.state.asleep
    with pytest.raises((EngineStateError, RuntimeError)):
        rollout.generate(prompts(2), GREEDY, 0)
    for version, folder in enumerate((first, second), start=1):
        load_weights(actor.model, folder)
        engines.sync(version)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trajectories = rollout.generate(prompts(3), GREEDY, version)
        assert [each.tokens for each in trajectories] == [
            tuple(plain_tokens(plain, each.tokens, 6)) for each in prompts(3)
        ]
        assert {version for each in trajectories for version in each.versions} == {version}
        held = [tensor for tensor in state_tensors(engine.model).values()]
        engines.sleep()
        engines.sleep()
        freed = [each.to_local() if isinstance(each, torch.distributed.tensor.DTensor) else each for each in held]
        assert all(each.untyped_storage().nbytes() == 0 for each in freed)
    with pytest.raises(SyncFailed, match="version=2|versions only grow|failed on rank"):
        engines.sync(1)


@pytest.mark.parametrize("kind", list(SIZES))
def test_weights_come_again_after_each_sleep(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        make_model("qwen3_moe", seed=seed).save_pretrained(tmp_path / name)
    run_ranks(come_and_go, 4, tmp_path / "a", tmp_path / "b", kind)


@dataclass(frozen=True)
class Points:
    total: float


def fail_once(rank: int, folder: Path, kind: str) -> tuple[list[Group], list[Trajectory]]:
    """The model breaks on rank 1 (and on what shares its requests) after the third token; the next step goes on."""
    engines, rollout, _ = build(folder, free_cache_engine=False, **SIZES[kind])
    engines.sync(1)
    engine = engines.engine
    assert isinstance(engine, HfEngine)
    calls = {"count": 0}

    def break_logits(module: Any, args: Any, output: Any) -> Any:
        calls["count"] += 1
        return output * torch.nan if calls["count"] == 4 and engines.seat.replica == 1 else output

    hook = engine.model.lm_head.register_forward_hook(break_logits)
    drawn = iter([prompts(5), []])
    sampling = SamplingConfig(max_tokens=6, temperature=0.0, n=2)
    score = lambda trajectories: [Points(0.0)] * len(trajectories)  # noqa: E731
    with pytest.raises(RuntimeError, match="logits are broken|the rollout failed on|failed on another rank"):
        rollout.collect(0, lambda count: next(drawn), score, sampling, 5)
    hook.remove()
    partials = rollout.partials
    collected = rollout.collect(1, lambda count: next(drawn), score, sampling, 5)
    assert rollout.partials == []
    return partials, collected.trajectories


@pytest.mark.parametrize("kind", list(SIZES))
def test_what_fails_on_one_replica_is_gone_on_with(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    plain = make_model("qwen3_moe")
    plain.save_pretrained(tmp_path / "model")
    results = run_ranks(fail_once, 4, tmp_path / "model", kind)
    assert all(result == results[0] for result in results)
    partials, trajectories = results[0]
    lengths = [len(each.tokens) for group in partials for each in group]
    assert len(lengths) == 10 and 3 in lengths
    assert (kind == "ep") == (max(lengths) < 6), "over ep all ranks stop together"
    for each in trajectories:
        assert list(each.tokens) == plain_tokens(plain, each.prompt.tokens, 6)
    assert [each.prompt.number for each in trajectories] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


class Counting:
    """As many turns as the row's number says, and one more; what it says is different on each rank that asks it."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.left = row["number"]

    def step(self, text: str, tokens: Sequence[int]) -> Step:
        self.left -= 1
        return Step(observation="x" * (1 + dist.get_rank() % 2), reward=0.5, is_done=self.left < 0)


class Letters:
    """A tokenizer of letters, without a chat template."""

    chat_template = None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "y" * len(tokens)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [7] * len(text)}


def play(rank: int, folder: Path, kind: str) -> list[tuple[int, tuple[bool, ...], float | None]]:
    engines, _, _ = build(folder, **SIZES[kind])
    engines.sync(1)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = tuple({plain_tokens(plain, each.tokens, 3)[2] for each in prompts(5)})
    rollout = Rollout(
        engines.engine,
        engines.seat,
        seed=1,
        stop_token_ids=ends,
        max_turns=4,
        make_environment=Counting,
        tokenizer=Letters(),
    )
    trajectories = rollout.generate(prompts(5), SamplingConfig(max_tokens=24, temperature=0.0), 0)
    everywhere(trajectories)
    for each in trajectories:
        sequence = list(each.prompt.tokens)
        for token, is_model, logprob in zip(each.tokens, each.is_model, each.logprobs, strict=True):
            if is_model:
                assert token == plain_tokens(plain, sequence, 1)[0], "the model went on after what it was told"
            assert (logprob != 0) == is_model
            sequence.append(token)
    return [(each.num_turns, each.is_model, each.environment_reward) for each in trajectories]


@pytest.mark.parametrize("kind", list(SIZES))
def test_several_turns_with_an_environment(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    played = run_ranks(play, 4, tmp_path / "model", kind)[0]
    assert len({turns for turns, _, _ in played}) > 2 and any(False in is_model for _, is_model, _ in played)
    assert all(reward == 0.5 * turns for turns, _, reward in played)


def refuse(rank: int, folder: Path) -> None:
    actor = actor_of(recipe_of(folder))
    for sizes, message in (
        ({"tp_size": 3}, "rollout.tp_size=3: must divide the 4 ranks"),
        ({"dp_size": 2}, "rollout.dp_size=2: 4 on 4 ranks"),
        ({"tp_size": 2, "ep_size": 2}, "rollout.tp_size=2: hf splits matrices or experts"),
        ({"pp_size": 2}, "rollout.pp_size=2: hf doesn't split layers"),
        ({"tp_size": 4}, "num_key_value_heads=2"),
        ({"engine": "vllm"}, "rollout.engine='vllm': not yet; hf can be used here"),
    ):
        with pytest.raises(ValueError, match=message):
            build_rollout(recipe_of(folder, **sizes), actor)


def test_sizes_that_do_not_fit(run_ranks: RunRanks, tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    run_ranks(refuse, 4, tmp_path / "model")
