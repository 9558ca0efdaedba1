"""verl's PPO trainer: what generates, how it is sampled, and its prompts. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.config.foreign.rules import computed, needless, one_of, only, same, when
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Value
from moesaic.config.foreign.verl_parts import home
from moesaic.config.foreign.verl_roles import SPEED

ROLLOUT = "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"


ENGINE_OPTION = "how the engine goes about it; what it draws is the same"
ENGINE_OPTIONS = (
    *("mode", "n_gpus_per_node", "full_determinism", "seed", "gpu_memory_utilization", "enforce_eager"),
    *("cudagraph_capture_sizes", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill"),
    *("enable_prefix_caching", "logprobs_mode", "scheduling_policy", "load_format", "layered_summon"),
    *("disable_log_stats", "multi_stage_wake_up", "router_config_path", "skip_tokenizer_init", "trace.*"),
    *("moe_load_balance_metrics_interval", "prometheus.*", "checkpoint_engine.*", "disaggregation.*"),
    *("agent.num_workers", "agent.custom_async_server.name"),
)


def _prompts(target: str) -> Rule:
    """Their parquet files."""

    def apply(value: Any, _: Theirs) -> Outcome:
        if not value:
            return Needless("unset")
        paths = value if isinstance(value, list) else [value]
        sections = [{"path": home(path), "format": "verl"} for path in paths]
        return Value({target: sections[0] if len(sections) == 1 else sections})

    return computed(apply, target)


def _truncation(value: Any, theirs: Theirs) -> Outcome:
    if value == "error" or theirs.get("data.filter_overlong_prompts"):
        return Needless("prompts that are too long are left out, and counted")
    return NoEquivalent("prompts that are too long are left out, never cut")


def _validates(theirs: Theirs) -> bool:
    """Whether validation draws in another way than one each, greedy."""
    is_greedy = theirs.get(f"{VAL}.do_sample") is False or theirs.get(f"{VAL}.temperature", 0) == 0
    return bool(theirs.get("data.val_files")) and not (is_greedy and theirs.get(f"{VAL}.n", 1) == 1)


def _val_number(value: Any, theirs: Theirs) -> Outcome:
    fields = {"n": int(value), "max_tokens": int(theirs.get("data.max_response_length", 512))}
    return Value({f"rollout.val_sampling.{key}": each for key, each in fields.items()}, "as long as in training")


def _val_temperature(value: Any, theirs: Theirs) -> Outcome:
    is_greedy = theirs.get(f"{VAL}.do_sample") is False
    return Value({"rollout.val_sampling.temperature": 0.0 if is_greedy else float(value)})


def _top_k(target: str) -> Rule:
    return computed(lambda value, _: Value({target: max(0, int(value))}) if value else Needless("unset"), target)


def _length(name: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        return Needless(f"{name} says it") if value == theirs.get(name, 512) else NoEquivalent(f"{name} says otherwise")

    return computed(apply)


def _longest(value: Any, theirs: Theirs) -> Outcome:
    longest = int(theirs.get("data.max_prompt_length", 512)) + int(theirs.get("data.max_response_length", 512))
    if value is None or value >= longest:
        return Needless("max_prompt_length and max_response_length say it")
    return NoEquivalent(f"shorter than max_prompt_length + max_response_length = {longest}: it would cut completions")


DATA_RULES: Mapping[str, Rule] = {
    "data.train_files": _prompts("train_dataset"),
    "data.val_files": _prompts("eval_dataset"),
    "data.max_prompt_length": computed(
        lambda value, _: Value({"stage": "rl", "rollout.max_prompt_length": value}),
        "stage",
        "rollout.max_prompt_length",
    ),
    "data.max_response_length": same("rollout.sampling.max_tokens"),
    "data.prompt_key": only("prompt", reason="the column is called prompt: rename it"),
    "data.reward_fn_key": only("data_source", reason="the column is called data_source: rename it"),
    "data.gen_batch_size": only(reason="a step generates for global_batch_size prompts"),
    "data.val_batch_size": needless(SPEED),
    "data.seed": same("seed"),
    "data.validation_shuffle": needless("the order of validation changes nothing"),
    "data.filter_overlong_prompts": needless("prompts that are too long are left out, and counted"),
    "data.filter_overlong_prompts_workers": needless(SPEED),
    "data.truncation": computed(_truncation),
    "data.tool_config_path": only(reason="tools are a rollout.environment's own affair"),
    "data.function_tool_path": only(reason="tools are a rollout.environment's own affair"),
    "data.return_*": needless("what their batches carry along"),
    "data.audio_key": needless("only text is trained on"),
    "data.image_patch_size": needless("only text is trained on"),
    "data.mm_processor_kwargs": only({}, reason="only text is trained on"),
    "data.interaction_config_path": only(reason="turns are a rollout.environment's own affair"),
}


ROLLOUT_RULES: Mapping[str, Rule] = {
    f"{ROLLOUT}.name": one_of(
        "rollout.engine", {name: name for name in ("hf", "vllm", "sglang")}, "hf, vllm or sglang"
    ),
    f"{ROLLOUT}.n": same("rollout.sampling.n"),
    f"{ROLLOUT}.temperature": same("rollout.sampling.temperature", float),
    f"{ROLLOUT}.top_p": same("rollout.sampling.top_p", float),
    f"{ROLLOUT}.top_k": _top_k("rollout.sampling.top_k"),
    f"{ROLLOUT}.do_sample": only(True, reason="greedy completions explore nothing"),
    f"{ROLLOUT}.tensor_model_parallel_size": same("rollout.tp_size"),
    f"{ROLLOUT}.pipeline_model_parallel_size": same("rollout.pp_size"),
    f"{ROLLOUT}.expert_parallel_size": same("rollout.ep_size"),
    f"{ROLLOUT}.data_parallel_size": needless("as many replicas as the ranks make"),
    f"{ROLLOUT}.free_cache_engine": same("rollout.free_cache_engine"),
    f"{ROLLOUT}.prompt_length": _length("data.max_prompt_length"),
    f"{ROLLOUT}.response_length": _length("data.max_response_length"),
    f"{ROLLOUT}.dtype": only("bfloat16", "auto", reason="the engine computes in what training computes in"),
    f"{ROLLOUT}.ignore_eos": only(False, reason="a completion ends at its end"),
    f"{ROLLOUT}.over_sample_rate": only(0, 0.0, reason="as many completions are drawn as are trained on"),
    f"{ROLLOUT}.quantization*": only(reason="the engine has the trained weights, not quantized"),
    f"{ROLLOUT}.enable_rollout_routing_replay": only(False, reason="not yet"),
    f"{ROLLOUT}.disaggregation.enabled": only(False, reason="prefill and decoding are in one engine"),
    f"{ROLLOUT}.engine_kwargs.*": only({}, reason="options of an engine's own"),
    f"{ROLLOUT}.nnodes": only(0, reason="the engine is on the ranks that train"),
    f"{VAL}.n": when(
        _validates,
        Rule(apply=_val_number, targets=("rollout.val_sampling.n", "rollout.val_sampling.max_tokens")),
        "as here: one each, greedy",
    ),
    f"{VAL}.temperature": when(
        _validates,
        Rule(apply=_val_temperature, targets=("rollout.val_sampling.temperature",)),
        "as here: one each, greedy",
    ),
    f"{VAL}.top_p": when(_validates, same("rollout.val_sampling.top_p", float), "as here: one each, greedy"),
    f"{VAL}.top_k": when(_validates, _top_k("rollout.val_sampling.top_k"), "as here: one each, greedy"),
    f"{VAL}.do_sample": needless("part of val_kwargs.temperature"),
    f"{ROLLOUT}.multi_turn.enable": only(False, reason="several turns: write a rollout.environment"),
    f"{ROLLOUT}.multi_turn.*": needless("counts for multi_turn.enable only"),
    f"{ROLLOUT}.agent.default_agent_loop": only("single_turn_agent", reason="write a rollout.environment"),
    f"{ROLLOUT}.agent.agent_loop_config_path": only(reason="write a rollout.environment"),
    f"{ROLLOUT}.agent.custom_async_server.path": only(reason="engines are those of docs/rollout.md"),
    f"{ROLLOUT}.mtp.enable": only(False, reason="no further tokens are predicted"),
    f"{ROLLOUT}.qat.enable": only(False, reason="training isn't quantized"),
    f"{ROLLOUT}.log_prob_*": needless("old log-probabilities take the actor's micro-batches"),
    f"{ROLLOUT}.max_model_len": computed(_longest),
    f"{ROLLOUT}.calculate_log_probs": needless("they are always taken along, and compared"),
    f"{ROLLOUT}.mtp*": needless("the model's mtp says it"),
    f"{ROLLOUT}.qat*": needless("the actor's qat says it"),
    **{f"{ROLLOUT}.{name}": needless(ENGINE_OPTION) for name in ENGINE_OPTIONS},
}
