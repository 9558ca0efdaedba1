"""What a step of reinforcement learning was like, in verl's names: of the whole step, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moesaic.rl.losses import vf_explained_variance
from moesaic.rl.rewards import Reward
from moesaic.rl.types import Experience
from moesaic.train.writer import RunWriter

SAMPLES = "samples"
# What the console's line shows, where a step has it, and under which name.
SHOWN = (
    ("reward", "critic/score/mean"),
    ("loss", "actor/pg_loss"),
    ("kl", "actor/ppo_kl"),
    ("entropy", "actor/entropy"),
    ("norm", "actor/grad_norm"),
    ("length", "response_length/mean"),
    ("mismatch", "training/rollout_probs_diff_mean"),
)


def batch_metrics(
    experience: Experience, rewards: Sequence[Reward], mask_BT: Tensor, max_tokens: int
) -> dict[str, float]:
    """Of rewards, lengths and tables.

    Args:
        rewards: of each trajectory; ``critic/score`` is of their totals (``Learner.judge``).
        mask_BT: tokens that are trained on.
        max_tokens: of a completion: ``response_length/clip_ratio`` is the share of those that reached it.
    """
    trajectories = experience.trajectories
    lengths = torch.tensor([float(len(each.tokens)) for each in trajectories])
    prompts = torch.tensor([float(len(each.prompt.tokens)) for each in trajectories])
    columns = experience.columns
    metrics = spread("critic/score", torch.tensor([each.total for each in rewards]))
    if "token_rewards" in columns:
        metrics |= spread("critic/rewards", columns["token_rewards"].sum(dim=1))
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= spread(f"critic/{name}", columns[name][mask_BT])
    if "values" in columns:
        explained = vf_explained_variance(columns["values"], columns["returns"], mask_BT)
        metrics["critic/vf_explained_var"] = explained
    metrics |= spread("response_length", lengths) | spread("prompt_length", prompts)
    metrics["response_length/clip_ratio"] = float((lengths >= max_tokens).float().mean())
    metrics["response/aborted_ratio"] = sum(each.finish_reason == "aborted" for each in trajectories) / len(lengths)
    # verl counts the prompt, and each turn of the environment, too.
    metrics |= spread("num_turns", torch.tensor([2 * each.num_turns for each in trajectories]))
    metrics["reward/num_failed"] = float(sum(each.num_failed for each in rewards))
    for name in sorted({name for each in rewards for name in each.components}):
        values = [each.components[name] for each in rewards if name in each.components]
        metrics[f"reward/{name}/mean"] = sum(values) / len(values)
    return metrics


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, largest and least under ``name``; nothing of no values."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def save_samples(
    output_dir: Path,
    step: int,
    experience: Experience,
    rewards: Sequence[Reward],
    mask_BT: Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """A step's trajectories as ``samples/step-000012.jsonl``: one line each, written anew if the step is. By rank 0."""
    folder = output_dir / SAMPLES
    folder.mkdir(parents=True, exist_ok=True)
    advantages = experience.columns.get("advantages")
    with (folder / f"step-{step:06d}.jsonl").open("w", encoding="utf-8") as file:
        for number, (each, reward) in enumerate(zip(experience.trajectories, rewards, strict=True)):
            own = [version for version in each.versions if version >= 0]
            trained = mask_BT[number]
            row = {
                "step": step,
                "group": each.group,
                "index": each.index,
                "prompt": each.prompt.text,
                "response": tokenizer.decode(each.tokens),
                "reward": reward.total,
                "rewards": dict(reward.components),
                "advantage": None
                if advantages is None or not bool(trained.any())
                else float(advantages[number][trained].mean()),
                "num_tokens": len(each.tokens),
                "num_trained_tokens": int(trained.sum()),
                "num_turns": each.num_turns,
                "finish_reason": each.finish_reason,
                "versions": [min(own), max(own)] if own else None,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class RlWriter(RunWriter):
    """Writes what reinforcement learning measures: ``metrics.jsonl`` gets one object a step (``kind: rl``) and one a
    validation (``kind: val``), each with its numbers in ``metrics``."""

    def write_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line to the console and to ``metrics.jsonl``, and a point on each curve."""
        self.append({"kind": "rl", "step": step, "metrics": dict(metrics)})
        self.plot(metrics, step)
        parts = [f"{name} {metrics[key]:.4g}" for name, key in SHOWN if key in metrics]
        self.print("  ".join([self._where(step), *parts, f"{metrics['timing_s/step']:.1f} s"]))

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scores on the held-out prompts, after ``step`` steps."""
        self.append({"kind": "val", "step": step, "metrics": dict(metrics)})
        self.plot(metrics, step)
        core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        shown = [f"{name.removeprefix('val-core/')} {value:.4f}" for name, value in core.items()]
        self.print("  ".join([self._where(step), *shown]))

    def _where(self, step: int) -> str:
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"
