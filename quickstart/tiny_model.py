"""Qwen3-MoE models of random weights and a tokenizer of single characters, for the tiny reinforcement-learning runs."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.ascii_lowercase + "="
NUM_EXPERTS, TOP_K = 8, 2
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 4, 2
MAX_LENGTH = 64
# hidden size, an expert's intermediate size, layers: 4.7 million parameters each, and none of one shape of the other.
STUDENT_SIZES = (256, 224, 3)
TEACHER_SIZES = (320, 272, 2)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, no chat template, nothing put before a text; 29 tokens."""
    tokens = (PAD, EOS, *CHARACTERS)
    characters = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def save_random_model(folder: Path, sizes: tuple[int, int, int], seed: int) -> int:
    """Write a model of random weights with its tokenizer; return its number of parameters.

    Args:
        sizes: hidden size, an expert's intermediate size, number of layers.
    """
    tokenizer = build_tokenizer()
    hidden_size, expert_size, num_layers = sizes
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=expert_size,
        moe_intermediate_size=expert_size,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(seed)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
