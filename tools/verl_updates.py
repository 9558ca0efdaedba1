"""Two epochs of two mini-batches, by verl's own iterator, micro-batches, loss and counts, of a policy of one matrix.

The policy's logits are ``features @ weights``; SGD with momentum, so that the order of updates is in the result. What
verl's engine does around it (its counts of tokens and sequences, the sum over micro-batches) is in ``update`` here, in
the order of ``FSDPEngine.forward_backward_batch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from tensordict import TensorDict
from torch import Tensor
from verl.utils.tensordict_utils import assign_non_tensor, make_iterator
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from tools.vectors import Case, Draw, rounded
from tools.verl_formulas import actor_config
from tools.verl_inputs import NUM_TOKENS, SEED, Step
from tools.verl_steps import PROMPT_LENGTH

NUM_FEATURES, VOCABULARY = 5, 7
EPOCHS, MINI_BATCH_SIZE, MICRO_BATCH_SIZE = 2, 4, 2
LEARNING_RATE, MOMENTUM = 0.5, 0.9
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "loss_mode": "vanilla",
        "loss_agg_mode": "token-mean",
        "clip_ratio_high": 0.28,
        "entropy_coeff": 0.01,
        "use_kl_loss": True,
        "kl_loss_type": "k3+",
        "kl_loss_coef": 0.1,
    },
    "grpo": {
        "loss_mode": "vanilla",
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": True,
        "kl_loss_type": "k3",
        "kl_loss_coef": 0.05,
    },
    "dr_grpo": {"loss_mode": "vanilla", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16},
    "gspo": {
        "loss_mode": "gspo",
        "loss_agg_mode": "seq-mean-token-mean",
        "clip_ratio_low": 0.003,
        "clip_ratio_high": 0.004,
    },
    "cispo": {"loss_mode": "cispo", "loss_agg_mode": "token-mean", "clip_ratio_low": 0.3, "clip_ratio_high": 0.25},
}


def update_cases(step: Step) -> Iterator[Case]:
    """Each run's loss of every update, and the weights after the last."""
    draw = Draw(SEED + 5)
    inputs = {
        "features": draw.numbers(len(step.mask), NUM_TOKENS, NUM_FEATURES, low=-1, high=1),
        "weights": draw.numbers(NUM_FEATURES, VOCABULARY, low=-1, high=1),
        "tokens": draw.integers(len(step.mask), NUM_TOKENS, high=VOCABULARY),
        "advantages": step.advantages,
        "mask": step.mask,
    }
    logits = inputs["features"] @ inputs["weights"]
    logprobs = verl_functional.logprobs_from_logits(logits, inputs["tokens"])
    inputs["old_logprobs"] = rounded(logprobs)
    inputs["ref_logprobs"] = rounded(logprobs) - 0.25
    for name, settings in RUNS.items():
        losses, weights = run(step, settings, inputs)
        options = {
            **settings,
            "ppo_epochs": EPOCHS,
            "mini_batch_size": MINI_BATCH_SIZE,
            "learning_rate": LEARNING_RATE,
            "momentum": MOMENTUM,
        }
        yield Case(
            kind="updates",
            name=name,
            options=options,
            inputs=inputs,
            outputs={"losses": losses, "weights": weights},
        )


def run(step: Step, settings: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The losses [updates] and the last weights."""
    others = {name: value for name, value in settings.items() if name != "loss_mode"}
    config = actor_config(policy_loss=PolicyLossConfig(loss_mode=settings["loss_mode"]), **others)
    weights = inputs["weights"].clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=LEARNING_RATE, momentum=MOMENTUM)
    batch = left_right_2_no_padding(whole_batch(step, inputs))
    losses = [
        update(config, optimizer, weights, mini_batch)
        for mini_batch in make_iterator(
            batch, MINI_BATCH_SIZE, EPOCHS, seed=42, dataloader_kwargs={"shuffle": config.shuffle}
        )
    ]
    return torch.stack(losses), weights.detach()


def whole_batch(step: Step, inputs: dict[str, Tensor]) -> Any:
    """verl's batch of a step: prompts of two tokens to the left of the tables."""
    prompts = torch.ones(len(step.mask), PROMPT_LENGTH, dtype=torch.long)
    attention = torch.cat([prompts, step.attention], dim=1)
    tables = {name: inputs[name] for name in ("features", "tokens", "advantages")}
    return TensorDict(
        {
            "prompts": prompts,
            "responses": inputs["tokens"],
            "input_ids": torch.cat([prompts, inputs["tokens"]], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": step.mask,
            "old_log_probs": inputs["old_logprobs"],
            "ref_log_prob": inputs["ref_logprobs"],
            **tables,
        },
        batch_size=len(step.mask),
    )


def update(config: Any, optimizer: torch.optim.Optimizer, weights: Tensor, mini_batch: Any) -> Tensor:
    """One optimizer update; its loss, summed over micro-batches."""
    assign_non_tensor(
        mini_batch,
        dp_size=1,
        batch_num_tokens=mini_batch["loss_mask"].sum().item(),
        global_batch_size=MINI_BATCH_SIZE,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=MICRO_BATCH_SIZE,
    )
    micro_batches, _ = prepare_micro_batches(mini_batch)
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro_batch in micro_batches:
        logits = micro_batch["features"] @ weights
        logprobs = verl_functional.logprobs_from_logits(logits, micro_batch["tokens"])
        entropies = verl_functional.entropy_from_logits(logits)
        lengths = micro_batch["attention_mask"].sum(dim=1) - PROMPT_LENGTH
        output = {"log_probs": flat(logprobs, lengths), "entropy": flat(entropies, lengths)}
        loss, _ = ppo_loss(config, output, micro_batch)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def flat(table: Tensor, lengths: Tensor) -> Tensor:
    """[total tokens]: one place before the token it is about, as a model gives it, without padding."""
    rows = []
    for row, length in zip(table, lengths.tolist(), strict=True):
        rows += [table.new_zeros(PROMPT_LENGTH - 1), row[:length], table.new_zeros(1)]
    return torch.cat(rows)
