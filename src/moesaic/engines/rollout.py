"""``moesaic rollout``: a quick look at what a model answers, with any engine.

All that can be wrong with the request is found before weights are read: prompts, options, tokenizer, lengths.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO, cast, get_args

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from moesaic.config.load import load_saved_recipe
from moesaic.config.run_folder import is_complete
from moesaic.engines.base import Completion, Engine, Sampling, derive_seed
from moesaic.engines.prompts import Prompt, encode, own_stops, read_prompts
from moesaic.runtime import current_device, device_type, run_alone
from moesaic.weights.files import find_weights

EngineName = Literal["hf", "vllm", "sglang"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Room of a vLLM server on a CPU for keys and values.
CPU_KV_CACHE_GIB = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What to generate.

    Attributes:
        model: a model folder, or a checkpoint of a run, which is exported to a temporary folder first.
        prompts: see ``read_prompts``.
        out: new JSONL file; None: stdout.
        engine: which one generates.
        sampling: how; ``stop_token_ids`` are filled in from ``stops`` and the model's own end of text.
        stops: texts of one token, or token ids, that end a completion.
        ignore_end: the model's own end of text doesn't.
        limit: so many prompts.
        is_chat: prompts that are text are users' turns.
        with_tokens: write token ids and log-probabilities too.
        dtype: of the weights; ``auto``: as in the files.
        batch_size: prompts that the engine gets at a time; what is done is written then.
        tp_size: processes of a server's engine.
    """

    model: Path
    prompts: Path
    out: Path | None
    engine: EngineName
    sampling: Sampling
    stops: tuple[str, ...] = ()
    ignore_end: bool = False
    limit: int | None = None
    is_chat: bool = False
    with_tokens: bool = False
    dtype: str = "auto"
    batch_size: int = 32
    tp_size: int = 1


def rollout(options: RolloutOptions) -> int:
    """Generate and write, one JSON object per completion, as batches of prompts are done. Number of completions.

    Raises:
        ValueError: bad input, before weights are read; or a checkpoint that can't be exported.
    """
    _check(options)
    prompts = read_prompts(options.prompts, limit=options.limit, is_chat=options.is_chat)
    source = options.model
    if is_complete(options.model):
        source = Path(load_saved_recipe(options.model.absolute().parent / "recipe.yaml").model)
    tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(str(source), local_files_only=True))
    encoded = encode(prompts, tokenizer)
    _check_lengths(source, encoded)
    stops = _find_stops(options, tokenizer, source)
    options = replace(options, sampling=replace(options.sampling, stop_token_ids=stops))
    with ExitStack() as stack:
        out = stack.enter_context(_open_out(options.out))
        folder = stack.enter_context(_as_folder(options.model))
        engine = stack.enter_context(closing(ENGINES[options.engine](options, folder)))
        advance = stack.enter_context(_bar(len(prompts)))
        count = 0
        for batch in _generate(engine, encoded, options):
            for index, sample, completion in batch:
                row = _row(index, sample, prompts[index], completion, tokenizer, options.with_tokens)
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
            out.flush()
            advance(len({index for index, _, _ in batch}))
    return count


def _generate(
    engine: Engine, encoded: Sequence[list[int]], options: RolloutOptions
) -> Iterator[list[tuple[int, int, Completion]]]:
    seed = options.sampling.seed
    assert not isinstance(seed, tuple), "one for all prompts"
    seed = secrets.randbits(63) if seed is None else seed
    for first in range(0, len(encoded), options.batch_size):
        batch = encoded[first : first + options.batch_size]
        # Of each prompt's own index: the same in batches of any size.
        seeds = tuple(derive_seed(seed, first + offset) for offset in range(len(batch)))
        groups = engine.generate(batch, replace(options.sampling, seed=seeds))
        yield [
            (first + offset, sample, completion)
            for offset, group in enumerate(groups)
            for sample, completion in enumerate(group)
        ]


def _row(
    index: int,
    sample: int,
    prompt: Prompt,
    completion: Completion,
    tokenizer: PreTrainedTokenizerBase,
    with_tokens: bool,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": index,
        "sample": sample,
        "prompt": prompt.asked,
        "completion": tokenizer.decode(completion.tokens, skip_special_tokens=True),
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.tokens),
        "mean_logprob": sum(completion.logprobs) / len(completion.logprobs) if completion.logprobs else None,
    }
    if with_tokens:
        row |= {"tokens": completion.tokens, "logprobs": completion.logprobs}
    return row


def _check(options: RolloutOptions) -> None:
    problems = []
    if options.engine not in get_args(EngineName):
        problems.append(f"engine={options.engine!r}: one of {', '.join(get_args(EngineName))}")
    elif options.engine != "hf" and importlib.util.find_spec(options.engine) is None:
        problems.append(
            f"engine={options.engine!r}: isn't installed; pip install 'moesaic[{options.engine}]', or use hf"
        )
    if options.engine == "hf" and options.tp_size > 1:
        problems.append(f"tp_size={options.tp_size}: hf runs in one process; use vllm, or leave it out")
    if options.dtype not in DTYPES:
        problems.append(f"dtype={options.dtype!r}: one of {', '.join(DTYPES)}")
    if options.batch_size < 1:
        problems.append(f"batch_size={options.batch_size}: at least 1")
    if options.limit is not None and options.limit < 1:
        problems.append(f"limit={options.limit}: at least 1, or leave it out")
    if options.out is not None and options.out.exists():
        problems.append(f"out={str(options.out)!r}: exists, and nothing is overwritten; name another file or remove it")
    elif options.out is not None and not options.out.absolute().parent.is_dir():
        problems.append(f"out={str(options.out)!r}: its folder doesn't exist; make it first")
    if not is_complete(options.model) and not (
        (options.model / "config.json").is_file() and find_weights(options.model)
    ):
        problems.append(
            f"model={str(options.model)!r}: neither a model folder (config.json and safetensors) nor a complete "
            "checkpoint of a run (step-NNNNNN)"
        )
    if problems:
        raise ValueError(".\n".join(problems) + ".")


def _check_lengths(source: Path, encoded: Sequence[Sequence[int]]) -> None:
    config = AutoConfig.from_pretrained(str(source), local_files_only=True).get_text_config()
    longest = max(range(len(encoded)), key=lambda index: len(encoded[index]))
    limit = config.max_position_embeddings
    if len(encoded[longest]) >= limit:
        raise ValueError(
            f"prompt {longest + 1} has {len(encoded[longest])} tokens, and the model's sequences at most {limit}, "
            "completion included; shorten it."
        )


def _find_stops(options: RolloutOptions, tokenizer: PreTrainedTokenizerBase, source: Path) -> tuple[int, ...]:
    """Those asked for; and the model's own, as its generation settings and its tokenizer say."""
    stops: list[int] = []
    for text in options.stops:
        ids = [int(text)] if text.isdecimal() else tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or ids[0] >= len(tokenizer):
            raise ValueError(f"stop={text!r}: is {len(ids)} tokens ({ids}) here; a stop is one token, or a token's id.")
        stops += ids
    if not options.ignore_end:
        stops += own_stops(tokenizer, source)
    return tuple(dict.fromkeys(stops))


@contextmanager
def _as_folder(model: Path) -> Iterator[Path]:
    """The model's folder; of a checkpoint, a temporary export."""
    if not is_complete(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="moesaic-rollout-") as folder:
        out = Path(folder) / "model"
        run_alone(["-m", "moesaic.cli", "export", str(model), str(out)])
        yield out


@contextmanager
def _open_out(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with path.open("x", encoding="utf-8") as file:
        yield file


@contextmanager
def _bar(num_prompts: int) -> Iterator[Callable[[int], None]]:
    """A bar of prompts, on stderr, where that is a terminal."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn("prompts"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("rollout", total=num_prompts)
        yield lambda count: progress.advance(task, count)


def _open_hf(options: RolloutOptions, folder: Path) -> Engine:
    from moesaic.engines.hf import HfEngine

    return HfEngine.load(folder, dtype=options.dtype, device=current_device())


def _open_vllm(options: RolloutOptions, folder: Path) -> Engine:
    from moesaic.engines.vllm import VllmServer
    from moesaic.engines.vllm_server import ServerOptions

    # On a CPU vLLM would take 92% of the machine's memory for keys and values, and not start where less is free.
    kv_cache_gib = CPU_KV_CACHE_GIB if device_type() == "cpu" else None
    server = ServerOptions(model=str(folder), dtype=options.dtype, tp_size=options.tp_size, kv_cache_gib=kv_cache_gib)
    return VllmServer.start(server, {}, log=_new_log(options.engine))


def _open_sglang(options: RolloutOptions, folder: Path) -> Engine:
    from moesaic.engines.sglang import SglangServer
    from moesaic.engines.sglang_server import SglangOptions

    server = SglangOptions(model=str(folder), dtype=options.dtype, tp_size=options.tp_size, seeds=True)
    return SglangServer.start(server, {}, log=_new_log(options.engine))


def _new_log(engine: str) -> Path:
    """Of a server; it stays, for a look at what went wrong."""
    handle, name = tempfile.mkstemp(prefix=f"moesaic-{engine}-", suffix=".log")
    os.close(handle)
    return Path(name)


ENGINES: Mapping[str, Callable[[RolloutOptions, Path], Engine]] = {
    "hf": _open_hf,
    "vllm": _open_vllm,
    "sglang": _open_sglang,
}
