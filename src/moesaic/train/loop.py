"""One rank's whole run: set up, step, log, evaluate, save, export."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from moesaic.checkpoint import delete_old_checkpoints, load_model, save_checkpoint
from moesaic.config import Fsdp2Config, MoesaicConfig, Recipe
from moesaic.config.run_folder import EXPORT, checkpoint_folder
from moesaic.data.batch import Batch
from moesaic.data.shard import shard_batch
from moesaic.parallel.units import list_units, units_table
from moesaic.runtime import shutdown, start_errors
from moesaic.train.best import Best, load_best, save_best
from moesaic.train.boards import build_boards
from moesaic.train.dump import Dumper
from moesaic.train.evaluate import evaluate_sets
from moesaic.train.flops import build_model_flops
from moesaic.train.metrics import Meter, MetricsWriter
from moesaic.train.setup import DTYPES, Run, build_run, build_unloaded_model, spec_of, start
from moesaic.train.step import StepResult, train_step
from moesaic.train.warm_up import warm_up_collectives
from moesaic.weights import export_hf, find_weights, match_folder, remember_source

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """The gradients of a step are not finite. Raised on all ranks at the same step, which moved no weight."""


def train(recipe: Recipe, is_verbose: bool = False) -> None:
    """Run a recipe to its end. Every rank must call it, after the recipe was checked for the number of ranks.

    The run's folder then holds ``recipe.yaml``, ``meshes.txt``, ``environment.json``, ``metrics.jsonl``,
    ``data_report.jsonl`` (samples left out), ``tensorboard/``, the checkpoints ``step-NNNNNN/`` and ``export/``: the
    trained model as Hugging Face safetensors, with its tokenizer. With ``load_best_model_at_end`` it is the model of
    the lowest held-out loss, which ``best.json`` names; otherwise the last. Where asked for, ``dumps/``.

    Args:
        is_verbose: rank 0 also prints which FSDP unit shards each parameter, and how.

    Raises:
        NonFiniteError: at once, on all ranks, without saving: the newest checkpoint is the last good one.
        StartError: see ``build_run`` and ``Dumper``.
    """
    with start_errors():
        run = build_run(recipe)
        dumper = None if recipe.dump is None else Dumper(run.model, recipe.dump, run.output_dir, run.num_steps)
    if is_verbose and dist.get_rank() == 0:
        print(units_table(list_units(run.model)), flush=True)
    warm_up_collectives(run.model, run.meshes)
    with _open_writer(run) as writer:
        best = _train_steps(run, writer, dumper)
    if best is not None and best.step != run.num_steps:
        load_model(checkpoint_folder(run.output_dir, best.step), run.model)
    folder = run.output_dir / EXPORT
    if dist.get_rank() == 0 and folder.exists():  # only a resumed run finds one: its own, from before
        shutil.rmtree(folder)
    dist.barrier()
    _export(run.model, recipe, folder)
    shutdown()


def export_checkpoint(recipe: Recipe, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's weights (the actor's) as Hugging Face safetensors, with the tokenizer. Every rank must call.

    Of ``recipe.model`` the config and the tokenizer are read. Where its weights are still there, the export has their
    names, and what the model has no use for (else a warning tells); their values, which training began with, are not
    read.

    Args:
        recipe: the saved run's; its topology is not used: weights are cut anew over the ranks there are.
    """
    sizes = {"dp_size": None, "mp_shard_size": None, "mp_replicate_size": 1, "cp_size": 1, "tp_size": 1}
    is_path_a = isinstance(recipe.dist_config, Fsdp2Config)
    dist_config = recipe.dist_config if is_path_a else MoesaicConfig(name="moesaic")
    recipe = recipe.model_copy(update={**sizes, "dist_config": dist_config})
    with start_errors():
        meshes = start(recipe)
        model = build_unloaded_model(recipe, meshes)
        load_model(checkpoint, model)
        if find_weights(recipe.model):
            remember_source(model, match_folder(model, Path(recipe.model)))
        elif dist.get_rank() == 0:
            logger.warning(
                "%s: the weights that training began with aren't there. The export is without the tensors that the "
                "model has no use for (layers for multi-token prediction, a vision tower), if it had any. Put the "
                "folder back and export again to have them.",
                recipe.model,
            )
        _export(model, recipe, folder)
    shutdown()


def _export(model: PreTrainedModel, recipe: Recipe, folder: Path) -> None:
    """In the computing type: exactly the weights that the forward pass used."""
    export_hf(model, folder, dtype=DTYPES[recipe.compute_dtype], tokenizer_folder=recipe.model)


@contextmanager
def _open_writer(run: Run) -> Iterator[MetricsWriter | None]:
    """The metrics writer on rank 0, None elsewhere; closed at the end, also by an error."""
    if dist.get_rank() != 0:
        yield None
        return
    config = run.recipe.model_dump(mode="json")
    boards = build_boards(run.recipe.report_to, run.output_dir, config, is_resumed=run.first_step > 0)
    with closing(MetricsWriter(run.output_dir, run.num_steps, run.first_step, boards=boards)) as writer:
        for text in run.data.describe():
            writer.print(text)
        yield writer


def _train_steps(run: Run, writer: MetricsWriter | None, dumper: Dumper | None) -> Best | None:
    """All optimizer steps; ``writer`` is rank 0's. Returns the best checkpoint, where the recipe asks for one."""
    recipe = run.recipe
    sets = tuple(run.data.eval_loaders)
    best = load_best(run.output_dir, sets) if recipe.load_best_model_at_end and run.first_step else None
    meter = Meter(run.model, run.meshes, build_model_flops(run.model, spec_of(run.model)), run.router)
    steps = iter(run.data.loader)
    for step in range(run.first_step + 1, run.num_steps + 1):
        epoch, lr = run.data.loader.epoch + 1, float(run.scheduler.get_last_lr()[0])
        micro_batches = next(steps)
        meter.count(micro_batches)
        result = _one_step(run, step, micro_batches, dumper)
        if writer is not None:
            writer.advance(step)
        if _is_due(run, step, recipe.logging_steps):
            metrics = meter.measure(step, epoch, lr, result)
            if writer is not None:
                writer.write_step(metrics)
        is_best = False
        if run.data.eval_loaders and _is_due(run, step, recipe.eval_steps):
            held_out = evaluate_sets(run.model, run.data.eval_loaders, run.meshes)
            loss = held_out.loss
            if writer is not None:
                writer.write_eval(step, held_out)
            is_best = recipe.load_best_model_at_end and (loss < best.loss if best else math.isfinite(loss))
            best = Best(step=step, loss=loss, sets=sets) if is_best else best
            meter.restart()
        if is_best or _is_due(run, step, recipe.save_steps):
            _save(run, step, best)
            meter.restart()
    return best


def _save(run: Run, step: int, best: Best | None) -> None:
    """A checkpoint after ``step``; then the old ones go, but for the best."""
    folder = save_checkpoint(run.output_dir, run.state, step)
    if best is not None:
        save_best(run.output_dir, best)
    if run.recipe.save_total_limit is not None:
        kept = None if best is None else checkpoint_folder(run.output_dir, best.step)
        delete_old_checkpoints(run.output_dir, folder, run.recipe.save_total_limit, kept)


def _one_step(run: Run, step: int, micro_batches: list[Batch], dumper: Dumper | None) -> StepResult:
    device = torch.device(run.meshes.data.device_type)
    on_device = [shard_batch(batch, run.meshes).to(device) for batch in micro_batches]
    max_norm, before_clip = run.recipe.max_grad_norm, None
    if dumper is not None and dumper.is_due(step):
        before_clip = partial(dumper.save, step, "grad")
    result = train_step(
        run.model,
        on_device,
        run.optimizer,
        run.scheduler,
        run.meshes,
        max_norm,
        before_clip,
        run.router,
        gradient_accumulation=run.recipe.gradient_accumulation,
    )
    if not result.is_finite:
        raise NonFiniteError(
            f"step {step}: the gradient norm is {result.grad_norm}. No rank moved its weights, and nothing was saved; "
            "go on from the newest checkpoint (resume_from_checkpoint=auto), e.g. with a smaller learning_rate."
        )
    if dumper is not None and dumper.is_due(step):
        dumper.save(step, "param")
    return result


def _is_due(run: Run, step: int, every: int | None) -> bool:
    """Whether something happens after ``step``: every ``every`` steps where it is set, and always after the last."""
    return step == run.num_steps or (every is not None and step % every == 0)
