"""A run's samples: datasets as the recipe names them, their loaders, and the report of what became of every row."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, PreTrainedTokenizerBase

from moesaic.config import DatasetConfig, Recipe, num_micro_batches
from moesaic.data import (
    BatchLoader,
    DataReport,
    EvalLoader,
    MixedDataset,
    StreamedBadSample,
    StreamLoader,
    StreamSource,
    TokenBatchLoader,
    TokenEvalLoader,
    TokenizedDataset,
    build_dataset,
    build_stream_source,
    choose_pad_token_id,
)
from moesaic.data.encode import Stage
from moesaic.meshes import Meshes

log = logging.getLogger(__name__)

NUM_LOGGED = 20
"""Bad samples of a stream that a rank's log names; the report has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The samples of a run.

    Attributes:
        loader: what is trained on.
        eval_loaders: held-out sets by name, none or more.
        train_reports, eval_reports: what became of every row; none for streams, which aren't read ahead.
        mixture: samples of each training set in an epoch; empty for a single set and for streams.
        streams: the training sets, where they are streamed.
    """

    loader: BatchLoader | TokenBatchLoader | StreamLoader
    eval_loaders: Mapping[str, EvalLoader | TokenEvalLoader]
    train_reports: tuple[DataReport, ...]
    eval_reports: tuple[DataReport, ...]
    mixture: tuple[int, ...] = ()
    streams: tuple[StreamSource, ...] = ()

    def describe(self) -> list[str]:
        """The reports as text, and the mixture."""
        lines = [str(report) for report in (*self.train_reports, *self.streams, *self.eval_reports)]
        if self.mixture:
            pairs = zip(self.train_reports, self.mixture, strict=True)
            parts = [f"{count} of {report.source} (has {report.num_samples})" for report, count in pairs]
            lines.append(f"an epoch is {sum(self.mixture)} samples: {', '.join(parts)}")
        return lines


def build_data(recipe: Recipe, meshes: Meshes, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """Samples and their loaders, for this rank's place on the dp axis. Not collective."""
    assert recipe.stage in ("sft", "pt"), recipe.stage
    stage: Stage = recipe.stage
    sizes = meshes.sizes
    common: dict[str, Any] = {
        "dp_rank": meshes.data.get_local_rank("dp"),
        "dp_size": sizes.dp_size,
        "cutoff_len": recipe.cutoff_len,
        "pad_token_id": choose_pad_token_id(tokenizer),
        "pad_to_multiple_of": sizes.cp_size * sizes.tp_size,
    }
    by_tokens = recipe.micro_batch_tokens is not None
    if by_tokens:
        common |= {"micro_batch_tokens": recipe.micro_batch_tokens}
        global_batch_size = recipe.global_batch_size
    else:
        common |= {"micro_batch_size": recipe.micro_batch_size, "packing": recipe.packing}
        global_batch_size = recipe.micro_batch_size * sizes.dp_size * num_micro_batches(recipe, sizes)
    training = common | {"global_batch_size": global_batch_size, "seed": recipe.seed}
    eval_loaders: dict[str, EvalLoader | TokenEvalLoader] = {}
    eval_reports = []
    for name, config in zip(eval_names(recipe.eval_dataset), recipe.eval_dataset, strict=True):
        dataset, report = _build_dataset(config, tokenizer, recipe, stage)
        eval_loaders[name] = (TokenEvalLoader if by_tokens else EvalLoader)(dataset, **common)
        eval_reports.append(report)
    if any(config.streaming for config in recipe.train_dataset):
        streams = _build_streams(recipe, tokenizer, stage)
        buffer_size = max(config.buffer_size for config in recipe.train_dataset)
        write = _bad_sample_writer(recipe, meshes)
        return RunData(
            loader=StreamLoader(streams, buffer_size=buffer_size, stage=stage, on_bad_sample=write, **training),
            eval_loaders=eval_loaders,
            train_reports=(),
            eval_reports=tuple(eval_reports),
            streams=streams,
        )
    built = [_build_dataset(config, tokenizer, recipe, stage) for config in recipe.train_dataset]
    mixed = MixedDataset([dataset for dataset, _ in built], _weights(recipe), recipe.seed)
    return RunData(
        loader=(TokenBatchLoader if by_tokens else BatchLoader)(built[0][0] if len(built) == 1 else mixed, **training),
        eval_loaders=eval_loaders,
        train_reports=tuple(report for _, report in built),
        eval_reports=tuple(eval_reports),
        mixture=mixed.counts if len(built) > 1 else (),
    )


def eval_names(configs: Sequence[DatasetConfig]) -> list[str]:
    """What held-out sets are called in metrics: their paths, with the split where a path comes twice."""
    paths = [config.path for config in configs]
    return [config.path if paths.count(config.path) == 1 else f"{config.path}:{config.split}" for config in configs]


def save_data_report(recipe: Recipe, data: RunData) -> None:
    """On rank 0, name every sample that is left out in ``data_report.jsonl``, a line each; logs name only the first.

    Streams write theirs while they are read (``data_report_<rank>.jsonl``).
    """
    if dist.get_rank() != 0:
        return
    lines = [
        json.dumps({"dataset": dataset, "source": report.source, "index": bad.index, "reason": bad.reason})
        for dataset, reports in (("train_dataset", data.train_reports), ("eval_dataset", data.eval_reports))
        for report in reports
        for bad in report.bad
    ]
    text = "".join(f"{line}\n" for line in lines)
    (Path(recipe.output_dir) / "data_report.jsonl").write_text(text, encoding="utf-8")


def _weights(recipe: Recipe) -> list[float] | None:
    """The recipe's checks have it that all have one, or none."""
    weights = [config.weight for config in recipe.train_dataset if config.weight is not None]
    return weights or None


def _build_dataset(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, stage: Stage
) -> tuple[TokenizedDataset, DataReport]:
    dataset, report = build_dataset(
        config.path, tokenizer, recipe.cutoff_len, stage=stage, split=config.split, format_name=config.format
    )
    vocab_size = AutoConfig.from_pretrained(recipe.model).get_text_config().vocab_size
    largest = max((max(sample.input_ids) for sample in dataset.samples), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"{config.path}: token {largest} is beyond the model's vocabulary of {vocab_size}: the tokenizer in "
            f"{recipe.model} is of another model, or has grown. Put the model's own there, or resize its embeddings."
        )
    return dataset, report


def _build_streams(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, stage: Stage) -> tuple[StreamSource, ...]:
    return tuple(
        build_stream_source(
            config.path,
            tokenizer,
            recipe.cutoff_len,
            stage=stage,
            split=config.split,
            format_name=config.format,
            weight=config.weight or 1.0,
        )
        for config in recipe.train_dataset
    )


def _bad_sample_writer(recipe: Recipe, meshes: Meshes) -> Callable[[StreamedBadSample], None]:
    """Appends to this rank's report, and logs the first. One of the ranks that are given the same samples does it.

    A file per rank: appends to one shared file could be torn on a network file system.
    """
    # Where rows of batches are made of several (``data/streaming.py``), the dp ranks all tokenize the same, too.
    axes = ("dp", "cp", "tp") if recipe.packing or recipe.stage == "pt" else ("cp", "tp")
    is_first = all(meshes.data.get_local_rank(axis) == 0 for axis in axes)
    path = Path(recipe.output_dir) / f"data_report_{dist.get_rank()}.jsonl"
    count = 0

    def write(bad: StreamedBadSample) -> None:
        nonlocal count
        if not is_first:
            return
        count += 1
        line = {"dataset": "train_dataset", "source": bad.source, "index": bad.index, "reason": bad.reason}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if count <= NUM_LOGGED:
            log.warning("bad sample %d, %s row %d: %s", count, bad.source, bad.index, bad.reason)

    return write
