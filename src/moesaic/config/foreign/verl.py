"""verl's composed configurations: the SFT trainer's (with and without ``engine``); ``verl_ppo.py`` has PPO's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moesaic.config.foreign.rules import needless, only, same
from moesaic.config.foreign.table import Rule, Tool
from moesaic.config.foreign.verl_parts import COMMON, engine_rules, micro_batches, model_rules, optim_rules
from moesaic.config.foreign.verl_ppo import PPO

SFT_RULES: Mapping[str, Rule] = {
    "data.micro_batch_size": needless("micro_batch_size_per_gpu says it"),
    **micro_batches("data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu", "data.use_dynamic_bsz"),
    "data.max_length": same("cutoff_len"),
    "data.pad_mode": needless("packing: true leaves padding out"),
    "data.prompt_key": only("prompt", reason="the column is called prompt: rename it"),
    "data.response_key": only("completion", reason="the column is called completion: rename it"),
    "data.prompt_dict_keys": only([], reason="columns hold text, not objects"),
    "data.response_dict_keys": only([], reason="columns hold text, not objects"),
    "data.multiturn.enable": needless("told by the columns"),
    "data.multiturn.messages_key": only("messages", reason="the column is called messages: rename it"),
    "data.multiturn.*": needless("counts for tools and thinking"),
    "data.messages_key": only("messages", reason="the column is called messages: rename it"),
    "data.tools_key": needless("samples with tools are bad samples here, and named"),
    "data.enable_thinking_key": needless("the chat template gets no arguments"),
    "data.chat_template": only(reason="the tokenizer's own chat template is used"),
    "data.ignore_input_ids_mismatch": needless("a conversation is tokenized once, as a whole"),
    "ulysses_sequence_parallel_size": same("cp_size"),
    "use_remove_padding": needless("padding has no loss; packing: true leaves it out"),
    "checkpoint.*": needless("checkpoints hold everything; the last model is exported"),
    **model_rules("model"),
    **engine_rules("model.fsdp_config"),
    **engine_rules("engine"),
    **optim_rules("optim"),
}


def choose(values: Mapping[str, Any]) -> Tool:
    """The trainer of a file: PPO's has an ``actor_rollout_ref``."""
    return PPO if any(name.startswith("actor_rollout_ref.") for name in values) else SFT


SFT = Tool(
    name="verl SFT", rules=MappingProxyType({**COMMON, **SFT_RULES}), defaults=MappingProxyType({"trainer.seed": 1})
)
