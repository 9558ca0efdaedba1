"""What both of verl's trainers have in their configurations: optimizer, engine, model, data, trainer. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.config.foreign.rules import computed, needless, never, one_of, only, same
from moesaic.config.foreign.table import Needless, NoEquivalent, Outcome, Rule, Theirs, Value

RL = "stage: rl"
ADAPTERS = "adapters are not trained here, only whole models"
SAME_STEPS = "how a step is cut into micro-batches; the step's samples and loss are the same"
REMOTE_CODE = "models are transformers' own; code from a repository is never run"
COMPUTES_IN_BF16 = {"bf16": True, "bfloat16": True, "fp32": False, "float32": False}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}


def home(value: Any) -> str:
    """A path with ``~`` filled in."""
    return str(Path(str(value)).expanduser())


def files(target: str) -> Rule:
    """One path or a list of them."""

    def apply(value: Any, _: Theirs) -> Outcome:
        if value is None:
            return Needless("unset")
        paths = [home(path) for path in (value if isinstance(value, list) else [value])]
        return Value({target: paths[0] if len(paths) == 1 else paths})

    return computed(apply, target)


def _ranks(value: Any, theirs: Theirs) -> Outcome:
    ranks = int(value) * int(theirs.get("trainer.nnodes", 1))
    if theirs.world_size not in (None, ranks):
        return NoEquivalent(f"it makes {ranks} ranks, and --world says {theirs.world_size}")
    return Value({"dp_size": ranks // cp_size_of(theirs)}, "nnodes * n_gpus_per_node / ulysses_sequence_parallel_size")


ULYSSES = "ulysses_sequence_parallel_size"
# Sections that may say how many ranks share a sequence of what is trained.
TRAINED = ("", "engine.", "actor_rollout_ref.actor.", "actor_rollout_ref.actor.fsdp_config.")
RESHARD = "reshard_after_forward"


def cp_size_of(theirs: Theirs, sections: Sequence[str] = TRAINED) -> int:
    """Ranks of a sequence, whichever of the ``sections`` says it."""
    sizes = [int(theirs.get(f"{section}{ULYSSES}", 1)) for section in sections]
    return next((size for size in sizes if size != 1), 1)


def micro_batches(rows: str, tokens: str, dynamic: str) -> dict[str, Rule]:
    """A micro-batch has a number of rows, or where the field ``dynamic`` is set at most so many tokens per GPU."""

    def apply_rows(value: Any, theirs: Theirs) -> Outcome:
        if value is None or theirs.get(dynamic):
            return Needless("unset" if value is None else f"{dynamic}: tokens are counted, not rows")
        return Value({"micro_batch_size": value})

    def apply_tokens(value: Any, theirs: Theirs) -> Outcome:
        if value is None or not theirs.get(dynamic):
            return Needless("unset" if value is None else f"counts for {dynamic} only")
        cp_size = cp_size_of(theirs)
        note = "" if cp_size == 1 else "per GPU * ulysses_sequence_parallel_size"
        return Value({"micro_batch_tokens": int(value) * cp_size}, note)

    def apply_dynamic(value: Any, theirs: Theirs) -> Outcome:
        if not value:
            return Needless("as here")
        return Needless(f"{tokens} says it") if theirs.get(tokens) else NoEquivalent(f"{tokens} doesn't say how many")

    return {
        rows: computed(apply_rows, "micro_batch_size"),
        tokens: computed(apply_tokens, "micro_batch_tokens"),
        dynamic: computed(apply_dynamic),
    }


def above_zero(target: str) -> Rule:
    """-1 (and 0) is their way to say unset."""

    def apply(value: Any, _: Theirs) -> Outcome:
        return Needless("unset") if value is None or value <= 0 else Value({target: value})

    return computed(apply, target)


def _shard_size(value: Any, theirs: Theirs) -> Outcome:
    """Fewer than the ranks: each group of so many holds a replica."""
    if value is None or value <= 0:
        return Needless("unset")
    per_node = theirs.get("trainer.n_gpus_per_node")
    ranks = theirs.world_size if per_node is None else int(per_node) * int(theirs.get("trainer.nnodes", 1))
    if ranks is None:
        return NoEquivalent("how many replicas depends on the ranks: say how many with --world N")
    if value >= ranks:
        return Needless("all ranks shard one replica")
    if ranks % value:
        return NoEquivalent(f"{ranks} ranks aren't a multiple of it")
    return Value({"mp_shard_size": value, "mp_replicate_size": ranks // value}, "ranks / fsdp_size replicas")


def _engine_seed(prefix: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        counts = value is not None and theirs.get(f"{prefix}.full_determinism")
        return Value({"seed": int(value)}) if counts else Needless("counts with full_determinism only")

    return computed(apply, "seed")


def _logger(value: Any, _: Theirs) -> Outcome:
    names = [value] if isinstance(value, str) else list(value or [])
    lost = sorted(set(names) - {"console", "tensorboard", "wandb"})
    if lost:
        return NoEquivalent(f"{', '.join(lost)}: console, metrics.jsonl, TensorBoard and wandb are written")
    if value is None:
        return Needless("unset")
    return Value({"report_to": [name for name in ("tensorboard", "wandb") if name in names]})


def _resume(value: Any, theirs: Theirs) -> Outcome:
    if value in ("disable", None):
        return Needless("unset")
    path = theirs.get("trainer.resume_from_path")
    if value == "resume_path" and not path:
        return NoEquivalent("resume_from_path doesn't say where")
    return Value({"resume_from_checkpoint": path if value == "resume_path" else "auto"})


def _offload(value: Any, _: Theirs) -> Outcome:
    return Value({"offload": True}) if value else Needless("as here")


def _reshard(value: Any, _: Theirs) -> Outcome:
    if isinstance(value, bool):
        return Value({"reshard_after_forward": value})
    return NoEquivalent("true or false; sharding over fewer ranks is mp_replicate_size")


def _min_lr(prefix: str) -> Rule:
    """Theirs counts for cosine only; a constant schedule here refuses it."""

    def apply(value: Any, theirs: Theirs) -> Outcome:
        names = (f"{prefix}.{name}" for name in ("warmup_style", "lr_scheduler_type", "lr_scheduler"))
        name = next((theirs.get(name) for name in names if theirs.get(name)), "constant")
        if not value or name != "cosine":
            return Needless("unset, or not a cosine")
        return Value({"lr_scheduler_config.min_lr_ratio": float(value)})

    return computed(apply, "lr_scheduler_config.min_lr_ratio")


def _warmup_ratio(prefix: str) -> Rule:
    def apply(value: Any, theirs: Theirs) -> Outcome:
        if not value or theirs.get(f"{prefix}.lr_warmup_steps", -1) > 0:
            return Needless("unset, or lr_warmup_steps says it")
        return Value({"lr_scheduler_config.warmup_ratio": float(value)})

    return computed(apply, "lr_scheduler_config.warmup_ratio")


def _zero_indexed(prefix: str) -> Callable[[Any, Theirs], Outcome]:
    def apply(_: Any, theirs: Theirs) -> Outcome:
        if theirs.get(f"{prefix}.lr_scheduler_type", "constant") == "cosine":
            return NoEquivalent("the cosine falls between the first step and the one after the last")
        return Needless("counts for cosine only")

    return apply


def _truncation(value: Any, _: Theirs) -> Outcome:
    if value == "error":
        return Needless("samples that are too long are cut at their end and counted, not an error")
    return Needless("as here") if value == "right" else NoEquivalent("samples lose their end, never their beginning")


def optim_rules(prefix: str) -> dict[str, Rule]:
    """The optimizer's section."""
    schedule = one_of("lr_scheduler_config.name", SCHEDULES, "constant, linear or cosine")
    return {
        f"{prefix}.lr": same("learning_rate", float),
        f"{prefix}.betas": same("optim_config.betas"),
        f"{prefix}.weight_decay": same("optim_config.weight_decay", float),
        f"{prefix}.clip_grad": same("max_grad_norm", float),
        f"{prefix}.lr_scheduler": schedule,
        f"{prefix}.lr_scheduler_type": schedule,
        f"{prefix}.warmup_style": schedule,
        f"{prefix}.warmup_steps_ratio": _warmup_ratio(prefix),
        f"{prefix}.lr_warmup_steps_ratio": _warmup_ratio(prefix),
        f"{prefix}.lr_warmup_steps": above_zero("lr_scheduler_config.warmup_steps"),
        f"{prefix}.min_lr_ratio": _min_lr(prefix),
        f"{prefix}.num_cycles": only(0.5, reason="half a cosine"),
        f"{prefix}.total_training_steps": needless("trainer.total_training_steps says it"),
        f"{prefix}.optimizer": only("AdamW", reason="the optimizer is AdamW"),
        f"{prefix}.optimizer_impl": only("torch.optim", reason="the optimizer is AdamW"),
        f"{prefix}.zero_indexed_step": computed(_zero_indexed(prefix)),
        f"{prefix}.override_optimizer_config": only(reason="the optimizer is AdamW"),
    }


def engine_rules(prefix: str) -> dict[str, Rule]:
    """The FSDP engine's section."""
    return {
        f"{prefix}.strategy": one_of("dist_config.name", {"fsdp": "fsdp2", "fsdp2": "fsdp2"}, "FSDP2, or moesaic"),
        f"{prefix}.model_dtype": one_of(
            "master_dtype",
            {"fp32": "fp32", "bf16": "bf16", "float32": "fp32", "bfloat16": "bf16"},
            "parameters are stored in fp32 or bf16",
        ),
        f"{prefix}.dtype": one_of("bf16", COMPUTES_IN_BF16, "bf16 or fp32"),
        f"{prefix}.mixed_precision": only({}, reason="its fields are known, no other form"),
        f"{prefix}.mixed_precision.param_dtype": one_of("bf16", COMPUTES_IN_BF16, "bf16 or fp32"),
        f"{prefix}.mixed_precision.reduce_dtype": only("fp32", "float32", reason="gradients are summed in fp32"),
        f"{prefix}.mixed_precision.buffer_dtype": only("fp32", "float32", reason="buffers keep the model's dtype"),
        f"{prefix}.full_determinism": same("full_determinism"),
        f"{prefix}.seed": _engine_seed(prefix),
        f"{prefix}.fsdp_size": computed(_shard_size, "mp_shard_size", "mp_replicate_size"),
        f"{prefix}.reshard_after_forward": computed(_reshard, "reshard_after_forward"),
        f"{prefix}.param_offload": computed(_offload, "offload"),
        f"{prefix}.optimizer_offload": computed(_offload, "offload"),
        f"{prefix}.offload_policy": computed(_offload, "offload"),
        f"{prefix}.cpu_offload": computed(_offload, "offload"),
        f"{prefix}.offload_params": computed(_offload, "offload"),
        f"{prefix}.ulysses_sequence_parallel_size": same("cp_size"),
        f"{prefix}.wrap_policy.*": needless("each block is a unit"),
        f"{prefix}.forward_prefetch": needless("units are always gathered ahead"),
        f"{prefix}.use_orig_params": needless("FSDP1's"),
        f"{prefix}.use_torch_compile": needless("not compiled: speed only"),
        f"{prefix}.entropy_*": needless("counts for " + RL),
        f"{prefix}.forward_only": only(False, reason="training runs backward"),
    }


def model_rules(prefix: str) -> dict[str, Rule]:
    """The model's section."""
    return {
        f"{prefix}.path": same("model", home),
        f"{prefix}.partial_pretrain": same("model", home),
        f"{prefix}.hf_config_path": only(reason="the model's folder has its config"),
        f"{prefix}.tokenizer_path": only(reason="the model's folder has its tokenizer"),
        f"{prefix}.custom_chat_template": only(reason="the tokenizer's own chat template is used"),
        f"{prefix}.enable_gradient_checkpointing": same("activation_checkpointing"),
        f"{prefix}.enable_activation_offload": only(False, reason="activations stay, or are computed again"),
        f"{prefix}.use_remove_padding": needless("padding has no loss; packing: true leaves it out"),
        f"{prefix}.trust_remote_code": only(False, reason=REMOTE_CODE),
        f"{prefix}.external_lib": only(reason="models are transformers' own"),
        f"{prefix}.override_config": only({}, reason="set it in the model's config.json"),
        f"{prefix}.override_config.*": never("set it in the model's config.json"),
        f"{prefix}.use_shm": needless("weights are read slice by slice"),
        f"{prefix}.lora_rank": only(0, reason=ADAPTERS),
        f"{prefix}.lora_alpha": needless("counts for LoRA only"),
        f"{prefix}.target_modules": needless("counts for LoRA only"),
        f"{prefix}.exclude_modules": needless("counts for LoRA only"),
        f"{prefix}.use_liger": only(False, reason="other kernels: kernel_config"),
        f"{prefix}.use_fused_kernels": only(False, reason="other kernels: kernel_config"),
        f"{prefix}.fused_kernel_options": needless("counts for use_fused_kernels only"),
        f"{prefix}.fused_kernel_options.*": needless("counts for use_fused_kernels only"),
        f"{prefix}.speculator*": only(reason="no speculators are trained"),
        f"{prefix}.lora_adapter_path": only(reason=ADAPTERS),
        f"{prefix}.lora.rank": only(0, reason=ADAPTERS),
        f"{prefix}.lora.*": needless("counts for LoRA only"),
        f"{prefix}.tiled_mlp.enabled": only(False, reason="other kernels: kernel_config"),
        f"{prefix}.tiled_mlp.*": needless("counts for tiled_mlp.enabled only"),
        f"{prefix}.mtp.enable": only(False, reason="no further tokens are predicted"),
        f"{prefix}.mtp.*": needless("counts for mtp.enable only"),
        f"{prefix}.use_fused_loss": only(False, reason="other kernels: kernel_config"),
    }


COMMON: Mapping[str, Rule] = {
    "*_target_": needless("hydra's"),
    "defaults": needless("hydra's: give the composed file"),
    "hydra.*": needless("hydra's"),
    "*profiler*": needless("no profile is taken"),
    "data.train_batch_size": same("global_batch_size"),
    "data.train_files": files("train_dataset"),
    "data.val_files": files("eval_dataset"),
    "data.train_max_samples": only(-1, reason="all samples are read: cut the file"),
    "data.val_max_samples": only(-1, reason="all samples are read: cut the file"),
    "data.truncation": computed(_truncation),
    "data.balance_dp_token": needless("ranks have equally many rows, or under use_dynamic_bsz equal tokens"),
    "data.shuffle": only(True, reason="samples are always shuffled"),
    "data.custom_cls.*": only(reason="formats are those of docs/data.md"),
    "data.tokenizer": only(reason="the model's folder has its tokenizer"),
    "data.trust_remote_code": only(False, reason=REMOTE_CODE),
    "data.use_shm": needless("files are read where they are"),
    "data.dataloader_num_workers": needless("data is read by the ranks themselves"),
    "data.image_key": needless("only text is trained on"),
    "data.video_key": needless("only text is trained on"),
    "data.processor.*": needless("only text is trained on"),
    "data.apply_chat_template_kwargs": only({}, reason="the chat template gets no arguments"),
    "data.apply_chat_template_kwargs.*": never("the chat template gets no arguments"),
    "trainer.default_local_dir": same("output_dir", home),
    "trainer.default_hdfs_dir": only(reason="the run's folder is a local one"),
    "trainer.project_name": needless("a run goes by its output_dir"),
    "trainer.experiment_name": needless("a run goes by its output_dir"),
    "trainer.total_epochs": same("num_train_epochs"),
    "trainer.total_training_steps": above_zero("max_steps"),
    "trainer.logger": computed(_logger, "report_to"),
    "trainer.seed": same("seed"),
    "trainer.save_freq": above_zero("save_steps"),
    "trainer.test_freq": above_zero("eval_steps"),
    "trainer.max_ckpt_to_keep": same("save_total_limit"),
    "trainer.max_actor_ckpt_to_keep": same("save_total_limit"),
    "trainer.max_critic_ckpt_to_keep": needless("counts for " + RL),
    "trainer.resume_mode": computed(_resume, "resume_from_checkpoint"),
    "trainer.resume_from_path": needless("part of resume_mode"),
    "trainer.resume_path": same("resume_from_checkpoint"),
    "trainer.del_local_ckpt_after_load": only(False, reason="checkpoints are kept"),
    "trainer.nnodes": needless("part of dp_size"),
    "trainer.n_gpus_per_node": computed(_ranks, "dp_size"),
    "trainer.device": needless("the device there is"),
    "trainer.profile_interval": needless("no profile is taken"),
    "trainer.balance_batch": needless(SAME_STEPS),
}
