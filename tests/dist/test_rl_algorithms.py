"""Each algorithm as a whole run: four ranks, of any topology, make of the same noise what one rank makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.rl_runs import SAMPLING, StepSeen, recipe_of, run_seen, save_sources
from tests.dist.test_rl_run import read_metrics, read_samples, read_weights
from tests.pool import RunRanks
from tests.unit.data_tokenizers import build_tokenizer

EP = {"dist_config": {"name": "moesaic", "ep_size": 2}}
TP = {"tp_size": 2, "dist_config": {"name": "moesaic", "ep_size": 2}}
CP = {"cp_size": 2, "dist_config": {"name": "moesaic", "ep_size": 4}}
# Of log-probabilities, advantages, ...: their second step begins where rounding has moved the first one's weights.
BOUND = 1e-4
# Metrics that are differences of nearly equal numbers.
TINY = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An algorithm, and a topology.

    Attributes:
        fields: of the recipe; ``{source}`` stands for the folder.
        split: further ones, on four ranks.
        skew: how far the engine's log-probabilities are off.
        expects: metrics that the run must have, other than 0, in each step.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    skew: float = 0.0
    expects: tuple[str, ...] = ()


def algorithm(estimator: str, mode: str = "vanilla", agg: str = "token-mean", **fields: Any) -> dict[str, Any]:
    return {"adv_estimator": estimator, "loss_mode": mode, "loss_agg_mode": agg, **fields}


SEVERAL = {"ppo_epochs": 2, "ppo_mini_batch_size": 2}
TEACHER = {"model": "{source}/teacher"}
FUNCTION = "{source}/functions.py:"

CELLS = {
    "gae": Cell(
        fields={
            "algorithm": algorithm("gae", lam=0.9, gamma=0.95, entropy_coeff=0.01, **SEVERAL),
            "kl_config": {"use": "reward", "estimator": "k1", "coef": 0.1, "target": 0.01, "horizon": 50},
            "critic": {"learning_rate": 0.02},
        },
        # Each role on meshes of its own: ep 2 x efsdp 2, fsdp 4, ep 4, tp 2.
        split={
            **EP,
            "critic": {"learning_rate": 0.02, "dist": "fsdp2"},
            "ref": {"ep_size": 4},
            "rollout": {"tp_size": 2},
        },
        expects=("critic/vf_loss", "critic/grad_norm", "actor/entropy", "actor/ppo_kl"),
    ),
    "grpo": Cell(
        fields={
            "algorithm": algorithm("grpo", agg="seq-mean-token-mean", **SEVERAL),
            "kl_config": {"use": "loss", "coef": 0.1},
            "rollout": {"sampling": {**SAMPLING, "temperature": 0.8}},
            "correction_config": {"rollout_is": "token", "rollout_rs": ("token_k1",), "rollout_rs_threshold": ("1.4",)},
        },
        split=EP,
        skew=0.2,
        expects=("actor/pg_loss", "rollout_corr/rollout_rs_masked_fraction", "training/rollout_probs_diff_mean"),
    ),
    "dr_grpo": Cell(
        fields={
            "algorithm": algorithm("dr_grpo", "gpg", "seq-mean-token-sum-norm", loss_scale_factor=6.0),
            "reward": {"overlong_buffer_len": 4, "overlong_penalty_factor": 0.5},
            "micro_batch_tokens": 96,
        },
        split=CP,
        expects=("reward/overlong/mean", "actor/pg_loss"),
    ),
    "rloo": Cell(
        fields={"algorithm": algorithm("rloo", "gspo", "seq-mean-token-mean", clip_ratio_c=3.0, **SEVERAL)},
        split=CP,
        expects=("actor/ppo_kl",),
    ),
    "reinforce_plus_plus": Cell(
        fields={
            "algorithm": algorithm("reinforce_plus_plus", "cispo", gamma=0.9, cispo_ratio_max=1.05, **SEVERAL),
            "kl_config": {"use": "reward", "estimator": "k2", "coef": 0.1},
        },
        split={**TP, "ref": {"tp_size": 1, "ep_size": 4}, "rollout": {"tp_size": 2}},
        expects=("actor/pg_clipfrac", "actor/reward_kl_penalty_coeff"),
    ),
    "reinforce_plus_plus_baseline": Cell(
        fields={
            "algorithm": algorithm(
                "reinforce_plus_plus_baseline", "sapo", "seq-mean-token-sum", filter_groups=True, max_num_gen_batches=3
            ),
            "reward": {"functions": [FUNCTION + "some"]},
        },
        split=EP,
        expects=("rollout/filtered_groups", "actor/grad_norm"),
    ),
    "remax": Cell(
        fields={
            "algorithm": algorithm("remax", "dppo_tv", dppo_delta_low=0.001, dppo_delta_high=0.001, **SEVERAL),
            "reward": {"model": "{source}/scorer", "weights": (1.0, 0.3), "overlong_buffer_len": 3},
            "correction_config": {"rollout_is": "icepop", "rollout_is_threshold": 1.2},
        },
        split=EP,
        skew=0.2,
        expects=("reward/reward_model/mean", "actor/pg_clipfrac", "rollout_corr/rollout_is_oob_ratio"),
    ),
    "opo": Cell(
        fields={
            "algorithm": algorithm("opo", agg="token-sum"),
            "correction_config": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
            "rollout": {
                "environment": FUNCTION + "make",
                "max_turns": 3,
                "sampling": {"n": 2, "max_tokens": 60},
                "stop_token_ids": list(range(0, 320, 4)),
            },
            "reward": {"functions": []},
        },
        split=TP,
        skew=0.05,
        expects=("reward/environment/mean", "rollout_corr/rollout_is_std"),
    ),
    "on_policy_distillation": Cell(
        fields={
            "algorithm": algorithm("on_policy_distillation"),
            "distillation_config": {"mode": "policy_gradient", "coef": 0.5, "loss_max_clamp": 2.0},
            "teacher": TEACHER,
            "reward": {"functions": []},
            "correction_config": {"bypass_mode": True},
        },
        split={**EP, "teacher": {**TEACHER, "ep_size": 4}},
        skew=0.05,
        expects=("actor/pg_loss", "actor/ppo_kl"),
    ),
    "forward_kl_topk": Cell(
        fields={
            "algorithm": algorithm("grpo", **SEVERAL),
            "distillation_config": {"mode": "forward_kl_topk", "topk": 8, "use_task_rewards": True},
            "teacher": TEACHER,
        },
        split={**TP, "teacher": {**TEACHER, "dist": "fsdp2", "tp_size": 1}},
        expects=("distillation/loss", "actor/pg_loss"),
    ),
    "forward_kl_topk alone": Cell(
        fields={
            "distillation_config": {"mode": "forward_kl_topk", "topk": 8},
            "teacher": TEACHER,
            "reward": {"functions": []},
            "rollout": {"sampling": {**SAMPLING, "n": 1}},
            "global_batch_size": 8,
            "micro_batch_tokens": 64,
        },
        split={**CP, "teacher": {**TEACHER, "micro_batch_tokens": 96}},
        expects=("distillation/loss",),
    ),
}
# The others cover what these leave out, at leisure.
SLOW = ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "dr_grpo", "forward_kl_topk alone")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sources(tmp_path_factory.mktemp("rl-algorithms"))


def filled(value: Any, source: Path) -> Any:
    """With the folder's name."""
    if isinstance(value, dict):
        return {key: filled(each, source) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(each, source) for each in value)
    return value.replace("{source}", str(source)) if isinstance(value, str) else value


def merged(fields: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {
        **fields,
        **{
            name: {**fields[name], **value} if isinstance(value, dict) and isinstance(fields.get(name), dict) else value
            for name, value in over.items()
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A run that has ended: its folder, and what each step was on rank 0."""

    folder: Path
    steps: list[StepSeen]


def run_cell(run_ranks: RunRanks, source: Path, folder: Path, cell: Cell, world_size: int) -> Done:
    """Every rank must have seen the same, bit for bit."""
    fields = merged(cell.fields, cell.split) if world_size > 1 else cell.fields
    recipe = recipe_of(source, folder, world_size, **filled(fields, source))
    results = run_ranks(run_seen, world_size, recipe, cell.skew)
    for rank, steps in enumerate(results):
        assert [each.crc for each in steps] == [each.crc for each in results[0]], (
            f"rank {rank} decides by other numbers"
        )
    return Done(folder=folder, steps=results[0])


def differs(name: str) -> bool:
    return name.startswith(("timing_s/", "perf/")) or name == "rollout/tokens_per_s"


def assert_same_run(split: Done, alone: Done) -> None:
    """Tokens, tables, metrics, samples, weights."""
    assert len(split.steps) == len(alone.steps) == 2
    for ours, theirs in zip(split.steps, alone.steps, strict=True):
        assert (ours.tokens, ours.is_model) == (theirs.tokens, theirs.is_model)
        assert torch.equal(ours.mask_BT, theirs.mask_BT) and ours.columns.keys() == theirs.columns.keys()
        for name, column in theirs.columns.items():
            torch.testing.assert_close(ours.columns[name], column, rtol=BOUND, atol=BOUND)
        assert all(map(torch.equal, ours.weights, theirs.weights)) and len(ours.weights) == len(theirs.weights) > 0
    for ours, theirs in zip(*(read_metrics(each.folder, "rl") for each in (split, alone)), strict=True):
        assert ours.keys() == theirs.keys()
        wrong = {
            name: (ours[name], value)
            for name, value in theirs.items()
            if not differs(name) and ours[name] != pytest.approx(value, rel=BOUND, abs=TINY)
        }
        assert not wrong
    for step in (1, 2):
        ours, theirs = (read_samples(each.folder, step) for each in (split, alone))
        same = ("group", "index", "prompt", "response", "num_trained_tokens", "versions", "finish_reason")
        assert [[each[name] for name in same] for each in ours] == [[each[name] for name in same] for each in theirs]
    a, b = read_weights(split.folder / "export"), read_weights(alone.folder / "export")
    assert a.keys() == b.keys() and len(a) > 20
    for name, tensor in b.items():
        torch.testing.assert_close(a[name], tensor, rtol=BOUND, atol=BOUND * tensor.abs().max().item())


def assert_learned(source: Path, cell: Cell, run: Done) -> None:
    before, after = read_weights(source / "model"), read_weights(run.folder / "export")
    moved = [((after[name] - before[name]).abs().max() / before[name].abs().max()).item() for name in before]
    assert sum(each > 20 * BOUND for each in moved) > len(moved) / 2, "the comparison would show nothing"
    for number, metrics in enumerate(read_metrics(run.folder, "rl")):
        for name in cell.expects:
            assert abs(metrics[name]) > 10 * TINY, f"{name} is {metrics[name]} in step {number + 1}"
        assert metrics["rollout/weight_version"] == number and metrics["actor/num_skipped"] == 0
    assert len({len(tokens) for step in run.steps for tokens in step.tokens}) > 2, "lengths that hide nothing"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CELLS]
)
def test_four_ranks_learn_what_one_does(run_ranks: RunRanks, source: Path, tmp_path: Path, name: str) -> None:
    cell = CELLS[name]
    alone = run_cell(run_ranks, source, tmp_path / "alone", cell, 1)
    assert_learned(source, cell, alone)
    split = run_cell(run_ranks, source, tmp_path / "split", cell, 4)
    assert_same_run(split, alone)
    if "environment" in cell.fields.get("rollout", {}):
        assert_environment_is_context(split)
    if cell.fields.get("algorithm", {}).get("filter_groups"):
        for step in (1, 2):
            rewards = [each["reward"] for each in read_samples(split.folder, step)]
            assert len(rewards) == 8 and all(
                one != other for one, other in zip(rewards[::2], rewards[1::2], strict=True)
            )


def assert_environment_is_context(run: Done) -> None:
    """What it wrote is there, word by word, between the model's turns, and has no part in a loss."""
    tokenizer = build_tokenizer()
    num_said = 0
    for step in run.steps:
        total = torch.stack(step.weights).sum(dim=0)
        for row, (tokens, is_model) in enumerate(zip(step.tokens, step.is_model, strict=True)):
            said = [token for token, mine in zip(tokens, is_model, strict=True) if not mine]
            num_said += bool(said)
            text = tokenizer.decode(said)
            turns = text.count("<|im_start|>user\nit is the sum")
            assert turns == text.count("<|im_start|>assistant") == text.count("it is"), text
            assert is_model[0] and is_model[-1]
            mine = torch.tensor(is_model)
            assert (total[row, : len(tokens)][mine] > 0).all() and not total[row, : len(tokens)][~mine].any()
            assert not total[row, len(tokens) :].any()
    assert num_said > len(run.steps), "most go on after their first turn"
