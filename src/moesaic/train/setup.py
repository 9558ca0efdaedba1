"""Everything a run needs before its first step, made from the recipe: on every rank alike."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoTokenizer, PreTrainedModel

from moesaic import __version__
from moesaic.checkpoint import TrainState, load_checkpoint
from moesaic.config import Fsdp2Config, FsdpTurboConfig, Problem, Recipe, RecipeError, save_recipe
from moesaic.config.run_folder import choose_checkpoint, run_folder_problems
from moesaic.data import StreamLoader
from moesaic.kernels import find_bound_kernels, select_kernels
from moesaic.meshes import Meshes, build_meshes
from moesaic.model.build import build_on_meta
from moesaic.parallel.apply import ParallelOptions, from_pretrained, give_storage, parallelize
from moesaic.runtime import device_type, init_process_group, seed_all, use_determinism
from moesaic.specs import ModelSpec, find_spec
from moesaic.train.data import RunData, build_data, save_data_report
from moesaic.train.optim import build_optimizer, build_scheduler
from moesaic.train.router import RouterOptions, RouterTraining, build_router_training
from moesaic.weights.family import require_known_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PACKAGES = ("torch", "transformers", "datasets", "safetensors", "numpy", "pydantic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is ready for step ``first_step + 1`` of ``num_steps``."""

    recipe: Recipe
    meshes: Meshes
    model: PreTrainedModel
    optimizer: Optimizer
    scheduler: LRScheduler
    data: RunData
    router: RouterTraining | None
    num_steps: int
    first_step: int

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.recipe.output_dir)

    @property
    def state(self) -> TrainState:
        """What a checkpoint holds."""
        return TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.data.loader)


def build_run(recipe: Recipe) -> Run:
    """Process group, meshes, data, model, optimizer, and the checkpoint to go on from. Every rank must call it.

    Raises:
        ValueError: what only shows here: bad data, a checkpoint folder in the way, weights that don't fit.
    """
    meshes = start(recipe)
    checkpoint = agree_on_checkpoint(recipe)
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)
    data = build_data(recipe, meshes, AutoTokenizer.from_pretrained(recipe.model))
    save_data_report(recipe, data)
    model = build_model(recipe, meshes)
    _refuse_packing(recipe, model)
    # Now, not after the last step: what couldn't be exported.
    require_known_layout(model)
    router = build_router_training(model, router_options(recipe, model), meshes)
    num_steps = _count_steps(recipe, data)
    optimizer = build_optimizer(model, recipe.optim_config, recipe.learning_rate)
    scheduler = build_scheduler(optimizer, recipe.lr_scheduler_config, num_steps)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=data.loader)
    first_step = 0 if checkpoint is None else load_checkpoint(checkpoint, state)
    refuse_later_steps(first_step, num_steps)
    # Last: where a resumption is refused, the folder says what the run was.
    save_run_facts(recipe, meshes)
    save_kernel_facts(recipe, model)
    return Run(
        recipe=recipe,
        meshes=meshes,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        router=router,
        num_steps=num_steps,
        first_step=first_step,
    )


def start(recipe: Recipe) -> Meshes:
    """Join the process group, seed this rank, build the meshes. Every rank must call it.

    A caller may have joined a default process group already, with a timeout of its own; then that one is used.
    """
    join(recipe)
    return build_meshes(
        cp_size=recipe.cp_size,
        tp_size=recipe.tp_size,
        mp_replicate_size=recipe.mp_replicate_size,
        ep_size=recipe.ep_size,
        edp_size=recipe.edp_size,
    )


def join(recipe: Recipe) -> None:
    """The first part of ``start``: everything but meshes. Every rank must call it."""
    if recipe.full_determinism:
        use_determinism()
    if not dist.is_initialized():
        init_process_group(recipe.dist_timeout)
    logging.getLogger("moesaic").setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    # Every rank computes on other tokens, or other heads, and draws other noise (dropout).
    seed_all(recipe.seed + dist.get_rank())


def build_model(recipe: Recipe, meshes: Meshes, value_head: Literal["new", "trained"] | None = None) -> PreTrainedModel:
    """The model of the recipe, sharded and loaded (``from_pretrained``). Every rank must call it."""
    return from_pretrained(
        recipe.model,
        meshes,
        options=parallel_options(recipe),
        attn_implementation=recipe.attn_implementation,
        kernels=select_kernels(recipe.kernel_config, device_type=meshes.dense.device_type),
        value_head=value_head,
    )


def build_unloaded_model(recipe: Recipe, meshes: Meshes) -> PreTrainedModel:
    """The model of the recipe, sharded, with storage and no values, for weights from elsewhere (``load_model``).

    Of ``recipe.model`` only ``config.json`` is read. Kernels and attention are torch's: nothing is trained with it.
    Every rank must call it.
    """
    options = parallel_options(recipe)
    model = build_on_meta(recipe.model, attn_implementation=None, dtype=options.storage_dtype)
    parallelize(model, meshes, spec_of(model), options)
    give_storage(model, meshes, options)
    return model


def parallel_options(recipe: Recipe) -> ParallelOptions:
    """How the recipe's model is parallelized, beside the meshes."""
    path_b = None if isinstance(recipe.dist_config, Fsdp2Config) else recipe.dist_config
    return ParallelOptions(
        expert_parallel=path_b is not None,
        ep_dispatcher="eager" if path_b is None else path_b.ep_dispatcher,
        storage_dtype=DTYPES[recipe.storage_dtype],
        compute_dtype=DTYPES[recipe.compute_dtype],
        reshard_after_forward=recipe.reshard_after_forward,
        activation_checkpointing=recipe.activation_checkpointing,
        exchanged_tokens=recipe.exchanged_tokens,
        offload=recipe.offload,
        fsdp_implementation="native" if path_b is None else path_b.fsdp_implementation,
        hook_modules=path_b.hook_modules if isinstance(path_b, FsdpTurboConfig) else (),
        fsdp_ignored_modules=() if path_b is None else path_b.fsdp_ignored_modules,
        frozen_modules=recipe.frozen_modules,
        cp_mode=recipe.cp_mode,
    )


def router_options(recipe: Recipe, model: PreTrainedModel) -> RouterOptions:
    """What the recipe asks of the routers; where it is silent on the auxiliary loss, what the model's config asks."""
    config = recipe.router_config
    aux_loss_coef = config.aux_loss_coef
    if aux_loss_coef is None:
        parts = (model.config.to_dict(), model.config.get_text_config().to_dict())
        is_on = any(part.get("output_router_logits") for part in parts)
        # A family without the coefficient only records its logits then.
        aux_loss_coef = parts[1].get("router_aux_loss_coef", 0.0) if is_on else 0.0
    return RouterOptions(
        aux_loss_coef=aux_loss_coef, z_loss_coef=config.z_loss_coef, bias_update_rate=config.bias_update_rate
    )


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """The family's spec: the registered one, or else the defaults."""
    return find_spec(model.config.model_type)


def save_run_facts(recipe: Recipe, meshes: Meshes) -> None:
    """On rank 0, write what the run is into its folder: ``recipe.yaml``, ``meshes.txt``, ``environment.json``.

    The model's path is written as an absolute one: an export may be made from another working directory.
    """
    if dist.get_rank() != 0:
        return
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    absolute = recipe.model_copy(update={"model": str(Path(recipe.model).absolute())})
    save_recipe(absolute, folder / "recipe.yaml")
    (folder / "meshes.txt").write_text(meshes.table() + "\n", encoding="utf-8")
    kind = device_type()
    facts = {
        "moesaic": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": kind if kind == "cpu" else torch.get_device_module(kind).get_device_name(),
        "world_size": dist.get_world_size(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    (folder / "environment.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def save_kernel_facts(recipe: Recipe, model: PreTrainedModel) -> None:
    """Add to ``environment.json`` which implementation each operator of ``model`` runs. By rank 0."""
    if dist.get_rank() != 0:
        return
    path = Path(recipe.output_dir) / "environment.json"
    facts = {**json.loads(path.read_text(encoding="utf-8")), "kernels": find_bound_kernels(model)}
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def agree_on_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from as rank 0 sees the folder: a file system may show others an older state of it."""
    found: list[tuple[list[Problem], Path | None]] = [([], None)]
    if dist.get_rank() == 0:
        problems = run_folder_problems(recipe)
        found = [(problems, None if problems else choose_checkpoint(recipe))]
    dist.broadcast_object_list(found, src=0)
    problems, checkpoint = found[0]
    if problems:
        raise RecipeError(problems)
    return checkpoint


def refuse_later_steps(first_step: int, num_steps: int) -> None:
    """Refuse to go on after the end: what would be exported has more steps than the recipe says.

    Raises:
        ValueError: the checkpoint is from a later step than the run's last.
    """
    if first_step > num_steps:
        raise ValueError(
            f"resume_from_checkpoint: it has {first_step} steps done, and the run ends after {num_steps} (max_steps, "
            "or num_train_epochs); set more, or name an earlier checkpoint."
        )


def _count_steps(recipe: Recipe, data: RunData) -> int:
    """``max_steps``, else ``num_train_epochs`` epochs of them."""
    if recipe.max_steps is not None:
        return recipe.max_steps
    assert not isinstance(data.loader, StreamLoader), "check_recipe refuses a stream without max_steps"
    return recipe.num_train_epochs * data.loader.num_steps_per_epoch


def _refuse_packing(recipe: Recipe, model: PreTrainedModel) -> None:
    """The same check as the recipe's, for a model whose config doesn't show that it has linear attention."""
    if recipe.shares_rows and find_bound_kernels(model):
        field = "packing=true" if recipe.packing else f"micro_batch_tokens={recipe.micro_batch_tokens}"
        remedy = "packing: false" if recipe.packing else "micro_batch_size instead"
        raise ValueError(
            f"{field}: not yet for a model with linear attention, which would carry its state from one packed sample "
            f"into the next. Set {remedy}."
        )
