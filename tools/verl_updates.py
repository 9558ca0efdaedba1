"""Two epochs of two mini-batches, by verl's own iterator, micro-batches, loss and counts, of a model of one matrix.

The policy's logits are ``features @ weights``, a critic's values are their first column; SGD with momentum, so that the
order of updates is in the result. What verl's engine does around it (its counts of tokens and sequences, the sum over
micro-batches) is in ``update`` here, in the order of ``FSDPEngine.forward_backward_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from tensordict import TensorDict
from torch import Tensor
from verl.utils.tensordict_utils import assign_non_tensor, make_iterator
from verl.workers.config import CriticConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from tools.vectors import Case, Draw, rounded
from tools.verl_formulas import actor_config
from tools.verl_inputs import NUM_TOKENS, SEED, Step
from tools.verl_steps import PROMPT_LENGTH

NUM_FEATURES, VOCABULARY = 5, 7
EPOCHS, MINI_BATCH_SIZE, MICRO_BATCH_SIZE = 2, 4, 2
LEARNING_RATE, MOMENTUM = 0.5, 0.9
# verl's default for actors; critics draw an order by default.
SHUFFLE = False
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
    "gpg": {"loss_mode": "gpg", "loss_agg_mode": "token-mean"},
    "sapo": {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean", "tau_pos": 0.7, "tau_neg": 2.0},
    "dppo_tv": {
        "loss_mode": "dppo_tv",
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.02,
        "clip_ratio_high": 0.03,
        "clip_ratio_c": 20.0,
    },
    "corrected": {"loss_mode": "vanilla", "loss_agg_mode": "token-mean", "clip_ratio_high": 0.28},
}
# Which of them weigh tokens by how far the engine was off.
CORRECTED = ("corrected", "dppo_tv")
CRITICS: dict[str, dict[str, Any]] = {
    "token-mean": {"loss_agg_mode": "token-mean", "cliprange_value": 0.1},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean", "cliprange_value": 0.3},
}
# The loss of a micro-batch by the model's matrix.
LossOf = Callable[[Tensor, Any], Tensor]


def update_cases(step: Step) -> Iterator[Case]:
    """Each run's loss of every update, and the weights after the last."""
    draw = Draw(SEED + 5)
    model = {
        "features": draw.numbers(len(step.mask), NUM_TOKENS, NUM_FEATURES, low=-1, high=1),
        "weights": draw.numbers(NUM_FEATURES, VOCABULARY, low=-1, high=1),
    }
    policy = {
        "tokens": draw.integers(len(step.mask), NUM_TOKENS, high=VOCABULARY),
        "advantages": step.advantages,
        "mask": step.mask,
    }
    logits = model["features"] @ model["weights"]
    logprobs = rounded(verl_functional.logprobs_from_logits(logits, policy["tokens"]))
    policy |= {"old_logprobs": logprobs, "ref_logprobs": logprobs - 0.25}
    for name, settings in RUNS.items():
        others = {key: value for key, value in settings.items() if key != "loss_mode"}
        config = actor_config(policy_loss=PolicyLossConfig(loss_mode=settings["loss_mode"]), **others)
        corrected = {"rollout_weights": step.weights} if name in CORRECTED else {}
        yield run("updates", name, step, settings, {**model, **policy, **corrected}, policy_loss_of(config))
    critic = {"old_values": rounded(logits[..., 0]), "returns": step.dense_rewards, "mask": step.mask}
    for name, settings in CRITICS.items():
        config = CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, **settings)
        yield run("value_updates", name, step, settings, {**model, **critic}, value_loss_of(config))


def run(kind: str, name: str, step: Step, settings: dict[str, Any], inputs: dict[str, Tensor], loss_of: LossOf) -> Case:
    """The losses [updates] and the last weights."""
    weights = inputs["weights"].clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=LEARNING_RATE, momentum=MOMENTUM)
    batch = left_right_2_no_padding(whole_batch(step, inputs))
    losses = [
        update(loss_of, optimizer, weights, mini_batch)
        for mini_batch in make_iterator(batch, MINI_BATCH_SIZE, EPOCHS, seed=42, dataloader_kwargs={"shuffle": SHUFFLE})
    ]
    options = {
        **settings,
        "ppo_epochs": EPOCHS,
        "mini_batch_size": MINI_BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
    }
    outputs = {"losses": torch.stack(losses), "weights": weights.detach()}
    return Case(kind=kind, name=name, options=options, inputs=inputs, outputs=outputs)


# verl's names of what else a batch may have, beside ours.
NAMES = {
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
    "rollout_weights": "rollout_is_weights",
    "old_values": "values",
    **{name: name for name in ("features", "tokens", "advantages", "returns")},
}


def whole_batch(step: Step, inputs: dict[str, Tensor]) -> Any:
    """verl's batch of a step: prompts of two tokens to the left of the tables."""
    prompts = torch.ones(len(step.mask), PROMPT_LENGTH, dtype=torch.long)
    attention = torch.cat([prompts, step.attention], dim=1)
    responses = inputs.get("tokens", step.mask)
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": step.mask,
            **{theirs: inputs[ours] for ours, theirs in NAMES.items() if ours in inputs},
        },
        batch_size=len(step.mask),
    )


def update(loss_of: LossOf, optimizer: torch.optim.Optimizer, weights: Tensor, mini_batch: Any) -> Tensor:
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
        loss = loss_of(weights, micro_batch)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def policy_loss_of(config: Any) -> LossOf:
    """verl's loss of an actor."""

    def loss_of(weights: Tensor, micro_batch: Any) -> Tensor:
        logits = micro_batch["features"] @ weights
        logprobs = verl_functional.logprobs_from_logits(logits, micro_batch["tokens"])
        entropies = verl_functional.entropy_from_logits(logits)
        output = {"log_probs": flat(logprobs, micro_batch), "entropy": flat(entropies, micro_batch)}
        loss: Tensor = ppo_loss(config, output, micro_batch)[0]
        return loss

    return loss_of


def value_loss_of(config: Any) -> LossOf:
    """verl's loss of a critic."""

    def loss_of(weights: Tensor, micro_batch: Any) -> Tensor:
        values = (micro_batch["features"] @ weights)[..., 0]
        loss: Tensor = value_loss(config, {"values": flat(values, micro_batch)}, micro_batch)[0]
        return loss

    return loss_of


def flat(table: Tensor, micro_batch: Any) -> Tensor:
    """[total tokens]: one place before the token it is about, as a model gives it, without padding."""
    lengths = micro_batch["attention_mask"].sum(dim=1) - PROMPT_LENGTH
    rows = []
    for row, length in zip(table, lengths.tolist(), strict=True):
        rows += [table.new_zeros(PROMPT_LENGTH - 1), row[:length], table.new_zeros(1)]
    return torch.cat(rows)
