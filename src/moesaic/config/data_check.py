"""What a recipe's datasets must satisfy: files, formats, weights, streaming, batches by tokens. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from moesaic.config.problem import Problem
from moesaic.config.recipe import DatasetConfig, Recipe

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
# Files that hold one value: a stream would have to read all of it.
WHOLE_SUFFIXES = (".json", ".txt")
# Formats of prompts without an answer to learn; ``stage: rl`` reads these and no other.
PROMPT_FORMATS = ("prompt", "verl", "reasoning_gym")


def dataset_problems(recipe: Recipe) -> Iterable[Problem]:
    """Problems of each dataset, then of those that are used together."""
    for section, datasets in (("train_dataset", recipe.train_dataset), ("eval_dataset", recipe.eval_dataset)):
        for number, dataset in enumerate(datasets):
            name = section if len(datasets) == 1 else f"{section}[{number}]"
            yield from _source_problems(name, dataset, recipe.stage)
    yield from _same_problems(recipe.eval_dataset)


def mixing_problems(recipe: Recipe) -> Iterable[Problem]:
    """Weights and streaming of the training sets, which must be set for all or for none."""
    datasets = recipe.train_dataset
    if not datasets:
        yield Problem(
            field="train_dataset", value=[], rule="names no dataset", remedy="name one, or a list of at least one"
        )
        return
    with_weight = [dataset.weight is not None for dataset in datasets]
    if any(with_weight) and not all(with_weight):
        value = [dataset.weight for dataset in datasets]
        rule, remedy = "a share is relative to the others', and some have none", "set weight for all, or for none"
        yield Problem(field="train_dataset.weight", value=value, rule=rule, remedy=remedy)
    streaming = [dataset.streaming for dataset in datasets]
    if any(streaming):
        yield from _streaming_problems(recipe)


def token_batch_problems(recipe: Recipe) -> Iterable[Problem]:
    """What goes with ``micro_batch_tokens``: what it replaces, and sizes that it can hold."""
    budget, field = recipe.micro_batch_tokens, "micro_batch_tokens"
    if budget is None:
        return
    if recipe.packing:
        rule = "with micro_batch_tokens samples lie end to end anyhow, and no row has a set length"
        yield Problem(field="packing", value=True, rule=rule, remedy="remove packing, or micro_batch_tokens")
    if recipe.micro_batch_size != 1:
        rule, remedy = "micro_batch_tokens says how large a micro-batch is", "remove one of the two"
        yield Problem(field="micro_batch_size", value=recipe.micro_batch_size, rule=rule, remedy=remedy)
    if recipe.global_batch_size is None:
        rule, remedy = "micro_batch_tokens doesn't say how many samples a step has", "set global_batch_size"
        yield Problem(field="global_batch_size", value=None, rule=rule, remedy=remedy)
    if recipe.stage != "rl":  # where the longest sample is a role's affair (rl_role_check.py)
        yield from budget_problems(recipe, "a sample", "cutoff_len")
    if any(dataset.streaming for dataset in recipe.train_dataset):
        rule = "ranks share a step out by the lengths of all its samples, and a stream's aren't known"
        remedy = "remove streaming, or set packing: true with a micro_batch_size instead"
        yield Problem(field=field, value=budget, rule=rule, remedy=remedy)


def budget_problems(recipe: Recipe, what: str, limit: str) -> Iterable[Problem]:
    """``micro_batch_tokens`` that can't hold a sample of ``cutoff_len`` tokens, which ``limit`` sets."""
    budget, multiple = recipe.micro_batch_tokens, recipe.cp_size * recipe.tp_size
    if budget is not None and budget // multiple * multiple < recipe.cutoff_len:
        rounded = "" if multiple == 1 else f", in multiples of cp_size * tp_size = {multiple}"
        rule = f"{what} may have {limit} = {recipe.cutoff_len} tokens, and one micro-batch holds it whole{rounded}"
        least = -(-recipe.cutoff_len // multiple) * multiple
        remedy = f"set {least} or more, or a smaller {limit}"
        yield Problem(field="micro_batch_tokens", value=budget, rule=rule, remedy=remedy)


def _streaming_problems(recipe: Recipe) -> Iterable[Problem]:
    datasets = recipe.train_dataset
    field, value = "train_dataset.streaming", [dataset.streaming for dataset in datasets]
    if not all(value):
        rule, remedy = "datasets that are mixed are streamed all or not at all", "set it for all of them, or for none"
        yield Problem(field=field, value=value, rule=rule, remedy=remedy)
    if recipe.max_steps is None:
        rule, remedy = "a stream has no known end, so an epoch isn't known", "set max_steps"
        yield Problem(field=field, value=True, rule=rule, remedy=remedy)
    if len(datasets) > 1 and all(dataset.weight is None for dataset in datasets):
        rule, remedy = "the sizes of streams aren't known, so their shares must be", "set weight for each of them"
        yield Problem(field="train_dataset.weight", value=None, rule=rule, remedy=remedy)
    if len({dataset.buffer_size for dataset in datasets}) > 1:
        sizes = [dataset.buffer_size for dataset in datasets]
        rule, remedy = "streams that are mixed share one buffer", "set the same for all of them"
        yield Problem(field="train_dataset.buffer_size", value=sizes, rule=rule, remedy=remedy)
    for dataset in datasets:
        if dataset.streaming and dataset.path.endswith(WHOLE_SUFFIXES):
            rule = "a .json or .txt file is one value, which can't be streamed"
            yield Problem(field=field, value=dataset.path, rule=rule, remedy="write .jsonl or .parquet, or remove it")


def _source_problems(name: str, dataset: DatasetConfig, stage: str) -> Iterable[Problem]:
    """A path with a data file's ending must exist; anything else may be the name of a dataset, or of a task."""
    if dataset.path.endswith(DATA_SUFFIXES) and not Path(dataset.path).is_file():
        rule = f"no such file (seen from {Path.cwd()})"
        yield Problem(field=name, value=dataset.path, rule=rule, remedy="correct the path, or make the file first")
    is_text = dataset.format == "text" or dataset.path.endswith(".txt")
    field, value = f"{name}.format", dataset.format
    if stage == "pt" and dataset.format not in ("auto", "text"):
        kind = "prompts" if dataset.format in PROMPT_FORMATS else "conversations"
        rule = f"stage: pt reads plain text, and {dataset.format} is a format of {kind}"
        yield Problem(field=field, value=value, rule=rule, remedy="set text, or stage: sft")
    elif stage == "sft" and is_text:
        rule = "plain text has no turns to train on under stage: sft"
        yield Problem(field=field, value=value, rule=rule, remedy="set stage: pt, or other data")
    elif stage == "sft" and dataset.format in PROMPT_FORMATS:
        rule = f"{dataset.format} holds prompts without the answers that stage: sft trains on"
        yield Problem(field=field, value=value, rule=rule, remedy="set stage: rl, or another format")
    elif stage == "rl" and (is_text or dataset.format not in ("auto", *PROMPT_FORMATS)):
        rule = f"stage: rl reads prompts, and {'plain text' if is_text else dataset.format} holds none"
        remedy = f"set one of {', '.join(PROMPT_FORMATS)}, with data of that form"
        yield Problem(field=field, value=value, rule=rule, remedy=remedy)
    yield from _task_problems(name, dataset)


def _task_problems(name: str, dataset: DatasetConfig) -> Iterable[Problem]:
    """Rows are made by a task, and then so many; or they are read."""
    if dataset.format == "reasoning_gym":
        if dataset.size is None:
            rule, remedy = "a task makes as many rows as it is told", "set how many"
            yield Problem(field=f"{name}.size", value=None, rule=rule, remedy=remedy)
        return
    for key, value in (("size", dataset.size), ("options", dataset.options or None)):
        if value is not None:
            rule = "rows are read, not made: it counts for format: reasoning_gym alone"
            yield Problem(field=f"{name}.{key}", value=value, rule=rule, remedy="remove it, or set that format")


def _same_problems(datasets: Sequence[DatasetConfig]) -> Iterable[Problem]:
    read = [dataset for dataset in datasets if dataset.format != "reasoning_gym"]
    for (path, split), count in Counter((dataset.path, dataset.split) for dataset in read).items():
        if count > 1:
            rule, remedy = f"split {split} of it is named {count} times", "keep one of them"
            yield Problem(field="eval_dataset", value=path, rule=rule, remedy=remedy)
