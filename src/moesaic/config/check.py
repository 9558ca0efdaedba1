"""What a recipe's values must satisfy together: combinations, sizes, the model's experts. Torch-free.

Every check names the fields it reads, and runs unless one of them couldn't be read: one wrong line never hides another.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from moesaic.config.case import MODEL_FILES, Case, Check, is_unread
from moesaic.config.data_check import dataset_problems, mixing_problems, token_batch_problems
from moesaic.config.model_check import model_file_problems, model_problems, packing_problems
from moesaic.config.parallel import ParallelSizes, dense_size_problems, expert_size_problems
from moesaic.config.problem import Problem, show
from moesaic.config.recipe import Fsdp2Config, FsdpTurboConfig, Recipe
from moesaic.config.rl_check import RL_CHECKS
from moesaic.config.rl_role_check import ROLE_CHECKS
from moesaic.config.rl_unused import UNUSED_CHECKS
from moesaic.config.run_folder import run_folder_problems
from moesaic.config.sequence_check import sequence_problems

KERNEL_NAMES = ("auto", "flash-linear-attention")
KERNELS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
# transformers' own; whether one is installed and fits the model shows when the model is built.
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
# owner/name, with @revision and :function where wanted.
HUB_KERNEL = re.compile(r"[^/:@\s]+/[^/:@\s]+(?:@[^/:\s]+)?(?::[^/:\s]+)?")
# Values of report_to that are packages of their own.
OPTIONAL_BOARDS = ("wandb",)
# What the number of ranks may follow from.
WORLD_FIELDS = ("dp_size", "mp_shard_size", "mp_replicate_size", "cp_size", "tp_size")

# What runs can be trained for so far.
STAGES = ("sft", "pt", "rl")

# Known fields of which only one value works so far.
ONLY_SO_FAR: Mapping[str, object] = MappingProxyType(
    {
        "dist_config.ep_dispatcher": "eager",
    }
)


def check_recipe(
    recipe: Recipe,
    world_size: int | None = None,
    *,
    default_world_size: int | None = None,
    unread: frozenset[str] = frozenset(),
) -> list[Problem]:
    """All problems of a recipe whose values have the right types.

    Args:
        world_size: ranks of the run. None: as many as ``dp_size``, else ``mp_shard_size``, implies; without these,
            checks that need the number are left out.
        default_world_size: ranks where neither ``world_size`` nor the recipe says it.
        unread: dotted names of fields or sections that hold only a default because they couldn't be read.
    """
    if world_size is not None and world_size < 1:
        problem = Problem(
            field="world_size", value=world_size, rule="a run has at least 1 rank", remedy="give 1 or more"
        )
        return [problem, *check_recipe(recipe, None, unread=unread)]
    world_size = world_size or _implied_world_size(recipe, unread)
    if world_size is None and not is_unread(WORLD_FIELDS, unread):  # an unread field might have said it
        world_size = default_world_size
    case = Case(recipe=recipe, world_size=world_size)
    return [problem for check in CHECKS if not is_unread(check.needs, unread) for problem in check.find(case)]


def resolve_sizes(recipe: Recipe, world_size: int | None = None) -> ParallelSizes:
    """Sizes of every axis on ``world_size`` ranks. Example: 16 ranks with ``ep_size: 16`` make dp 16, ep 16, efsdp 1.

    Raises:
        ValueError: the number of ranks is unknown, or the sizes don't multiply to it.
    """
    world_size = world_size or _implied_world_size(recipe, frozenset())
    if world_size is None:
        raise ValueError("world_size is not set, and the recipe has no dp_size to derive it from; pass it.")
    return ParallelSizes(
        world_size=world_size,
        cp_size=recipe.cp_size,
        tp_size=recipe.tp_size,
        mp_replicate_size=recipe.mp_replicate_size,
        ep_size=recipe.ep_size,
        edp_size=recipe.edp_size,
    )


def num_micro_batches(recipe: Recipe, sizes: ParallelSizes) -> int:
    """Micro-batches of one data-parallel rank in one optimizer step: global / (micro * dp); 1 if global is unset.

    Not for ``micro_batch_tokens``, with which every step has its own number. Example: global 64, micro 2, dp 8 make 4.
    """
    assert recipe.micro_batch_tokens is None, recipe.micro_batch_tokens
    if recipe.global_batch_size is None:
        return 1
    count, rest = divmod(recipe.global_batch_size, recipe.micro_batch_size * sizes.dp_size)
    assert count and not rest, "check_recipe refuses this"
    return count


def _implied_world_size(recipe: Recipe, unread: frozenset[str]) -> int | None:
    """Ranks of the run, where the recipe's sizes give them: dp * cp * tp, or mp_replicate * mp_shard * tp."""
    if recipe.dp_size is not None and not is_unread(("dp_size", "cp_size", "tp_size"), unread):
        return recipe.dp_size * recipe.cp_size * recipe.tp_size
    if recipe.mp_shard_size is not None and not is_unread(("mp_shard_size", "mp_replicate_size", "tp_size"), unread):
        return recipe.mp_replicate_size * recipe.mp_shard_size * recipe.tp_size
    return None


def _only_so_far(field: str) -> Check:
    """The check that ``field`` holds the one value that works."""
    allowed = ONLY_SO_FAR[field]
    section, _, key = field.rpartition(".")

    def find(case: Case) -> Iterable[Problem]:
        plain = case.recipe.model_dump()
        value = (plain[section] if section else plain).get(key, allowed)
        if value != allowed:
            rule = f"not yet: {show(value)} is known, and only {show(allowed)} works so far"
            yield Problem(field=field, value=value, rule=rule, remedy=f"set {show(allowed)}, or remove it")

    return Check(needs=(field,), find=find)


def _stage_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.stage not in STAGES:
        rule = f"not yet: {case.recipe.stage} is known, and only {' and '.join(STAGES)} work so far"
        yield Problem(field="stage", value=case.recipe.stage, rule=rule, remedy="set one of these, or remove it")


def _kernel_problems(case: Case) -> Iterable[Problem]:
    config = case.recipe.kernel_config
    for field, names, known in (("name", config.names, KERNEL_NAMES), ("include_kernels", config.kernels, KERNELS)):
        for name in names:
            if name not in known:
                rule = f"{name} is none of {', '.join(known)}"
                value = config.name if field == "name" else config.include_kernels
                remedy = f"remove {name}, or name one of these"
                yield Problem(field=f"kernel_config.{field}", value=value, rule=rule, remedy=remedy)
    if not config.names:
        remedy = "write auto, or remove kernel_config"
        yield Problem(field="kernel_config.name", value=config.name, rule="names nothing", remedy=remedy)


def _attention_problems(case: Case) -> Iterable[Problem]:
    name = case.recipe.attn_implementation
    if name is not None and name not in ATTENTIONS and not HUB_KERNEL.fullmatch(name):
        rule = f"is none of {', '.join(ATTENTIONS)}, and no kernel of the Hub (owner/name)"
        close = difflib.get_close_matches(name, ATTENTIONS, n=1)
        remedy = f"did you mean {close[0]}?" if close else "name one of these, or remove it for transformers' choice"
        yield Problem(field="attn_implementation", value=name, rule=rule, remedy=remedy)


def _dtype_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.storage_dtype == "bf16" and case.recipe.compute_dtype == "fp32":
        yield Problem(
            field="master_dtype",
            value="bf16",
            rule="parameters stored in bf16 have nothing to compute in fp32 with (bf16: false)",
            remedy="set bf16: true, or master_dtype: fp32",
        )


def _exchange_problems(case: Case) -> Iterable[Problem]:
    recipe = case.recipe
    if recipe.exchanged_tokens == "keep":
        return
    field, value = "exchanged_tokens", recipe.exchanged_tokens
    if isinstance(recipe.dist_config, Fsdp2Config):
        rule, remedy = "dist_config.name: fsdp2 exchanges no tokens", "remove it, or choose dist_config.name: moesaic"
        yield Problem(field=field, value=value, rule=rule, remedy=remedy)
    if not recipe.activation_checkpointing:
        rule = "nothing is computed again without activation_checkpointing"
        yield Problem(field=field, value=value, rule=rule, remedy="set activation_checkpointing: true, or remove it")


def _implementation_problems(case: Case) -> Iterable[Problem]:
    config = case.recipe.dist_config
    if not isinstance(config, Fsdp2Config) and config.fsdp_implementation == "custom" and config.ep_size == 1:
        yield Problem(
            field="dist_config.fsdp_implementation",
            value="custom",
            rule="gives the experts of a block a mesh of their own, and with ep_size 1 there is only one",
            remedy="set fsdp_implementation: native, or an ep_size of at least 2",
        )
    if isinstance(config, FsdpTurboConfig) and config.hook_modules and config.fsdp_implementation == "custom":
        yield Problem(
            field="dist_config.hook_modules",
            value=config.hook_modules,
            rule="under fsdp_implementation: custom a block's one unit gathers its experts",
            remedy="remove it, or set fsdp_implementation: native",
        )


def _eval_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.eval_steps is not None and not case.recipe.eval_dataset:
        rule, remedy = "needs samples to evaluate on", "set eval_dataset, or remove eval_steps"
        yield Problem(field="eval_steps", value=case.recipe.eval_steps, rule=rule, remedy=remedy)


def _best_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.load_best_model_at_end and not case.recipe.eval_dataset:
        rule, remedy = "needs samples to evaluate on", "set eval_dataset, or remove load_best_model_at_end"
        yield Problem(field="load_best_model_at_end", value=True, rule=rule, remedy=remedy)


def _report_problems(case: Case) -> Iterable[Problem]:
    for name in OPTIONAL_BOARDS:
        if name in case.recipe.report_to and importlib.util.find_spec(name) is None:
            rule, remedy = f"the package {name} isn't installed", f"pip install 'moesaic[{name}]', or remove {name}"
            yield Problem(field="report_to", value=case.recipe.report_to, rule=rule, remedy=remedy)


def _optimizer_problems(case: Case) -> Iterable[Problem]:
    if case.recipe.optim_config.name == "muon":
        rule = "torch's Muon takes matrices only, and experts are stacks of them"
        yield Problem(field="optim_config.name", value="muon", rule=rule, remedy="set adamw, or remove it")


def _dump_problems(case: Case) -> Iterable[Problem]:
    dump, max_steps = case.recipe.dump, case.recipe.max_steps
    if dump is None:
        return
    for field, names in (("steps", dump.steps), ("params", dump.params), ("what", dump.what)):
        if not names:
            yield Problem(field=f"dump.{field}", value=[], rule="names nothing", remedy="name some, or remove dump")
    if max_steps is not None and any(step > max_steps for step in dump.steps):
        rule, remedy = f"the run ends after max_steps: {max_steps}", f"name steps from 1 to {max_steps}"
        yield Problem(field="dump.steps", value=dump.steps, rule=rule, remedy=remedy)


def _schedule_problems(case: Case) -> Iterable[Problem]:
    schedule, max_steps = case.recipe.lr_scheduler_config, case.recipe.max_steps
    section = "lr_scheduler_config"
    if schedule.warmup_steps and schedule.warmup_ratio is not None:
        rule, remedy = "warmup_steps says it too", "keep one of the two"
        yield Problem(field=f"{section}.warmup_ratio", value=schedule.warmup_ratio, rule=rule, remedy=remedy)
    if schedule.name == "constant" and schedule.min_lr_ratio:
        rule, remedy = "a constant learning rate doesn't fall", "remove it, or choose linear or cosine"
        yield Problem(field=f"{section}.min_lr_ratio", value=schedule.min_lr_ratio, rule=rule, remedy=remedy)
    if max_steps is not None and schedule.warmup_steps > max_steps:
        rule, remedy = f"warm-up must end within max_steps: {max_steps}", f"set at most {max_steps}"
        yield Problem(field=f"{section}.warmup_steps", value=schedule.warmup_steps, rule=rule, remedy=remedy)


def _dp_problems(case: Case) -> Iterable[Problem]:
    recipe, world = case.recipe, case.world_size
    if world is None or recipe.dp_size is None:
        return
    ranks = recipe.cp_size * recipe.tp_size
    wanted = recipe.dp_size * ranks
    if wanted != world:
        yield Problem(
            field="dp_size",
            value=recipe.dp_size,
            rule=f"dp_size * cp_size * tp_size = {wanted} must be the {world} ranks",
            remedy=f"remove dp_size{_or_set(world, ranks)}, or start {wanted} ranks",
        )


def _mp_shard_problems(case: Case) -> Iterable[Problem]:
    recipe, world = case.recipe, case.world_size
    if world is None or recipe.mp_shard_size is None:
        return
    ranks = recipe.mp_replicate_size * recipe.tp_size
    wanted = recipe.mp_shard_size * ranks
    if wanted != world:
        yield Problem(
            field="mp_shard_size",
            value=recipe.mp_shard_size,
            rule=f"mp_replicate_size * mp_shard_size * tp_size = {wanted} must be the {world} ranks",
            remedy=f"remove mp_shard_size{_or_set(world, ranks)}, or start {wanted} ranks",
        )


def _or_set(world: int, ranks: int) -> str:
    """The one value that makes a product of ``world``, where there is one."""
    return "" if world % ranks else f" or set {world // ranks}"


def _dense_problems(case: Case) -> Iterable[Problem]:
    recipe, world = case.recipe, case.world_size
    return dense_size_problems(world, recipe.cp_size, recipe.tp_size, recipe.mp_replicate_size) if world else ()


def _expert_problems(case: Case) -> Iterable[Problem]:
    config, world = case.recipe.dist_config, case.world_size
    if world is None or isinstance(config, Fsdp2Config):
        return ()
    found = expert_size_problems(world, case.recipe.ep_size, case.recipe.edp_size)
    # an edp_size that isn't set is mp_replicate_size, and _dense_problems has said what is wrong with that
    return [problem for problem in found if config.edp_size is not None or problem.field != "dist_config.edp_size"]


def _batch_problems(case: Case) -> Iterable[Problem]:
    recipe, world = case.recipe, case.world_size
    ranks = recipe.cp_size * recipe.tp_size
    if world is None or world % ranks or recipe.global_batch_size is None or recipe.micro_batch_tokens is not None:
        return
    if recipe.stage == "rl":  # it counts prompts there, and trajectories are dealt out to the ranks
        return
    step = recipe.micro_batch_size * (world // ranks)
    below = recipe.global_batch_size // step * step
    if below != recipe.global_batch_size:
        rule = (
            f"must be a multiple of micro_batch_size * dp_size = {recipe.micro_batch_size} * {world // ranks} = {step}"
        )
        remedy = f"nearest: {below} or {below + step}" if below else f"nearest: {step}"
        yield Problem(field="global_batch_size", value=recipe.global_batch_size, rule=rule, remedy=remedy)


CHECKS: tuple[Check, ...] = (
    *(_only_so_far(field) for field in ONLY_SO_FAR),
    Check(needs=("model", "dist_config.ep_size"), find=lambda case: model_problems(case.recipe)),
    Check(needs=("model", MODEL_FILES), find=lambda case: model_file_problems(case.recipe)),
    Check(
        needs=("model", "cp_size", "tp_size", "attn_implementation"), find=lambda case: sequence_problems(case.recipe)
    ),
    Check(needs=("model", "packing", "micro_batch_tokens"), find=lambda case: packing_problems(case.recipe)),
    Check(needs=("stage",), find=_stage_problems),
    Check(needs=("train_dataset", "eval_dataset", "stage"), find=lambda case: dataset_problems(case.recipe)),
    Check(needs=("train_dataset", "max_steps"), find=lambda case: mixing_problems(case.recipe)),
    Check(
        needs=(
            *("micro_batch_tokens", "micro_batch_size", "packing", "global_batch_size"),
            *("cutoff_len", "cp_size", "tp_size", "train_dataset", "stage"),
        ),
        find=lambda case: token_batch_problems(case.recipe),
    ),
    Check(needs=("kernel_config.name", "kernel_config.include_kernels"), find=_kernel_problems),
    Check(needs=("bf16", "master_dtype", "dist_config.name"), find=_dtype_problems),
    Check(needs=("exchanged_tokens", "activation_checkpointing", "dist_config.name"), find=_exchange_problems),
    Check(
        needs=("dist_config.hook_modules", "dist_config.fsdp_implementation", "dist_config.ep_size"),
        find=_implementation_problems,
    ),
    Check(needs=("eval_steps", "eval_dataset"), find=_eval_problems),
    Check(needs=("load_best_model_at_end", "eval_dataset"), find=_best_problems),
    Check(needs=("report_to",), find=_report_problems),
    Check(needs=("optim_config.name",), find=_optimizer_problems),
    Check(needs=("dump.steps", "dump.params", "dump.what", "max_steps"), find=_dump_problems),
    Check(
        needs=(
            "max_steps",
            "lr_scheduler_config.name",
            "lr_scheduler_config.warmup_steps",
            "lr_scheduler_config.warmup_ratio",
            "lr_scheduler_config.min_lr_ratio",
        ),
        find=_schedule_problems,
    ),
    Check(needs=("resume_from_checkpoint", "output_dir"), find=lambda case: run_folder_problems(case.recipe)),
    Check(needs=("attn_implementation",), find=_attention_problems),
    Check(needs=("dp_size", "cp_size", "tp_size"), find=_dp_problems),
    Check(needs=("mp_shard_size", "mp_replicate_size", "tp_size"), find=_mp_shard_problems),
    Check(needs=("cp_size", "tp_size", "mp_replicate_size"), find=_dense_problems),
    Check(needs=("mp_replicate_size", "dist_config.ep_size", "dist_config.edp_size"), find=_expert_problems),
    Check(
        needs=("global_batch_size", "micro_batch_size", "micro_batch_tokens", "cp_size", "tp_size", "stage"),
        find=_batch_problems,
    ),
    *RL_CHECKS,
    *ROLE_CHECKS,
    *UNUSED_CHECKS,
)
