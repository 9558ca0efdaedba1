"""What a step is reported as: the numbers of ``metrics.jsonl`` beside verl's own, and the lines of ``samples``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moesaic.engines.base import FinishReason
from moesaic.rl.metrics import batch_metrics, save_samples
from moesaic.rl.rewards import Reward
from moesaic.rl.types import NO_VERSION, Experience, Prompt, Trajectory
from tests.unit.data_tokenizers import build_tokenizer
from tools.vectors import load_vectors

VECTORS = Path(__file__).parent / "vectors" / "verl.safetensors"
# Of verl's: prompts are never cut here; no completion of a step was given up.
LEFT_OUT = {
    "prompt_length/clip_ratio",
    *(f"response_length_non_aborted/{name}" for name in ("mean", "max", "min", "clip_ratio")),
}


def trajectory(
    tokens: Sequence[int],
    is_model: Sequence[bool],
    *,
    prompt: Sequence[int] = (1, 2),
    group: int = 0,
    index: int = 0,
    version: int = 0,
    reason: FinishReason = "stop",
) -> Trajectory:
    asked = Prompt(number=group, tokens=tuple(prompt), text=f"prompt {group}", row={})
    return Trajectory(
        prompt=asked,
        group=group,
        index=index,
        tokens=tuple(tokens),
        is_model=tuple(is_model),
        logprobs=tuple(-1.0 if mine else 0.0 for mine in is_model),
        versions=tuple(version + number if mine else NO_VERSION for number, mine in enumerate(is_model)),
        finish_reason=reason,
    )


def test_metrics_of_a_step_are_verls() -> None:
    case = load_vectors(VECTORS).of_kind("data_metrics")["step"]
    mask_BT, token_scores_BT = case.inputs["mask"].bool(), case.inputs["token_rewards"]
    # Every trajectory of verl's step ends with a token of the model.
    rows = [row[: int(row.nonzero().max()) + 1].tolist() for row in mask_BT]
    trajectories = [trajectory([3] * len(row), row, group=number) for number, row in enumerate(rows)]
    tables = {name: case.inputs[name] for name in ("advantages", "returns", "values")}
    experience = Experience.of(trajectories).with_columns(token_rewards=case.inputs["returns"], **tables)
    rewards = [Reward(total=score, components={}) for score in token_scores_BT.sum(dim=1).tolist()]
    found = batch_metrics(experience, rewards, mask_BT, max_tokens=mask_BT.size(1))
    expected = dict(zip(case.options["metrics"], case.outputs["metrics"].tolist(), strict=True))
    assert expected.keys() - found.keys() == LEFT_OUT
    for name in expected.keys() - LEFT_OUT:
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


def test_rewards_failures_and_reasons_are_counted() -> None:
    """By hand, of three trajectories: two functions, one of which had nothing to say of the last."""
    rows = [([3, 4, 5], [True] * 3), ([3], [True]), ([3, 4], [True, True])]
    reasons: tuple[FinishReason, ...] = ("length", "aborted", "stop")
    trajectories = [
        trajectory(tokens, mine, group=number, prompt=range(number + 1), reason=reason)
        for number, ((tokens, mine), reason) in enumerate(zip(rows, reasons, strict=True))
    ]
    rewards = [
        Reward(total=1.5, components={"right": 1.0, "short": 0.5}),
        Reward(total=0.0, components={"right": 0.0, "short": 0.0}, num_failed=1),
        Reward(total=3.0, components={"right": 3.0}),
    ]
    experience = Experience.of(trajectories)
    found = batch_metrics(experience, rewards, experience.mask_BT, max_tokens=3)
    expected = {
        "critic/score/mean": 1.5,
        "critic/score/max": 3.0,
        "critic/score/min": 0.0,
        "reward/right/mean": 4 / 3,
        "reward/short/mean": 0.25,
        "reward/num_failed": 1,
        "response_length/mean": 2,
        "response_length/clip_ratio": 1 / 3,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 2,
        "prompt_length/max": 3,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith(("critic/values", "critic/advantages")) for name in found)


def test_each_trajectory_is_a_line_of_samples(tmp_path: Path) -> None:
    """Uneven lengths; the second one's environment wrote a token; the third was rejected whole."""
    tokenizer = build_tokenizer()
    texts = ("hello", "no, try", "it")
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    mine = [[True] * len(tokens[0]), [True, False, *[True] * (len(tokens[1]) - 2)], [True] * len(tokens[2])]
    trajectories = [
        trajectory(ids, is_model, group=number // 2, index=number % 2, version=4)
        for number, (ids, is_model) in enumerate(zip(tokens, mine, strict=True))
    ]
    experience = Experience.of(trajectories)
    mask_BT = experience.mask_BT.clone()
    mask_BT[2] = False
    values_BT = torch.arange(1.0, 1 + mask_BT.numel()).view(mask_BT.shape)
    experience = experience.with_columns(advantages=values_BT)
    rewards = [Reward(total=0.5 * number, components={"right": float(number)}) for number in range(3)]
    save_samples(tmp_path, 12, experience, rewards, mask_BT, tokenizer)
    lines = (tmp_path / "samples" / "step-000012.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [each["response"] for each in rows] == list(texts)
    assert [(each["group"], each["index"], each["prompt"]) for each in rows] == [
        (0, 0, "prompt 0"),
        (0, 1, "prompt 0"),
        (1, 0, "prompt 1"),
    ]
    assert [(each["reward"], each["rewards"]) for each in rows] == [
        (0.0, {"right": 0.0}),
        (0.5, {"right": 1.0}),
        (1.0, {"right": 2.0}),
    ]
    expected = [
        values_BT[row, torch.tensor(mine[row] + [False] * (mask_BT.size(1) - len(mine[row])))] for row in (0, 1)
    ]
    assert [each["advantage"] for each in rows] == [*(float(each.mean()) for each in expected), None]
    assert [each["num_tokens"] for each in rows] == [len(each) for each in tokens]
    assert [each["num_trained_tokens"] for each in rows] == [len(tokens[0]), len(tokens[1]) - 1, 0]
    # The tokens' versions count up from 4; the environment's has none.
    assert [each["versions"] for each in rows] == [[4, 3 + len(each)] for each in tokens]
    assert all(each["step"] == 12 and each["finish_reason"] == "stop" and each["num_turns"] == 1 for each in rows)
