"""TRL's ``GRPOTrainer`` on a tiny Qwen3-MoE, with prompts, completions and rewards that are given: its advantages, its
off-policy corrections, and the weights after a few optimizer steps.

Nothing is drawn while it trains: ``rollout_func`` hands out the completions, one function the rewards, and what would
shuffle a rollout's rows before they are cut into mini-batches doesn't.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tools.vectors import Case, Draw

SEED = 20_272
VOCABULARY = 48
NUM_PROMPTS, NUM_GENERATIONS, NUM_ROLLOUTS = 4, 4, 2
PROMPT_LENGTHS = (3, 5, 2, 4)
MAX_COMPLETION_LENGTH = 8
PAD, END = 0, 1
LEARNING_RATE, EPSILON, LARGEST_NORM = 1e-3, 1e-4, 0.05
# Rewards so large that TRL's 1e-4 beside the deviation is nothing.
REWARD_SCALE = 1000.0
SMALLEST_GAP = 1e-4
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": END,
}
RUNS: dict[str, dict[str, Any]] = {
    # One update per rollout, of two micro-batches.
    "dapo": {
        "loss_type": "dapo",
        "beta": 0.0,
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "num_iterations": 1,
        "max_steps": 2,
        "max_grad_norm": LARGEST_NORM,
    },
    # Two epochs over each rollout, beside a reference.
    "grpo": {
        "loss_type": "grpo",
        "beta": 0.05,
        "scale_rewards": "group",
        "epsilon": 0.02,
        "epsilon_high": 0.02,
        "num_iterations": 2,
        "max_steps": 4,
        "max_grad_norm": 0.0,
    },
}
SCALINGS = ("group", "batch", "none")
CORRECTIONS = {
    "token_truncate": 1.25,
    "token_mask": 1.25,
    "sequence_truncate": 1.25,
    "sequence_mask": 1.25,
}


def rollouts() -> dict[str, Tensor]:
    """Prompts [4, 5] and completions [2, 4, 4, 8], padded to the right, their lengths, and rewards [2, 4, 4]."""
    draw = Draw(SEED)
    shape = (NUM_ROLLOUTS, NUM_PROMPTS, NUM_GENERATIONS)
    lengths = draw.integers(*shape, high=MAX_COMPLETION_LENGTH) + 1
    completions = draw.integers(*shape, MAX_COMPLETION_LENGTH, high=VOCABULARY - 2) + 2
    prompts = draw.integers(NUM_PROMPTS, max(PROMPT_LENGTHS), high=VOCABULARY - 2) + 2
    prompt_lengths = torch.tensor(PROMPT_LENGTHS)
    rewards = draw.choice(*shape, of=(0.0, 0.25, 1.0))
    # One group of each rollout that has nothing to learn from.
    rewards[:, 2] = 1.0
    places = torch.arange(MAX_COMPLETION_LENGTH)
    return {
        "prompts": prompts.masked_fill(torch.arange(max(PROMPT_LENGTHS)) >= prompt_lengths[:, None], PAD),
        "prompt_lengths": prompt_lengths,
        "completions": completions.masked_fill(places >= lengths[..., None], PAD),
        "completion_lengths": lengths,
        "rewards": rewards,
    }


def build_tiny_model() -> Qwen3MoeForCausalLM:
    """Every weight a multiple of 1/1024, the norms' 1: the same on every machine."""
    draw = Draw(SEED + 1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.0 if "norm" in name else 0.5 if "embed" in name or ".gate.weight" in name else 0.25
            parameter.copy_(draw.numbers(*parameter.shape, low=-spread, high=spread))
            if "norm" in name:
                parameter.fill_(1.0)
    return model


def hub_weights(model: Qwen3MoeForCausalLM, folder: Path) -> dict[str, Tensor]:
    """The weights under the names that checkpoints have, experts apart."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def build_words() -> PreTrainedTokenizerFast:
    """Token n is the word "n"."""
    vocabulary = {str(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=str(PAD), eos_token=str(END))


class Script:
    """Plays a rollout's completions and rewards to the trainer, the next rollout at each call."""

    def __init__(self, given: dict[str, Tensor], reward_scale: float) -> None:
        self.given = given
        self.reward_scale = reward_scale
        self.num_calls = 0
        self.logprobs: Tensor | None = None

    def roll_out(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's ``rollout_func``: every prompt is there once for each of its completions."""
        number, self.num_calls = self.num_calls % NUM_ROLLOUTS, self.num_calls + 1
        expected = [str(row) for row in range(NUM_PROMPTS) for _ in range(NUM_GENERATIONS)]
        assert prompts == expected, prompts
        given = self.given
        prompt_ids = [given["prompts"][int(row), : PROMPT_LENGTHS[int(row)]].tolist() for row in prompts]
        lengths = given["completion_lengths"][number].flatten().tolist()
        rows = given["completions"][number].flatten(0, 1)
        completion_ids = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
        logprobs = None
        if self.logprobs is not None:
            logprobs = [row[:length].tolist() for row, length in zip(self.logprobs, lengths, strict=True)]
        self.rewards = (given["rewards"][number] * self.reward_scale).flatten().tolist()
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        """Of the completions that were last handed out."""
        assert len(completions) == len(self.rewards)
        return self.rewards


def build_trainer(folder: Path, script: Script, settings: dict[str, Any]) -> GRPOTrainer:
    """On the CPU, in fp32, with nothing random and one constant learning rate."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        shuffle_dataset=False,
        temperature=1.0,
        router_aux_loss_coef=0.0,
        use_bias_correction_kl=False,
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION_LENGTH,
        per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS // 2,
        gradient_accumulation_steps=2,
        model_init_kwargs=None,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=script.reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(row) for row in range(NUM_PROMPTS)]}),
        processing_class=build_words(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        rollout_func=script.roll_out,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def step_cases() -> Iterator[Case]:
    """The weights before, the advantages of each rollout, and the weights after the last update."""
    given = rollouts()
    with (
        tempfile.TemporaryDirectory() as temporary,
        patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch),
    ):
        folder = Path(temporary) / "first"
        first = hub_weights(build_tiny_model(), folder)
        for name, settings in RUNS.items():
            scale = REWARD_SCALE if settings["scale_rewards"] == "group" else 1.0
            script = Script(given, scale)
            trainer = build_trainer(folder, script, settings)
            smallest = router_gap(trainer.model, given)
            trainer.train()
            assert script.num_calls == NUM_ROLLOUTS
            logs = [line for line in trainer.state.log_history if "grad_norm" in line]
            assert settings["num_iterations"] == 1 or any(line["clip_ratio/region_mean"] > 0 for line in logs), logs
            smallest = min(smallest, router_gap(trainer.model, given))
            assert smallest > SMALLEST_GAP, f"{name}: two experts' scores lie {smallest:.1e} apart"
            last = hub_weights(trainer.model, Path(temporary) / name)
            yield Case(
                kind="steps",
                name=name,
                options={
                    **settings,
                    "reward_scale": scale,
                    "learning_rate": LEARNING_RATE,
                    "adam_epsilon": EPSILON,
                    "model": {**MODEL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
                },
                inputs={**given, **{f"first.{key}": tensor for key, tensor in first.items()}},
                outputs={
                    "grad_norms": torch.tensor([float(line["grad_norm"]) for line in logs]),
                    **{f"last.{key}": tensor for key, tensor in last.items()},
                },
            )


def router_gap(model: Qwen3MoeForCausalLM, given: dict[str, Tensor]) -> float:
    """The smallest distance between the score of the last expert taken and of the next, over all tokens."""
    smallest = float("inf")
    k = MODEL["num_experts_per_tok"]
    for number in range(NUM_ROLLOUTS):
        for row in range(NUM_PROMPTS):
            prompt = given["prompts"][row, : PROMPT_LENGTHS[row]].expand(NUM_GENERATIONS, -1)
            tokens = torch.cat([prompt, given["completions"][number, row]], dim=1)
            with torch.no_grad():
                logits = Qwen3MoeForCausalLM.forward(model, tokens, output_router_logits=True).router_logits
            ends = PROMPT_LENGTHS[row] + given["completion_lengths"][number, row]
            is_real = torch.arange(tokens.shape[1]) < ends[:, None]
            for layer in logits:
                scores = layer.softmax(dim=-1).sort(dim=-1, descending=True).values[is_real.flatten()]
                smallest = min(smallest, float((scores[:, k - 1] - scores[:, k]).min()))
    return smallest


def rollout_cases() -> Iterator[Case]:
    """What TRL makes of a rollout before any loss: advantages, and ratios against the engine's log-probabilities."""
    given = rollouts()
    draw = Draw(SEED + 2)
    num_rows = NUM_PROMPTS * NUM_GENERATIONS
    rows = [{"prompt": str(row)} for row in range(NUM_PROMPTS) for _ in range(NUM_GENERATIONS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "first"
        hub_weights(build_tiny_model(), folder)
        for scaling in SCALINGS:
            script = Script(given, 1.0)
            trainer = build_trainer(folder, script, {**RUNS["dapo"], "scale_rewards": scaling})
            found = trainer._generate_and_score_completions([dict(row) for row in rows])
            yield Case(
                kind="advantages",
                name=scaling,
                options={"scale_rewards": scaling, "epsilon": 1e-4},
                inputs={"rewards": given["rewards"][0].flatten().contiguous()},
                outputs={"advantages": found["advantages"]},
            )
        engine = draw.numbers(num_rows, MAX_COMPLETION_LENGTH, low=-0.5, high=0.5)
        for mode, largest in CORRECTIONS.items():
            script = Script(given, 1.0)
            trainer = build_trainer(folder, script, RUNS["dapo"])
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
            trainer.vllm_importance_sampling_mode = mode
            trainer.vllm_importance_sampling_clip_min = None
            trainer.vllm_importance_sampling_clip_max = largest
            trainer._last_loaded_step = trainer.state.global_step
            # The trainer's own log-probabilities, as the model gives them, are replaced by zeros: what is left of the
            # ratio is the engine's part, the same on every machine.
            zeros = torch.zeros(num_rows, MAX_COMPLETION_LENGTH)
            trainer._get_per_token_logps_and_entropies = lambda *_, zeros=zeros, **__: (zeros, None, None)
            script.logprobs = engine
            found = trainer._generate_and_score_completions([dict(row) for row in rows])
            yield Case(
                kind="correction",
                name=mode,
                options={"mode": mode, "clip_max": largest},
                inputs={
                    "old_logprobs": zeros,
                    "rollout_logprobs": engine,
                    "mask": found["completion_mask"],
                },
                outputs={"weights": found["importance_sampling_ratio"]},
            )
