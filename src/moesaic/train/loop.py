"""One rank's whole run: set up, step, log, evaluate, save, export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from moesaic.checkpoint import load_model, save_checkpoint
from moesaic.config import Fsdp2Config, MoesaicConfig, Recipe
from moesaic.config.run_folder import EXPORT
from moesaic.data.batch import Batch
from moesaic.runtime import shutdown
from moesaic.train.evaluate import evaluate
from moesaic.train.flops import build_model_flops
from moesaic.train.metrics import Meter, MetricsWriter
from moesaic.train.setup import DTYPES, Run, build_run, build_unloaded_model, spec_of, start
from moesaic.train.step import StepResult, train_step
from moesaic.train.warm_up import warm_up_collectives
from moesaic.weights.export import export_hf


class NonFiniteError(RuntimeError):
    """The gradients of a step are not finite. Raised on all ranks at the same step, which moved no weight."""


def train(recipe: Recipe) -> None:
    """Run a recipe to its end. Every rank must call it, after the recipe was checked for the number of ranks.

    The run's folder then holds ``recipe.yaml``, ``meshes.txt``, ``environment.json``, ``metrics.jsonl``,
    ``data_report.jsonl`` (samples left out), ``tensorboard/``, the checkpoints ``step-NNNNNN/`` and ``export/``: the
    trained model as Hugging Face safetensors, with its tokenizer.

    Raises:
        NonFiniteError: at once, on all ranks, without saving: the newest checkpoint is the last good one.
        ValueError: see ``build_run``.
    """
    run = build_run(recipe)
    warm_up_collectives(run.model, run.meshes)
    with _open_writer(run) as writer:
        _train_steps(run, writer)
    folder = run.output_dir / EXPORT
    if dist.get_rank() == 0 and folder.exists():  # only a resumed run finds one: its own, from before
        shutil.rmtree(folder)
    dist.barrier()
    _export(run.model, recipe, folder)
    shutdown()


def export_checkpoint(recipe: Recipe, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's weights as Hugging Face safetensors, with the tokenizer. Every rank must call it.

    Of ``recipe.model`` only the config and the tokenizer are read, none of the weights that training began with.

    Args:
        recipe: the saved run's; its topology is not used: weights are cut anew over the ranks there are.
    """
    sizes = {"dp_size": None, "mp_shard_size": None, "mp_replicate_size": 1, "cp_size": 1, "tp_size": 1}
    is_path_a = isinstance(recipe.dist_config, Fsdp2Config)
    dist_config = recipe.dist_config if is_path_a else MoesaicConfig(name="moesaic")
    recipe = recipe.model_copy(update={**sizes, "dist_config": dist_config})
    meshes = start(recipe)
    model = build_unloaded_model(recipe, meshes)
    load_model(checkpoint, model)
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
    with closing(MetricsWriter(run.output_dir, run.num_steps, run.first_step)) as writer:
        for report in run.data.reports:
            writer.print(str(report))
        yield writer


def _train_steps(run: Run, writer: MetricsWriter | None) -> None:
    """All optimizer steps; ``writer`` is rank 0's."""
    recipe = run.recipe
    meter = Meter(run.model, run.meshes, build_model_flops(run.model, spec_of(run.model)))
    steps = iter(run.data.loader)
    for step in range(run.first_step + 1, run.num_steps + 1):
        epoch, lr = run.data.loader.epoch + 1, float(run.scheduler.get_last_lr()[0])
        micro_batches = next(steps)
        meter.count(micro_batches)
        result = _one_step(run, step, micro_batches)
        if writer is not None:
            writer.advance(step)
        if _is_due(run, step, recipe.logging_steps):
            metrics = meter.measure(step, epoch, lr, result)
            if writer is not None:
                writer.write_step(metrics)
        if run.data.eval_loader is not None and _is_due(run, step, recipe.eval_steps):
            loss, num_loss_tokens = evaluate(run.model, run.data.eval_loader, run.meshes)
            if writer is not None:
                writer.write_eval(step, loss, num_loss_tokens)
            meter.restart()
        if _is_due(run, step, recipe.save_steps):
            save_checkpoint(run.output_dir, run.state, step, keep=recipe.save_total_limit)
            meter.restart()


def _one_step(run: Run, step: int, micro_batches: list[Batch]) -> StepResult:
    device = torch.device(run.meshes.data.device_type)
    on_device = [batch.to(device) for batch in micro_batches]
    result = train_step(run.model, on_device, run.optimizer, run.scheduler, run.meshes, run.recipe.max_grad_norm)
    if not result.is_finite:
        raise NonFiniteError(
            f"step {step}: the gradient norm is {result.grad_norm}. No rank moved its weights, and nothing was saved; "
            "go on from the newest checkpoint (resume_from_checkpoint=auto), e.g. with a smaller learning_rate."
        )
    return result


def _is_due(run: Run, step: int, every: int | None) -> bool:
    """Whether something happens after ``step``: every ``every`` steps where it is set, and always after the last."""
    return step == run.num_steps or (every is not None and step % every == 0)
