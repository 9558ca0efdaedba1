"""The recipe: every field a run can be told, its type, its default, whose name it is, and what it means. Torch-free.

This file is the only place where fields are declared: ``docs/recipe.md``, the error messages and the check for
misspelt keys are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moesaic.config.rl_sections import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    KlConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
)
from moesaic.config.section import FSDPTURBO, HF, LF, OURS, VERL, Section, about, as_tuple


class DatasetConfig(Section):
    """Where samples come from. A plain string stands for ``{path: <string>}``."""

    path: Annotated[
        str, about(OURS, "A .jsonl, .json, .parquet or .txt file, a folder, or a name for the `datasets` library.")
    ]
    format: Annotated[
        Literal[
            "auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text", "prompt", "verl", "reasoning_gym"
        ],
        about(
            OURS,
            "How a sample is written; `auto`: told by the columns. `text` is for `stage: pt`, and only it; for `stage: "
            "rl`, and only it: `prompt` (a column `prompt`, others go to the reward), `verl` (its parquet files), "
            "`reasoning_gym` (`path` is a task's name).",
        ),
    ] = "auto"
    split: Annotated[str, about(OURS, "Split of a folder or a named dataset; a single file has none.")] = "train"
    size: Annotated[int | None, about(OURS, "`reasoning_gym`: rows to make.", ge=1)] = None
    options: Annotated[
        dict[str, Any], about(OURS, "`reasoning_gym`: the task's own parameters, `seed` among them.")
    ] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str) else data


class TrainDatasetConfig(DatasetConfig):
    """Samples to train on: with a share in the mixture where there are several, and perhaps read as they are needed."""

    weight: Annotated[
        float | None,
        about(OURS, "Share of the samples, relative to other datasets'. For all or for none: then all as is.", gt=0),
    ] = None
    streaming: Annotated[
        bool, about(OURS, "Read and tokenize while training, in bounded memory; needs `max_steps`.")
    ] = False
    buffer_size: Annotated[
        int, about(OURS, "Under `streaming`: rows that are shuffled together and held in memory.", ge=1)
    ] = 10_000


class InitConfig(Section):
    """How the model comes into being."""

    name: Annotated[
        Literal["init_on_meta"], about(LF, "Built without memory, then each rank reads only its own slices.")
    ] = "init_on_meta"


class KernelConfig(Section):
    """Implementations of operators, chosen before sharding and independent of ``dist_config``."""

    name: Annotated[
        str,
        about(
            LF,
            "Comma-separated: `auto` (what fits the device), `flash-linear-attention` (only if listed; on a device "
            "where it can't run, the reference runs and the log says so).",
        ),
    ] = "auto"
    include_kernels: Annotated[
        str | None,
        about(
            LF,
            "Comma-separated operators to take from `name`: `chunk_gated_delta_rule`, "
            "`fused_recurrent_gated_delta_rule`; the model must have them, and others get the reference. Unset or "
            "`auto`: all that the model has.",
        ),
    ] = None
    chunk_size: Annotated[
        Literal[16, 32, 64],
        about(FSDPTURBO, "Tokens per chunk of the gated delta rule; changes rounding, speed and memory only."),
    ] = 64

    @property
    def names(self) -> tuple[str, ...]:
        """``name`` at its commas."""
        return split_names(self.name)

    @property
    def kernels(self) -> tuple[str, ...]:
        """``include_kernels`` at its commas; empty means all."""
        return tuple(kernel for kernel in split_names(self.include_kernels or "") if kernel != "auto")


class OptimConfig(Section):
    """The optimizer; its learning rate is the recipe's ``learning_rate``."""

    name: Annotated[
        Literal["adamw", "muon"],
        about(LF, "`adamw`: `torch.optim.AdamW`. `muon` is known, and refused: it can't take stacked experts."),
    ] = "adamw"
    implementation: Annotated[
        Literal["fused", "foreach"],
        about(OURS, "`fused`: one kernel, no temporaries. `foreach`: where a device has no fused one."),
    ] = "fused"
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        about(OURS, "Decay of the running means of the gradient and of its square.", strict=False),
    ] = (0.9, 0.999)
    eps: Annotated[float, about(OURS, "Added to the root of the running mean square.", gt=0)] = 1e-8
    weight_decay: Annotated[float, about(OURS, "Decoupled weight decay.", ge=0)] = 0.0


class DumpConfig(Section):
    """Tensors to write down, so that two runs can be compared with ``moesaic diff``."""

    steps: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        about(OURS, "Optimizer steps, from 1, whose tensors are written.", strict=False),
    ]
    params: Annotated[
        tuple[str, ...],
        about(OURS, "Globs of parameter names; `*` stands for any characters, dots too.", strict=False),
    ] = ("*",)
    what: Annotated[
        tuple[Literal["param", "grad"], ...],
        about(
            OURS,
            "`param`: the parameter after the step. `grad`: the step's gradient, summed over ranks, before clipping.",
            strict=False,
        ),
    ] = ("param", "grad")


class LrSchedulerConfig(Section):
    """The learning rate over the optimizer steps: linear warm-up from 0, then ``name``."""

    name: Annotated[
        Literal["constant", "linear", "cosine"], about(LF, "Course after the warm-up, down to `min_lr_ratio`.")
    ] = "constant"
    warmup_steps: Annotated[int, about(OURS, "Optimizer steps of warm-up.", ge=0)] = 0
    warmup_ratio: Annotated[
        float | None, about(OURS, "Warm-up as a share of all steps, instead of `warmup_steps`.", ge=0, lt=1)
    ] = None
    min_lr_ratio: Annotated[float, about(OURS, "Last learning rate over `learning_rate`.", ge=0, lt=1)] = 0.0


class RouterConfig(Section):
    """How routers are trained beside the loss of their tokens. Unset: off."""

    aux_loss_coef: Annotated[
        float | None,
        about(
            OURS,
            "Coefficient of the load-balancing loss, over all tokens of the step. Unset: the model's own "
            "`router_aux_loss_coef` where its `output_router_logits` is true, else off.",
            ge=0,
        ),
    ] = None
    z_loss_coef: Annotated[
        float, about(OURS, "Coefficient of the router z-loss: mean of logsumexp(logits)^2.", ge=0)
    ] = 0.0
    bias_update_rate: Annotated[
        float,
        about(
            OURS,
            "Step by which the correction bias of each expert's score moves against its load, after each optimizer "
            "step. Only for models that have such a bias.",
            ge=0,
        ),
    ] = 0.0


class Fsdp2Config(Section):
    """Path A: FSDP2 alone; experts are sharded like every other parameter."""

    name: Annotated[Literal["fsdp2"], about(LF, "FSDP2 alone, experts sharded like every other parameter.")]


class _ExpertParallelConfig(Section):
    ep_size: Annotated[int, about(FSDPTURBO, "Ranks over which the experts are split.", ge=1)] = 1
    ep_dispatcher: Annotated[
        Literal["eager", "fused", "domino", "mc2", "auto"],
        about(FSDPTURBO, "How tokens reach their experts. Only `eager` works so far."),
    ] = "eager"
    edp_size: Annotated[int | None, about(OURS, "Replicas of the experts. Unset: `mp_replicate_size`.", ge=1)] = None
    fsdp_ignored_modules: Annotated[
        tuple[str, ...],
        about(
            FSDPTURBO,
            "Globs of modules that the outer FSDP2 leaves alone: every rank keeps them whole, and their gradients are "
            "summed over all. Experts are left alone too, but stay sharded; no glob may hold them.",
            strict=False,
        ),
    ] = ()
    fsdp_implementation: Annotated[
        Literal["native", "custom"],
        about(
            FSDPTURBO,
            "`native`: experts are FSDP units of their own. `custom`: one unit a block, in which experts have a mesh "
            "of their own.",
        ),
    ] = "native"


class MoesaicConfig(_ExpertParallelConfig):
    """Path B: experts split over ``ep``, then sharded over ``(edp, efsdp)``; the rest is FSDP2's."""

    name: Annotated[
        Literal["moesaic"], about(OURS, "experts split over ep and sharded over (edp, efsdp), FSDP2 for the rest.")
    ]


class FsdpTurboConfig(_ExpertParallelConfig):
    """Path B under FSDPTurbo's names: the same as ``moesaic``, with parameters stored in bf16 where ``bf16`` is set."""

    name: Annotated[
        Literal["fsdpturbo"], about(FSDPTURBO, "as `moesaic`, with parameters stored in the computing type.")
    ]
    hook_modules: Annotated[
        tuple[str, ...],
        about(
            FSDPTURBO,
            "Globs of modules that hold experts, and whose forward gathers them. Empty: the experts' own modules.",
            strict=False,
        ),
    ] = ()


DistConfig = Fsdp2Config | MoesaicConfig | FsdpTurboConfig


class Recipe(Section):
    """One run. Load it with ``load_recipe``, which also checks it."""

    # model
    model: Annotated[str, about(LF, "Folder of a Hugging Face model: config.json, safetensors, tokenizer.")]
    init_config: Annotated[InitConfig, about(LF, "How the model comes into being.")] = InitConfig()
    attn_implementation: Annotated[
        str | None, about(OURS, "Attention, by transformers' names. Unset: what `from_pretrained` picks.")
    ] = None
    kernel_config: Annotated[KernelConfig, about(LF, "Implementations of operators.")] = KernelConfig()
    # data
    train_dataset: Annotated[
        tuple[TrainDatasetConfig, ...],
        BeforeValidator(as_tuple),
        about(LF, "Samples to train on: a path or a section, or a list of them, which are mixed."),
    ]
    eval_dataset: Annotated[
        tuple[DatasetConfig, ...],
        BeforeValidator(as_tuple),
        about(LF, "Held-out samples, whose loss is logged: a path or a section, or a list of them, each by itself."),
    ] = ()
    cutoff_len: Annotated[int, about(LF, "Most tokens of one sequence.", ge=2)] = 2048
    packing: Annotated[
        bool,
        about(
            OURS,
            "Several samples in one sequence; none attends to another, and positions restart. Not yet for models with "
            "linear attention.",
        ),
    ] = False
    # training
    stage: Annotated[
        Literal["sft", "dpo", "rm", "rl", "pt"],
        about(
            OURS,
            "What to train for. `sft`: conversations; `pt`: plain text, every token of it; `rl`: rewards. Others not "
            "yet.",
        ),
    ] = "sft"
    output_dir: Annotated[str, about(LF, "Folder of the run: resolved recipe, logs, checkpoints.")] = "outputs"
    micro_batch_size: Annotated[int, about(LF, "Sequences in one forward of one data-parallel rank.", ge=1)] = 1
    micro_batch_tokens: Annotated[
        int | None,
        about(
            OURS,
            "Most tokens in one forward of one data-parallel rank, instead of `micro_batch_size` and `packing`: the "
            "`global_batch_size` samples of a step are spread evenly over the ranks and lie end to end, without "
            "padding.",
            ge=1,
        ),
    ] = None
    global_batch_size: Annotated[
        int | None,
        about(
            LF,
            "Sequences in one optimizer step over all ranks. Unset: `micro_batch_size * dp_size`. Under `stage: rl` "
            "prompts of one step, which must be set.",
            ge=1,
        ),
    ] = None
    learning_rate: Annotated[float, about(LF, "Highest learning rate.", ge=0)] = 1e-4
    num_train_epochs: Annotated[int, about(LF, "Passes over the training samples.", ge=1)] = 3
    max_steps: Annotated[
        int | None, about(LF, "Optimizer steps (`rl`: rollouts); where set, `num_train_epochs` doesn't count.", ge=1)
    ] = None
    max_grad_norm: Annotated[
        float | None, about(LF, "Gradients are scaled down to this norm. `null`: never.", gt=0)
    ] = 1.0
    bf16: Annotated[bool, about(LF, "Compute in bfloat16; otherwise in float32.")] = True
    master_dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        about(
            OURS,
            "Type in which parameters are stored and optimized. Unset: `fp32`; under `dist_config.name: "
            "fsdpturbo`, the computing type.",
        ),
    ] = None
    activation_checkpointing: Annotated[
        bool, about(OURS, "Compute each block's activations again in backward; chosen experts are kept.")
    ] = False
    exchanged_tokens: Annotated[
        Literal["keep", "recompute"],
        about(
            OURS,
            "Under `activation_checkpointing`: `keep` what experts were sent and sent back, or send it again in "
            "backward (`recompute`): less memory, 2 exchanges more a layer.",
        ),
    ] = "keep"
    gradient_accumulation: Annotated[
        Literal["sharded", "unsharded"],
        about(
            OURS,
            "Over micro-batches: `sharded` reduces gradients after each; `unsharded` holds them whole and reduces them "
            "once a step.",
        ),
    ] = "sharded"
    optim_config: Annotated[OptimConfig, about(LF, "The optimizer.")] = OptimConfig()
    lr_scheduler_config: Annotated[LrSchedulerConfig, about(LF, "The learning rate over time.")] = LrSchedulerConfig()
    router_config: Annotated[RouterConfig, about(OURS, "Losses and biases that balance the experts.")] = RouterConfig()
    frozen_modules: Annotated[
        tuple[str, ...], about(OURS, "Globs of modules that are not trained, with all in them.", strict=False)
    ] = ()
    seed: Annotated[int, about(LF, "Seed of data order and of every generator.", ge=0)] = 42
    full_determinism: Annotated[
        bool, about(LF, "Only deterministic kernels: two runs of one recipe are equal bit for bit.")
    ] = False
    # logs and checkpoints
    logging_steps: Annotated[int, about(LF, "Optimizer steps between two lines of metrics.", ge=1)] = 1
    eval_steps: Annotated[
        int | None,
        about(
            OURS,
            "Steps between two held-out losses; rl: scores, and before the first step. Unset: no others but the last.",
            ge=1,
        ),
    ] = None
    save_steps: Annotated[
        int | None, about(LF, "Optimizer steps between two checkpoints. Unset: only after the last step.", ge=1)
    ] = None
    save_total_limit: Annotated[
        int | None, about(LF, "Checkpoints kept, the newest; the best one beside them. Unset: all.", ge=1)
    ] = None
    load_best_model_at_end: Annotated[
        bool,
        about(
            HF,
            "Save a checkpoint whenever the held-out loss is the lowest so far, keep it, and export it at the end "
            "instead of the last weights.",
        ),
    ] = False
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...],
        about(HF, "Where curves go beside `metrics.jsonl`. `wandb` needs `moesaic[wandb]`.", strict=False),
    ] = ("tensorboard",)
    dump: Annotated[
        DumpConfig | None, about(OURS, "Parameters and gradients of chosen steps, written to `dumps/` for comparison.")
    ] = None
    resume_from_checkpoint: Annotated[
        str | None, about(LF, "A checkpoint's folder, or `auto`: the newest in `output_dir`, if there is one.")
    ] = None
    # reinforcement learning
    actor: Annotated[RoleConfig, about(VERL, "The model that is trained, where it is laid out in another way.")] = (
        RoleConfig()
    )
    ref: Annotated[RoleConfig, about(VERL, "The model that the actor is held near to, under `kl_config`.")] = (
        RoleConfig()
    )
    critic: Annotated[CriticConfig, about(VERL, "The value model, under `adv_estimator: gae`.")] = CriticConfig()
    teacher: Annotated[RoleConfig, about(VERL, "The model to learn from, under `distillation_config`.")] = RoleConfig()
    rollout: Annotated[RolloutConfig, about(VERL, "What generates.")] = RolloutConfig()
    reward: Annotated[RewardConfig, about(VERL, "What a completion is worth.")] = RewardConfig()
    algorithm: Annotated[AlgorithmConfig, about(VERL, "Advantages, policy loss, updates.")] = AlgorithmConfig()
    kl_config: Annotated[KlConfig, about(VERL, "Holding the actor near the reference.")] = KlConfig()
    correction_config: Annotated[
        CorrectionConfig, about(VERL, "For tokens that the engine and the trainer give different probabilities.")
    ] = CorrectionConfig()
    distillation_config: Annotated[DistillationConfig, about(VERL, "Learning from the teacher.")] = DistillationConfig()
    park_idle_roles: Annotated[
        bool, about(OURS, "What a phase of the step doesn't use leaves the device's memory until it is used again.")
    ] = True
    # topology
    dist_config: Annotated[
        DistConfig,
        Field(discriminator="name"),
        about(LF, "What shards the model: `fsdp2` (path A), `moesaic` or `fsdpturbo` (path B)."),
    ] = Fsdp2Config(name="fsdp2")
    dp_size: Annotated[
        int | None, about(LF, "Ranks along which samples differ. Unset: ranks / (cp_size * tp_size).", ge=1)
    ] = None
    cp_size: Annotated[int, about(LF, "Ranks that share the tokens of a sequence.", ge=1)] = 1
    cp_mode: Annotated[Literal["ulysses"], about(LF, "How a sequence is shared.")] = "ulysses"
    tp_size: Annotated[int, about(OURS, "Ranks that share each dense matrix, and the tokens between them.", ge=1)] = 1
    mp_replicate_size: Annotated[int, about(LF, "Replicas of the dense parameters (HSDP).", ge=1)] = 1
    mp_shard_size: Annotated[
        int | None, about(LF, "Ranks that shard one replica. Unset: dp_size * cp_size / mp_replicate_size.", ge=1)
    ] = None
    dist_timeout: Annotated[int, about(LF, "Seconds until a collective that doesn't end is an error.", ge=1)] = 1800
    reshard_after_forward: Annotated[
        bool, about(LF, "Free gathered parameters after forward and gather them again in backward.")
    ] = True
    offload: Annotated[
        bool, about(OURS, "Keep shards, their gradients and the optimizer's state and step on the host.")
    ] = False

    @property
    def shares_rows(self) -> bool:
        """Whether several samples lie in one row: with ``packing``, and with ``micro_batch_tokens``."""
        return self.packing or self.micro_batch_tokens is not None

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16"]:
        """Type of the forward and backward passes: ``bf16`` where ``bf16`` is set."""
        return "bf16" if self.bf16 else "fp32"

    @property
    def storage_dtype(self) -> Literal["fp32", "bf16"]:
        """Type of parameters and optimizer state: ``master_dtype``, else fp32; FSDPTurbo stores what it computes in."""
        if self.master_dtype is not None:
            return self.master_dtype
        return self.compute_dtype if isinstance(self.dist_config, FsdpTurboConfig) else "fp32"

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are split; 1 on path A, which has no expert axis."""
        return 1 if isinstance(self.dist_config, Fsdp2Config) else self.dist_config.ep_size

    @property
    def edp_size(self) -> int:
        """Replicas of the experts; where unset, as many as of the dense parameters. Path A: the same."""
        if isinstance(self.dist_config, Fsdp2Config) or self.dist_config.edp_size is None:
            return self.mp_replicate_size
        return self.dist_config.edp_size


# Fields for ``stage: rl`` alone.
RL_FIELDS = (
    *("actor", "ref", "critic", "teacher", "rollout", "reward", "algorithm"),
    *("kl_config", "correction_config", "distillation_config", "park_idle_roles"),
)

# Sections that may be a list of such sections.
LISTED_SECTIONS = ("train_dataset", "eval_dataset")

# Sections that may be written as one string, and the field it stands for.
SHORTHAND_SECTIONS: Mapping[str, str] = MappingProxyType({"train_dataset": "path", "eval_dataset": "path"})

DIST_CONFIGS: Mapping[str, type[Section]] = MappingProxyType(
    {"fsdp2": Fsdp2Config, "moesaic": MoesaicConfig, "fsdpturbo": FsdpTurboConfig}
)


def split_names(text: str) -> tuple[str, ...]:
    """Comma-separated names. Example: ``"auto, flash-linear-attention"`` -> ``("auto", "flash-linear-attention")``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
