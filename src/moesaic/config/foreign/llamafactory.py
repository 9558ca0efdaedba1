"""LLaMA-Factory's training files, of the first generation (``model_name_or_path``) and of v1 (``model``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from moesaic.config.foreign.rules import computed, needless, never, one_of, only, same
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Tool, Value

ADAPTERS = "adapters are not trained here, only whole models"
OTHER_OPTIMIZER = "the optimizer is AdamW"
IMAGES = "only text is trained on"
GENERATION = "nothing is generated while training"
FREEZE = "name the modules that aren't trained in frozen_modules"
BOARDS = ("tensorboard", "wandb")

# What a dataset's info may say and is read here. Not ``weight``: v1's multiplies a set's size, ours is a share.
KNOWN_INFO = ("file_name", "dataset_dir", "hf_hub_url", "converter", "formatting", "split", "streaming")
FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


def _datasets(target: str, value: Any, theirs: Theirs) -> Outcome:
    """Names of ``dataset_info.json``, or v1's file of datasets; what can't be looked up keeps its name."""
    if value is None:
        return Needless("unset")
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    try:
        found = [_look_up(str(name), theirs) for name in names]
    except (OSError, ValueError) as error:
        return NoEquivalent(f"{error}; set {target} by hand")
    sections = [section for known in found if known for section in known]
    if not all(found):
        missing = ", ".join(name for name, known in zip(names, found, strict=True) if not known)
        return NoEquivalent(f"{missing}: no dataset_info.json or file that says where it lies; set {target} by hand")
    lost = sorted({key for section in sections for key in section.pop("lost")})
    if lost:
        return NoEquivalent(f"the dataset info sets {', '.join(lost)}, which has no equivalent; set {target} by hand")
    return Value({target: sections[0] if len(sections) == 1 else sections}, "files as the dataset info names them")


def _look_up(name: str, theirs: Theirs) -> list[dict[str, Any]]:
    """The sections of one name; none where it isn't known."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):  # v1: a file of datasets
        if not path.is_file():
            return []
        return [_section(info, path.parent.parent, theirs) for info in _read_infos(path).values()]
    if path.suffix or "/" in name:  # a file, or a name of the Hub
        return [{"path": name, "lost": []}]
    folder = Path(str(theirs.get("dataset_dir", "data")))
    info_file = folder / "dataset_info.json"
    infos = _read_infos(info_file) if info_file.is_file() else {}
    return [_section(infos[name], folder, theirs)] if name in infos else []


def _read_infos(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Names of datasets and what is said of each.

    Raises:
        ValueError: the file says something else.
    """
    text = path.read_text(encoding="utf-8")
    try:
        infos = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(infos, dict) or not infos or not all(isinstance(info, dict) for info in infos.values()):
        raise ValueError(f"{path}: must map names of datasets to their fields")
    return infos


def _section(info: Mapping[str, Any], folder: Path, theirs: Theirs) -> dict[str, Any]:
    file_name = info.get("file_name")
    section: dict[str, Any] = {"path": str(folder / file_name) if file_name else info.get("hf_hub_url", "")}
    kind = info.get("converter", info.get("formatting"))
    if kind in FORMATS:
        section["format"] = FORMATS[kind]
    section |= {ours: info[ours] for ours in ("split", "streaming") if ours in info}
    known = {*KNOWN_INFO, *({"ms_hub_url"} if "hf_hub_url" in info else ())}  # the same set on a mirror
    if theirs.get("stage") == "pt" and info.get("columns") == {"prompt": "text"}:
        section["format"] = "text"
        known.add("columns")
    return section | {"lost": [key for key, value in info.items() if key not in known and value is not None]}


def _train_datasets(value: Any, theirs: Theirs) -> Outcome:
    outcome = _datasets("train_dataset", value, theirs)
    if not isinstance(outcome, Value) or not theirs.get("streaming"):
        return outcome
    sections = outcome.fields["train_dataset"]
    extra = {"streaming": True, "buffer_size": theirs.get("buffer_size", 16384)}
    sections = [one | extra for one in (sections if isinstance(sections, list) else [sections])]
    return Value({"train_dataset": sections[0] if len(sections) == 1 else sections}, outcome.note)


def _accumulation(value: Any, theirs: Theirs) -> Outcome:
    """Micro-batches per step: known here as the sequences of a step over all ranks."""
    if value == 1:
        return Needless("a step of one micro-batch per rank is the default")
    if theirs.world_size is None:
        return NoEquivalent("global_batch_size counts all ranks: say how many with --world N")
    micro = theirs.get("per_device_train_batch_size", 8)
    return Value(
        {"global_batch_size": int(micro) * int(value) * theirs.world_size}, "micro-batch * accumulation * ranks"
    )


def _packing(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Value({"packing": False})
    if theirs.get("neat_packing"):
        return Value({"packing": True}, "without attention between samples, as neat_packing")
    return NoEquivalent("packed samples never attend to each other here; neat_packing: true is packing: true")


def _epochs(value: Any, _: Theirs) -> Outcome:
    if value is None or int(value) == value:
        return Needless("unset") if value is None else Value({"num_train_epochs": int(value)})
    return NoEquivalent("whole epochs only; set max_steps instead")


def _bf16(value: Any, theirs: Theirs) -> Outcome:
    if not value and theirs.get("pure_bf16"):
        return Needless("pure_bf16 says it")
    return Value({"bf16": bool(value)})


def _pure_bf16(value: Any, _: Theirs) -> Outcome:
    return Value({"bf16": True, "master_dtype": "bf16"}) if value else Needless("as here")


def _deepspeed(value: Any, _: Theirs) -> Outcome:
    if value is None:
        return Needless("unset")
    fields = {"dist_config.name": "fsdp2"} | ({"offload": True} if "offload" in str(value) else {})
    return Value(fields, "no DeepSpeed: FSDP2 shards parameters, gradients and optimizer, as ZeRO-3")


def _config_file(value: Any, _: Theirs) -> Outcome:
    return Value({"offload": True}, "as its name says") if "offload" in str(value) else Needless("DeepSpeed's")


def _finetuning_type(value: Any, _: Theirs) -> Outcome:
    if value in ("full", None):
        return Needless("as here")
    return NoEquivalent(FREEZE if value == "freeze" else ADAPTERS)


def _min_lr_rate(value: Any, theirs: Theirs) -> Outcome:
    if theirs.get("lr_scheduler_type") != "cosine_with_min_lr":
        return NoEquivalent("counts for cosine_with_min_lr only")
    return Value({"lr_scheduler_config.min_lr_ratio": float(value)})


def _batching(value: Any, theirs: Theirs) -> Outcome:
    """Theirs with a set number of samples a step, end to end, is ours by tokens; with a set number of tokens, ours
    with packed rows."""
    if value in (None, "normal"):
        return Value({"packing": False})
    if value == "dynamic_padding_free":
        return Value({"packing": True}, "a micro-batch is micro_batch_size rows of cutoff_len tokens, filled")
    if value != "padding_free":
        return NoEquivalent("padded to a number of tokens: packing: true fills rows, micro_batch_tokens pads nothing")
    micro_batch_size = int(theirs.get("micro_batch_size", 1))
    fields = {"micro_batch_tokens": micro_batch_size * int(theirs.get("cutoff_len", 2048))}
    if theirs.get("global_batch_size") is None:
        ranks = None if theirs.world_size is None else theirs.world_size // int(theirs.get("cp_size", 1))
        dp_size = theirs.get("dp_size", ranks)
        if dp_size is None:
            return NoEquivalent("how many samples a step has depends on the ranks: say how many with --world N")
        fields["global_batch_size"] = micro_batch_size * int(dp_size)
    return Value(fields, "micro_batch_size * cutoff_len: as many samples a step, spread by their tokens")


def _micro_batch_size(value: Any, theirs: Theirs) -> Outcome:
    if value is None or theirs.get("batching_strategy") == "padding_free":
        return Needless("unset" if value is None else "part of micro_batch_tokens")
    return Value({"micro_batch_size": value})


def _v1_kernels(value: Any, _: Theirs) -> Outcome:
    names = {True: "auto", "true": "auto", False: None, "false": None, None: None}
    value = names.get(value, value)
    return Needless("unset") if value is None else Value({"kernel_config.include_kernels": value})


def _boards(value: Any, _: Theirs) -> Outcome:
    if value is None:
        return Needless("unset")
    names = [value] if isinstance(value, str) else list(value)
    lost = sorted(set(names) - {"none", "all", *BOARDS})
    if lost:
        return NoEquivalent(f"{', '.join(lost)}: metrics.jsonl, TensorBoard and wandb are written")
    if "all" in names:
        return Needless("TensorBoard, as here; name wandb to have it")
    return Value({"report_to": [name for name in BOARDS if name in names]})


ATTENTIONS = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}


def _attention(value: Any, _: Theirs) -> Outcome:
    name = ATTENTIONS.get(value, value)
    return Needless("transformers' choice, as here") if name is None else Value({"attn_implementation": name})


BOTH: Mapping[str, Rule] = {
    "output_dir": same("output_dir"),
    "learning_rate": same("learning_rate", float),
    "num_train_epochs": computed(_epochs, "num_train_epochs"),
    "max_steps": computed(
        lambda value, _: Needless("unset") if value is None or value < 1 else Value({"max_steps": value}), "max_steps"
    ),
    "max_grad_norm": same("max_grad_norm", float),
    "cutoff_len": same("cutoff_len"),
    "bf16": computed(_bf16, "bf16"),
    "seed": same("seed"),
    "full_determinism": same("full_determinism"),
    "logging_steps": same("logging_steps"),
    "eval_steps": same("eval_steps"),
    "report_to": computed(_boards, "report_to"),
    "save_steps": same("save_steps"),
    "save_total_limit": same("save_total_limit"),
    "resume_from_checkpoint": same("resume_from_checkpoint"),
    "flash_attn": computed(_attention, "attn_implementation"),
    "eval_dataset": computed(lambda value, theirs: _datasets("eval_dataset", value, theirs), "eval_dataset"),
    "trust_remote_code": only(False, reason="models are transformers' own; code from a repository is never run"),
    "template": needless("the tokenizer's own chat template is used: compare it with the one named"),
    "pref_*": needless("preference training's"),
    "simpo_gamma": needless("preference training's"),
    "dpo_label_smoothing": needless("preference training's"),
    "ld_alpha": needless("preference training's"),
    "max_new_tokens": needless(GENERATION),
}

V0: Mapping[str, Rule] = {
    "model_name_or_path": same("model", note="a local folder: download it first"),
    "stage": one_of("stage", {"sft": "sft", "pt": "pt", "dpo": "dpo", "rm": "rm"}, "trained for sft and pt only"),
    "do_train": only(True, reason="moesaic trains, and evaluates only while training"),
    "finetuning_type": computed(_finetuning_type),
    "dataset": computed(_train_datasets, "train_dataset"),
    "dataset_dir": needless("part of the datasets' paths"),
    "streaming": computed(lambda value, _: Needless("part of train_dataset" if value else "as here")),
    "buffer_size": needless("part of train_dataset"),
    "train_on_prompt": only(False, reason="only the assistant's tokens are trained; stage: pt trains all"),
    "mask_history": only(False, reason="every assistant turn is trained"),
    "mix_strategy": only("concat", reason="set weight in each section of train_dataset"),
    "interleave_probs": only(reason="set weight in each section of train_dataset"),
    "packing": computed(_packing, "packing"),
    "neat_packing": computed(lambda value, _: Value({"packing": True}) if value else Needless("as here"), "packing"),
    "max_samples": only(reason="all samples are read: cut the file"),
    "val_size": only(0, 0.0, reason="held-out samples are a file of their own: eval_dataset"),
    "tool_format": only(reason="tool calls are not trained on"),
    "overwrite_cache": needless("nothing is cached"),
    "preprocessing_*": needless("data is read by the ranks themselves"),
    "tokenized_path": only(reason="nothing is cached"),
    "dataloader_num_workers": needless("data is read by the ranks themselves"),
    "dataloader_pin_memory": needless("data is read by the ranks themselves"),
    "ignore_pad_token_for_loss": only(True, reason="padding never has a loss"),
    "eval_on_each_dataset": needless("each held-out set has its own loss"),
    "per_device_train_batch_size": same("micro_batch_size"),
    "per_device_eval_batch_size": needless("held-out samples are read in micro_batch_size"),
    "gradient_accumulation_steps": computed(_accumulation, "global_batch_size"),
    "lr_scheduler_type": one_of(
        "lr_scheduler_config.name",
        {name: name for name in ("constant", "linear", "cosine")}
        | {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
        "constant, linear or cosine",
    ),
    "lr_scheduler_kwargs": only({}, reason="only min_lr_ratio, by hand"),
    "lr_scheduler_kwargs.min_lr_rate": computed(_min_lr_rate, "lr_scheduler_config.min_lr_ratio"),
    "warmup_ratio": same("lr_scheduler_config.warmup_ratio", lambda value: float(value) or None),
    "warmup_steps": same("lr_scheduler_config.warmup_steps"),
    "weight_decay": same("optim_config.weight_decay", float),
    "adam_epsilon": same("optim_config.eps", float),
    "optim": one_of(
        "optim_config.name",
        {name: "adamw" for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf")},
        OTHER_OPTIMIZER,
    ),
    "adam_beta1": computed(lambda value, t: _betas(value, t.get("adam_beta2", 0.999)), "optim_config.betas"),
    "adam_beta2": computed(lambda value, t: _betas(t.get("adam_beta1", 0.9), value), "optim_config.betas"),
    "fp16": only(False, reason="bf16 or fp32"),
    "pure_bf16": computed(_pure_bf16, "bf16", "master_dtype"),
    "disable_gradient_checkpointing": same("activation_checkpointing", lambda value: not value),
    "gradient_checkpointing": same("activation_checkpointing"),
    "use_reentrant_gc": needless("checkpointing is never reentrant here"),
    "eval_strategy": computed(
        lambda value, _: (
            NoEquivalent("held-out losses come every eval_steps") if value == "epoch" else Needless("as here")
        )
    ),
    "load_best_model_at_end": same("load_best_model_at_end"),
    "save_strategy": only("steps", reason="checkpoints come every save_steps, and after the last step"),
    "save_only_model": only(False, reason="checkpoints can always be resumed from"),
    "ddp_timeout": same("dist_timeout"),
    "deepspeed": computed(_deepspeed, "dist_config.name", "offload"),
    "fsdp": computed(_deepspeed, "dist_config.name", "offload"),
    "run_name": needless("a run goes by its output_dir"),
    "plot_loss": needless("curves are in TensorBoard"),
    "overwrite_output_dir": only(False, reason="a folder with a run in it is never overwritten"),
    "enable_liger_kernel": only(False, reason="other kernels: kernel_config"),
    "use_v1_kernels": only(False, reason="other kernels: kernel_config"),
    "use_unsloth*": only(False, reason="other kernels: kernel_config"),
    "moe_aux_loss_coef": same("router_config.aux_loss_coef", float),
    "rope_scaling": only(reason="set it in the model's config.json"),
    "resize_vocab": only(False, reason="the model's vocabulary stays"),
    "add_tokens": only(reason="the model's vocabulary stays"),
    "add_special_tokens": only(reason="the model's vocabulary stays"),
    "upcast_*": only(False, reason="one computing type: bf16 or fp32"),
    "neftune_noise_alpha": only(reason="no noise on embeddings"),
    "use_dft_loss": only(False, reason="cross-entropy"),
    "quantization_*": only(reason="whole weights are trained"),
    "fp8*": only(False, "auto", reason="bf16 or fp32"),
    "train_from_scratch": only(False, reason="training begins with the model's weights"),
    "disable_shuffling": only(False, reason="samples are always shuffled"),
    "early_stopping_steps": only(reason="a run ends after max_steps or its epochs"),
    "compute_accuracy": only(False, reason="the held-out loss is measured"),
    "predict_with_generate": only(False, reason=GENERATION),
    "include_num_input_tokens_seen": needless("tokens are always counted"),
    "include_tokens_per_second": needless("tokens are always counted"),
    "use_fast_tokenizer": needless("always, where there is one"),
    "low_cpu_mem_usage": needless("weights are read slice by slice"),
    "cache_dir": needless("nothing is downloaded"),
    "adapter_name_or_path": only(reason=ADAPTERS),
    "lora_*": needless("counts for finetuning_type: lora only"),
    "use_rslora": needless("counts for finetuning_type: lora only"),
    "use_dora": needless("counts for finetuning_type: lora only"),
    "freeze_trainable_*": needless("counts for finetuning_type: freeze only"),
    "freeze_vision_tower": needless(IMAGES),
    "freeze_multi_modal_projector": needless(IMAGES),
    "freeze_language_model": only(False, reason=FREEZE),
    "image_*": needless(IMAGES),
    "video_*": needless(IMAGES),
    "media_dir": only(reason=IMAGES),
    "use_galore": only(False, reason=OTHER_OPTIMIZER),
    "use_apollo": only(False, reason=OTHER_OPTIMIZER),
    "use_badam": only(False, reason=OTHER_OPTIMIZER),
    "use_adam_mini": only(False, reason=OTHER_OPTIMIZER),
    "use_muon": only(False, reason=OTHER_OPTIMIZER),
    "use_swanlab": only(False, reason="metrics.jsonl and TensorBoard files are written"),
    "ray_*": needless("ranks are started by moesaic or torchrun"),
}

V1: Mapping[str, Rule] = {
    "model": same("model", note="a local folder: download it first"),
    "model_class": only("llm", reason="causal language models only"),
    "train_dataset": computed(_train_datasets, "train_dataset"),
    "micro_batch_size": computed(_micro_batch_size, "micro_batch_size"),
    "global_batch_size": same("global_batch_size"),
    "batching_strategy": computed(_batching, "packing", "micro_batch_tokens", "global_batch_size"),
    "batching_workers": needless("data is read by the ranks themselves"),
    "enable_activation_checkpointing": same("activation_checkpointing"),
    "dp_size": same("dp_size"),
    "cp_size": same("cp_size"),
    "cp_mode": same("cp_mode"),
    "mp_replicate_size": same("mp_replicate_size"),
    "mp_shard_size": same("mp_shard_size"),
    "dist_timeout": same("dist_timeout"),
    "init_config.name": same("init_config.name"),
    "kernel_config.name": same("kernel_config.name"),
    "kernel_config.include_kernels": computed(_v1_kernels, "kernel_config.include_kernels"),
    "kernel_config.chunk_size": same("kernel_config.chunk_size"),
    "dist_config.name": one_of(
        "dist_config.name", {"fsdp2": "fsdp2", "fsdpturbo": "fsdpturbo", "deepspeed": "fsdp2"}, "fsdp2 or fsdpturbo"
    ),
    "dist_config.ep_size": same("dist_config.ep_size"),
    "dist_config.ep_dispatcher": same("dist_config.ep_dispatcher"),
    "dist_config.hook_modules": same("dist_config.hook_modules"),
    "dist_config.fsdp_implementation": same("dist_config.fsdp_implementation"),
    "dist_config.fsdp_ignored_modules": same("dist_config.fsdp_ignored_modules"),
    "dist_config.ep_modules": needless("the model's family says which modules hold experts"),
    "dist_config.ep_fsdp_modules": needless("the model's family says which modules hold experts"),
    "dist_config.dcp_path": only(reason="weights are read from safetensors"),
    "dist_config.config_file": computed(_config_file, "offload"),
    "dist_config.reshard_after_forward": same("reshard_after_forward"),
    "dist_config.offload_params": same("offload"),
    "dist_config.mixed_precision": one_of("bf16", {"bf16": True, "fp32": False}, "bf16 or fp32"),
    "optim_config.name": one_of("optim_config.name", {"adamw": "adamw"}, OTHER_OPTIMIZER),
    "optim_config.betas": same("optim_config.betas"),
    "optim_config.eps": same("optim_config.eps", float),
    "optim_config.weight_decay": same("optim_config.weight_decay", float),
    "optim_config.lr": needless("learning_rate says it"),
    "lr_scheduler_config.name": one_of(
        "lr_scheduler_config.name",
        {name: name for name in ("constant", "linear", "cosine")},
        "constant, linear or cosine",
    ),
    "lr_scheduler_config.warmup_steps": same("lr_scheduler_config.warmup_steps"),
    "lr_scheduler_config.warmup_ratio": same("lr_scheduler_config.warmup_ratio", float),
    "lr_scheduler_config.min_lr_ratio": same("lr_scheduler_config.min_lr_ratio", float),
    "save_epochs": only(reason="checkpoints come every save_steps"),
    "save_ckpt_as_hf": only(False, reason="the last model is exported; `moesaic export` does it for a checkpoint"),
    "peft_config": only(reason=ADAPTERS),
    "peft_config.*": never(ADAPTERS),
    "quant_config": only(reason="whole weights are trained"),
    "quant_config.*": never("whole weights are trained"),
    "sample_backend": needless(GENERATION),
    "sample_*": needless(GENERATION),
}


def _betas(beta1: Any, beta2: Any) -> Outcome:
    return Value({"optim_config.betas": [float(beta1), float(beta2)]})


def choose(values: Mapping[str, Any]) -> Tool:
    """The generation of a file: v1 names its model ``model``."""
    return LLAMAFACTORY_V1 if "model" in values else LLAMAFACTORY


LLAMAFACTORY = Tool(
    name="LLaMA-Factory",
    rules=MappingProxyType({**V0, **BOTH}),
    defaults=MappingProxyType(
        {
            "finetuning_type": "lora",
            "per_device_train_batch_size": 8,
            "learning_rate": 5e-5,
            "lr_scheduler_type": "linear",
            "bf16": False,
            "disable_gradient_checkpointing": False,
            "logging_steps": 500,
            "save_steps": 500,
        }
    ),
)

LLAMAFACTORY_V1 = Tool(
    name="LLaMA-Factory v1",
    rules=MappingProxyType({**V1, **BOTH}),
    defaults=MappingProxyType({"enable_activation_checkpointing": True}),
)
