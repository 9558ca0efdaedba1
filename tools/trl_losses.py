"""TRL's own loss, ``GRPOTrainer._compute_loss``, of log-probabilities that are given, not computed by a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from tools.vectors import Case, Draw
from tools.verl_formulas import grad_of
from tools.verl_inputs import SEED, Step

MAX_COMPLETION_LENGTH = 16
PLAIN: dict[str, Any] = {
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "entropy_coef": 0.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}
# Every other loss of TRL's has no counterpart here: luspo, vespo.
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "dapo/delta": {"loss_type": "dapo", "delta": 1.3},
    "dapo/kl": {"loss_type": "dapo", "beta": 0.05},
    "grpo/kl": {"loss_type": "grpo", "beta": 0.05},
    "dapo/entropy": {"loss_type": "dapo", "entropy_coef": 0.01},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "sapo/temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    "sequence": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.05,
        "epsilon_high": 0.08,
    },
}
KL_TIMES_RATIO = {"loss_type": "dapo", "beta": 0.05, "use_bias_correction_kl": True}


def loss_cases(step: Step) -> Iterator[Case]:
    """Each loss of two micro-batches of four rows, summed, and its gradient by the log-probabilities."""
    entropies = Draw(SEED + 6).numbers(*step.mask.shape, low=0, high=2)
    inputs = {
        "logprobs": step.logprobs,
        "old_logprobs": step.old_logprobs,
        "ref_logprobs": step.ref_logprobs,
        "advantages": step.sequence_advantages[:, 0].contiguous(),
        "mask": step.mask,
        "entropies": entropies,
    }
    for name, settings in {**LOSSES, "dapo/kl-times-ratio": KL_TIMES_RATIO}.items():
        options = {**PLAIN, "use_bias_correction_kl": False, "num_micro_batches": 2, **settings}
        if options["loss_type"] == "bnpo" or options["entropy_coef"]:
            # TRL takes means over a micro-batch's tokens there: those of the update if there is only one.
            options["num_micro_batches"] = 1
        logprobs = inputs["logprobs"].clone().requires_grad_()
        loss = compute_loss(options, {**inputs, "logprobs": logprobs})
        yield Case(
            kind="policy_loss",
            name=name,
            options={**options, "max_completion_length": MAX_COMPLETION_LENGTH},
            inputs=inputs,
            outputs={"loss": loss.detach(), "grad": grad_of(loss, logprobs)},
        )


def compute_loss(options: dict[str, Any], inputs: dict[str, Tensor]) -> Tensor:
    """The sum over micro-batches, as gradients are accumulated."""
    num_micro_batches = options["num_micro_batches"]
    size = len(inputs["mask"]) // num_micro_batches
    total = torch.zeros(())
    for start in range(0, len(inputs["mask"]), size):
        rows = {name: table[start : start + size] for name, table in inputs.items()}
        given = (rows["logprobs"], rows["entropies"], None)
        args = SimpleNamespace(steps_per_generation=num_micro_batches, **options)
        trainer = SimpleNamespace(
            args=args,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
            current_gradient_accumulation_steps=num_micro_batches,
            max_completion_length=MAX_COMPLETION_LENGTH,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            use_adaptive_entropy=False,
            _entropy_bonus_enabled=options["entropy_coef"] != 0,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, given=given, **__: given,
            **{
                name: options[name]
                for name in (
                    "loss_type",
                    "importance_sampling_level",
                    "epsilon_low",
                    "epsilon_high",
                    "beta",
                    "entropy_coef",
                )
            },
        )
        trainer.accelerator.sync_gradients = False
        batch = {
            "prompt_ids": torch.ones(size, 1, dtype=torch.long),
            "prompt_mask": torch.ones(size, 1, dtype=torch.long),
            "completion_ids": torch.ones_like(rows["mask"]),
            "completion_mask": rows["mask"],
            "advantages": rows["advantages"],
            "old_per_token_logps": rows["old_logprobs"],
            "ref_per_token_logps": rows["ref_logprobs"],
            "num_items_in_batch": inputs["mask"].sum(),
        }
        total = total + GRPOTrainer._compute_loss(trainer, None, batch)
    return total


def overlong_cases() -> Iterator[Case]:
    """The soft punishment of overlong completions."""
    lengths = torch.tensor([1, 8, 11, 12, 13, 14, 15, 16, 17])
    punish = get_soft_overlong_punishment(max_completion_len=16, soft_punish_cache=4)
    yield Case(
        kind="overlong",
        name="soft",
        options={"max_completion_len": 16, "soft_punish_cache": 4},
        inputs={"lengths": lengths},
        outputs={"penalties": torch.tensor(punish([[1] * length for length in lengths.tolist()]))},
    )
