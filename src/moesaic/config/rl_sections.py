"""The recipe's sections for ``stage: rl``: roles, rollout, algorithm, reward. Torch-free.

Names are verl's where the meaning is; the description then says so in brackets. What verl nests under
``actor_rollout_ref`` is spread over the sections here; ``verl_names.py`` has verl's full name of each field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moesaic.config.section import OURS, VERL, Section, about, as_tuple

AdvEstimator = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "on_policy_distillation",
]
LossMode = Literal["vanilla", "gspo", "cispo", "gpg", "sapo", "dppo_tv"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
# Estimators whose baseline is of a prompt's own completions: they need several.
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo")


def _as_off(data: Any) -> Any:
    """YAML 1.1 reads a bare ``off`` as false."""
    return "off" if data is False else data


class RoleConfig(Section):
    """One role's model, meshes and sizes. Whatever is unset is as in the recipe itself."""

    model: Annotated[str | None, about(VERL, "Folder of the role's model.")] = None
    dist: Annotated[
        Literal["fsdp2", "moesaic"] | None,
        about(
            OURS,
            "`dist_config.name` of the role. Unset: as the recipe's; of `fsdp2`, an `ep_size` or `edp_size` makes "
            "`moesaic`.",
        ),
    ] = None
    ep_size: Annotated[int | None, about(OURS, "As `dist_config.ep_size`.", ge=1)] = None
    edp_size: Annotated[int | None, about(OURS, "As `dist_config.edp_size`.", ge=1)] = None
    cp_size: Annotated[int | None, about(VERL, "As `cp_size`.", ge=1)] = None
    tp_size: Annotated[int | None, about(OURS, "As `tp_size`.", ge=1)] = None
    mp_replicate_size: Annotated[int | None, about(OURS, "As `mp_replicate_size`.", ge=1)] = None
    ppo_micro_batch_size_per_gpu: Annotated[
        int | None,
        about(VERL, "Sequences in one forward of one data-parallel rank. Unset: `micro_batch_size`.", ge=1),
    ] = None
    micro_batch_tokens: Annotated[
        int | None,
        about(VERL, "Most tokens in one forward, instead: sequences lie end to end. As `micro_batch_tokens`.", ge=1),
    ] = None
    activation_checkpointing: Annotated[bool | None, about(VERL, "As `activation_checkpointing`.")] = None
    reshard_after_forward: Annotated[bool | None, about(VERL, "As `reshard_after_forward`.")] = None


class CriticConfig(RoleConfig):
    """The critic, under ``adv_estimator: gae``: a value model, trained beside the actor. Made of ``model``: its head is
    new where the folder has none."""

    learning_rate: Annotated[float | None, about(VERL, "Unset: the recipe's.", ge=0)] = None
    cliprange_value: Annotated[
        float, about(VERL, "How far a value may move from that of the rollout before it stops counting.", gt=0)
    ] = 0.5
    critic_warmup: Annotated[int, about(VERL, "Steps in which only the critic is trained, at the start.", ge=0)] = 0


class SamplingConfig(Section):
    """How tokens are drawn."""

    n: Annotated[int, about(VERL, "Completions per prompt: a group.", ge=1)] = 1
    max_tokens: Annotated[int, about(VERL, "Tokens of one completion, at most, over all its turns.", ge=1)] = 512
    temperature: Annotated[float, about(VERL, "The logits are divided by it; 0 is greedy, for validation.", ge=0)] = 1.0
    top_p: Annotated[float, about(VERL, "Only the likeliest tokens that together reach it.", gt=0, le=1)] = 1.0
    top_k: Annotated[int, about(VERL, "Only so many of the likeliest; 0: all.", ge=0)] = 0


class RolloutConfig(Section):
    """What generates: ``dp_size`` replicas of an engine, each of ``tp_size * pp_size`` ranks."""

    engine: Annotated[Literal["hf", "vllm", "sglang"], about(VERL, "What generates. Only `hf` works here so far.")] = (
        "hf"
    )
    dp_size: Annotated[int | None, about(OURS, "Replicas. Unset: ranks / (tp_size * pp_size).", ge=1)] = None
    tp_size: Annotated[int, about(VERL, "Ranks that share each matrix of a replica.", ge=1)] = 1
    pp_size: Annotated[int, about(VERL, "Ranks that share the layers of a replica.", ge=1)] = 1
    ep_size: Annotated[int, about(VERL, "Ranks that share the experts, across replicas.", ge=1)] = 1
    enable_expert_parallel: Annotated[
        bool, about(OURS, "vLLM's: experts are split over all ranks of the replicas instead of within a matrix.")
    ] = False
    max_prompt_length: Annotated[int, about(VERL, "Prompts of more tokens are left out, and counted.", ge=1)] = 512
    sampling: Annotated[SamplingConfig, about(VERL, "How completions are drawn to train on.")] = SamplingConfig()
    val_sampling: Annotated[
        SamplingConfig | None,
        about(VERL, "And to validate; `max_tokens` as in `sampling`, if unset. All of it unset: one each, greedy."),
    ] = None
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        about(OURS, "Tokens that end a completion, beside the tokenizer's own end.", strict=False),
    ] = ()
    environment: Annotated[
        str | None,
        about(OURS, "Several turns: `file.py:name` of a function that makes an Environment of a row (docs/rl.md)."),
    ] = None
    max_turns: Annotated[int, about(VERL, "Turns of the model in one trajectory, at most.", ge=1)] = 1
    max_batch_tokens: Annotated[int, about(OURS, "Of `hf`: tokens whose keys and values are held at a time.", ge=1)] = (
        65_536
    )
    free_cache_engine: Annotated[
        bool, about(VERL, "While the engine doesn't generate it gives its weights and caches back.")
    ] = True

    @model_validator(mode="before")
    @classmethod
    def _validate_as_long(cls, data: Any) -> Any:
        """Held-out completions may be as long as those that are trained on; a bad length is left to its own field."""
        if not isinstance(data, dict):
            return data
        sampling, val_sampling = (data.get(name) for name in ("sampling", "val_sampling"))
        if not isinstance(sampling, dict) or not isinstance(val_sampling, dict):
            return data
        longest = sampling.get("max_tokens")
        if type(longest) is not int or longest < 1:
            return data
        return {**data, "val_sampling": {"max_tokens": longest, **val_sampling}}


class RewardConfig(Section):
    """What a completion is worth: the weighted sum of functions and a model."""

    functions: Annotated[
        tuple[str, ...],
        BeforeValidator(as_tuple),
        about(
            VERL,
            "`file.py:name` of a function in verl's or TRL's signature, or one of `exact_match`, `math`, "
            "`reasoning_gym`.",
        ),
    ] = ()
    weights: Annotated[
        tuple[float, ...], about(OURS, "Of the functions, then of the model. Empty: 1 each.", strict=False)
    ] = ()
    timeout_s: Annotated[float, about(OURS, "For one call of a function; later it counts as failed.", gt=0)] = 10.0
    model: Annotated[str | None, about(VERL, "Folder of a sequence classifier of one label, that scores text.")] = None
    overlong_buffer_len: Annotated[
        int | None,
        about(VERL, "DAPO: the last so many of `max_tokens` cost a growing penalty. Unset: none.", ge=1),
    ] = None
    overlong_penalty_factor: Annotated[float, about(VERL, "The penalty at `max_tokens`.", gt=0)] = 1.0


class AlgorithmConfig(Section):
    """Which advantages and which policy loss; how a step's rollout becomes optimizer updates."""

    adv_estimator: Annotated[AdvEstimator, about(VERL, "How advantages are made of rewards.")] = "grpo"
    gamma: Annotated[float, about(VERL, "Discount per token.", gt=0, le=1)] = 1.0
    lam: Annotated[float, about(VERL, "GAE's decay.", ge=0, le=1)] = 1.0
    loss_mode: Annotated[LossMode, about(VERL, "The policy loss of a token. `vanilla` is PPO's.")] = "vanilla"
    loss_agg_mode: Annotated[LossAggMode, about(VERL, "How token losses become one number.")] = "token-mean"
    loss_scale_factor: Annotated[
        float | None, about(VERL, "The constant of `seq-mean-token-sum-norm`; Dr.GRPO: the longest completion.", gt=0)
    ] = None
    clip_ratio_low: Annotated[float, about(VERL, "The ratio is clipped below 1 minus it.", gt=0)] = 0.2
    clip_ratio_high: Annotated[float, about(VERL, "And above 1 plus it; DAPO's clip-higher: 0.28.", gt=0)] = 0.2
    clip_ratio_c: Annotated[
        float | None, about(VERL, "Dual clip: the most that a negative advantage is scaled by. `null`: none.", gt=1)
    ] = 3.0
    cispo_ratio_min: Annotated[float, about(OURS, "`cispo`: the least weight of a token, absolute.", ge=0)] = 0.0
    cispo_ratio_max: Annotated[float, about(OURS, "`cispo`: the largest weight of a token, absolute.", gt=0)] = 5.0
    sapo_tau_pos: Annotated[float, about(VERL, "`sapo`: temperature of the gate where the advantage is > 0.", gt=0)] = (
        1.0
    )
    sapo_tau_neg: Annotated[float, about(VERL, "`sapo`: and where it isn't.", gt=0)] = 1.05
    dppo_delta_low: Annotated[float, about(VERL, "`dppo_tv`: how far a probability may fall.", gt=0)] = 0.2
    dppo_delta_high: Annotated[float, about(VERL, "`dppo_tv`: how far a probability may rise.", gt=0)] = 0.2
    entropy_coeff: Annotated[float, about(VERL, "Of the entropy that is added to what is maximized.", ge=0)] = 0.0
    ppo_mini_batch_size: Annotated[
        int | None, about(VERL, "Prompts (with all their completions) of one optimizer update. Unset: all.", ge=1)
    ] = None
    ppo_epochs: Annotated[int, about(VERL, "Times that a rollout is gone through.", ge=1)] = 1
    filter_groups: Annotated[
        bool, about(VERL, "DAPO: groups whose rewards are all equal are replaced by further prompts'.")
    ] = False
    max_num_gen_batches: Annotated[
        int, about(VERL, "`filter_groups`: rollouts for one step, at most; then it trains on what there is.", ge=1)
    ] = 10


class KlConfig(Section):
    """Holding the actor near the reference. Off, no reference is loaded."""

    use: Annotated[
        Literal["off", "loss", "reward"],
        BeforeValidator(_as_off),
        about(VERL, "Added to the loss, or taken from each token's reward."),
    ] = "off"
    estimator: Annotated[
        KlEstimator,
        about(VERL, "Of the divergence. `k3+`: the value of k3 with the gradient of k2; in the reward k1 is right."),
    ] = "k3+"
    coef: Annotated[float, about(VERL, "Its coefficient, or the first one.", ge=0)] = 0.001
    target: Annotated[
        float | None, about(VERL, "`reward`: the coefficient is adapted toward this divergence. Unset: fixed.", gt=0)
    ] = None
    horizon: Annotated[int, about(VERL, "`target`: sequences over which the coefficient adapts.", ge=1)] = 10_000


class CorrectionConfig(Section):
    """For tokens that the engine and the trainer give different probabilities."""

    rollout_is: Annotated[
        Literal["token", "sequence", "icepop"] | None,
        about(
            VERL,
            "Weights pi_train / pi_rollout: per token or per sequence, cut at `rollout_is_threshold` (TIS); `icepop`: "
            "per token, 0 outside of `rollout_is_threshold_lower` to `rollout_is_threshold`.",
        ),
    ] = None
    rollout_is_threshold: Annotated[float, about(VERL, "The largest weight.", gt=0)] = 2.0
    rollout_is_threshold_lower: Annotated[float, about(VERL, "`icepop`: the least weight.", ge=0)] = 0.5
    rollout_is_batch_normalize: Annotated[bool, about(VERL, "Weights are divided by their mean over the step.")] = False
    rollout_rs: Annotated[
        tuple[
            Literal[
                "token_k1", "token_k2", "token_k3",
                "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
                "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
                "seq_max_k2", "seq_max_k3",
            ],
            ...,
        ],
        about(VERL, "Measures that leave tokens, or whole sequences, out.", strict=False),
    ] = ()  # fmt: skip
    rollout_rs_threshold: Annotated[
        tuple[str, ...],
        about(
            VERL,
            "One each, as text: for k1 the `low_high` of pi_rollout / pi_train (`2` is `0.5_2`), for k2 and k3 the "
            "largest value that is kept.",
            strict=False,
        ),
    ] = ()
    bypass_mode: Annotated[
        bool, about(VERL, "The engine's log-probabilities stand for the old ones: one forward less.")
    ] = False


class DistillationConfig(Section):
    """Learning from the teacher, on what the actor itself wrote."""

    mode: Annotated[
        Literal["off", "policy_gradient", "forward_kl_topk"],
        BeforeValidator(_as_off),
        about(
            VERL,
            "`policy_gradient`: advantages are teacher minus student (`adv_estimator: on_policy_distillation`). "
            "`forward_kl_topk`: a loss over the teacher's likeliest tokens, beside the policy loss.",
        ),
    ] = "off"
    coef: Annotated[float, about(VERL, "Its coefficient.", ge=0)] = 1.0
    topk: Annotated[int, about(VERL, "`forward_kl_topk`: how many tokens.", ge=1)] = 32
    loss_max_clamp: Annotated[float | None, about(VERL, "Most that one token counts. Unset: all.", gt=0)] = None
    use_task_rewards: Annotated[
        bool, about(VERL, "`forward_kl_topk`: train on rewards too, by `adv_estimator` and `loss_mode`.")
    ] = False
