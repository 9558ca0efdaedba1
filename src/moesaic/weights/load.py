"""Load Hugging Face safetensors into a sharded model: each rank reads only the slices that it holds.

headers of all files (every rank, the same) -> which key fills what -> all problems at once -> slices, file by file
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.ops.placements import Block, local_blocks, local_shape
from moesaic.specs import ModelSpec
from moesaic.weights.agree import find_mesh, raise_together, state_tensors, tied_names
from moesaic.weights.family import choose_spec
from moesaic.weights.keys import HubTensor, Read, find_hub_tensors, hub_tensors, plan_reads

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What may be cast to a parameter's dtype as it is. Quantised files need their scales and are not of this kind.
CASTABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank read.

    Attributes:
        num_bytes_read: size of the slices read, in the files' dtypes.
        num_reads: slices read.
        ignored_keys: keys in the files that fill nothing and that the model declares ignorable.
    """

    num_bytes_read: int
    num_reads: int
    ignored_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """What a safetensors header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str | Path, spec: ModelSpec | None = None) -> LoadReport:
    """Fill the parameters and persistent buffers of ``model``, in place, from the safetensors of ``folder``.

    Values are cast to each parameter's dtype. Parameters may be plain tensors or DTensors with any number of sharded
    axes; they must have storage (``materialize``) and, if tied, be tied. Nothing is sent between ranks but one flag at
    the end: where the model has DTensors, every rank of their meshes must call.

    Args:
        spec: how the Hub names and stores experts; default: the registered one of the config's ``model_type``. Without
            either, every tensor must be there under the module's own name.

    Raises:
        ValueError: no safetensors in ``folder``; or keys that are missing, mis-shaped, of a dtype that can't be cast,
            or unknown, all of them in one message, before anything is read; or tied tensors that differ in the files.
        RuntimeError: another rank failed.
    """
    state = state_tensors(model)
    error: Exception | None = None
    report: LoadReport | None = None
    try:
        report = _load(model, state, Path(folder), choose_spec(model, spec))
    except Exception as problem:  # not swallowed: raised below, when the other ranks know of it
        error = problem
    raise_together(error, find_mesh(state.values()), f"loading {folder}")
    assert report is not None
    return report


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Key -> its file, shape and dtype, for all tensors of a folder (one file, or an index and its files).

    Raises:
        ValueError: there is no safetensors file, or the index names a file or a key that isn't there.
    """
    if (folder / SINGLE_FILE).is_file():
        expected, files = {}, [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        expected = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in dict.fromkeys(expected.values())]
    else:
        raise ValueError(
            f"model={str(folder)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors "
            "only. Give a complete model folder, or convert it with transformers' save_pretrained."
        )
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        raise ValueError(f"model={str(folder)!r}: {INDEX_FILE} names files that aren't there: {lost}. Download them.")
    headers: dict[str, FileTensor] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as handle:
            for key in handle.keys():
                entry = handle.get_slice(key)
                headers[key] = FileTensor(file=file, shape=tuple(entry.get_shape()), dtype=entry.get_dtype())
    lost = [key for key, name in expected.items() if key not in headers or headers[key].file.name != name]
    if lost:
        raise ValueError(
            f"model={str(folder)!r}: {INDEX_FILE} names keys that its files don't hold: {lost}. Download again."
        )
    return headers


def _load(model: PreTrainedModel, state: dict[str, torch.Tensor], folder: Path, spec: ModelSpec | None) -> LoadReport:
    headers = read_headers(folder)
    aliases = tied_names(model, model.all_tied_weights_keys)
    tilings: dict[str, list[HubTensor]] = {}
    for name, tensor in state.items():
        tiling = find_hub_tensors(name, tensor.shape, spec, headers)
        for alias in aliases.get(name, ()):  # a file may hold a tied tensor under another of its names only
            if not all(part.key in headers for part in tiling):
                tiling = find_hub_tensors(alias, tensor.shape, spec, headers)
        tilings[name] = tiling
    ignored = _check(model, folder, state, tilings, headers, aliases, _remedy(model, spec))
    blocks = {name: _blocks(name, tensor) for name, tensor in state.items()}
    fill = [
        (name, read) for name, held in blocks.items() for block in held for read in plan_reads(tilings[name], block)
    ]
    num_bytes = _run_reads(fill, headers, state, _fill)
    # A file that holds a tied tensor under both names is right only where the two agree.
    doubled = [(name, alias) for name, names in aliases.items() for alias in names if alias in ignored]
    compare = [
        (name, read)
        for name, alias in doubled
        for block in blocks[name]
        for read in plan_reads(hub_tensors(alias, state[name].shape, None), block)
    ]
    num_bytes += _run_reads(compare, headers, state, _require_equal)
    return LoadReport(num_bytes_read=num_bytes, num_reads=len(fill) + len(compare), ignored_keys=ignored)


def _check(
    model: PreTrainedModel,
    folder: Path,
    state: Mapping[str, torch.Tensor],
    tilings: Mapping[str, Sequence[HubTensor]],
    headers: Mapping[str, FileTensor],
    aliases: Mapping[str, Sequence[str]],
    remedy: str,
) -> tuple[str, ...]:
    """The keys that may be ignored. ``remedy`` ends the error's message.

    Raises:
        ValueError: all that is wrong.
    """
    problems: list[str] = []
    used: set[str] = set()
    for name, tiling in tilings.items():
        for part in tiling:
            used.add(part.key)
            found = headers.get(part.key)
            if found is None:
                problems.append(f"missing: {part.key} {list(part.shape)} (for {name})")
            elif found.shape != part.shape:
                problems.append(f"shape: {part.key} is {list(found.shape)}, {name} needs {list(part.shape)}")
            elif state[name].is_floating_point() and found.dtype not in CASTABLE_DTYPES:
                problems.append(f"dtype: {part.key} is {found.dtype}, {name} needs one of {sorted(CASTABLE_DTYPES)}")
    ignorable = _ignorable_pattern(model)
    known_aliases = {
        alias
        for name, names in aliases.items()
        for alias in names
        if alias in headers and headers[alias].shape == tuple(state[name].shape)
    }
    unused = [key for key in headers if key not in used]
    unknown = [key for key in unused if key not in known_aliases and not (ignorable and ignorable.search(key))]
    problems += [f"unknown: {key} {list(headers[key].shape)} fills nothing" for key in unknown]
    if problems:
        raise ValueError(
            f"model={str(folder)!r} doesn't fit {type(model).__name__}; every weight must be there once, in the "
            f"right shape, and be used. {len(problems)} problems:\n  " + "\n  ".join(problems) + f"\n{remedy}"
        )
    return tuple(unused)


def _remedy(model: PreTrainedModel, spec: ModelSpec | None) -> str:
    if spec is not None:
        return f"Give the folder that belongs to this config.json, or correct the family's ModelSpec ({spec.name})."
    return (
        f"model_type={model.config.model_type!r} has no spec, so each tensor was looked for under the module's own "
        "name. Where the files store experts one by one, or under other names, describe the family with "
        "moesaic.register_spec(ModelSpec(...)); else give the folder that belongs to this config.json."
    )


def _ignorable_pattern(model: PreTrainedModel) -> re.Pattern[str] | None:
    """What the Hugging Face class declares ignorable, and buffers that old files hold and newer modules compute."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq$")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None


def _blocks(name: str, tensor: torch.Tensor) -> tuple[Block, ...]:
    """What the calling rank holds of a parameter or buffer."""
    assert not tensor.is_meta, f"{name} has no storage: call materialize() first"
    if not isinstance(tensor, DTensor):
        origin = (0,) * tensor.ndim
        return (Block(origin, origin, tuple(tensor.shape)),) if tensor.numel() else ()
    blocks = local_blocks(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if blocks or local.numel():
        held = local_shape(blocks, tensor.ndim)
        assert held == tuple(local.shape), f"{name}: {tensor.placements} give {held}, the local tensor is {local.shape}"
    return blocks


def _run_reads(
    reads: Sequence[tuple[str, Read]],
    headers: Mapping[str, FileTensor],
    state: Mapping[str, torch.Tensor],
    use: Callable[[str, torch.Tensor, str, torch.Tensor], None],
) -> int:
    """Give each slice to ``use(name, part of the local tensor, key, slice)``, file by file: one file is open at a time.
    Number of bytes read."""
    reads_of_file: dict[Path, list[tuple[str, Read]]] = defaultdict(list)
    for name, read in reads:
        reads_of_file[headers[read.key].file].append((name, read))
    num_bytes = 0
    for file, its_reads in reads_of_file.items():
        with safe_open(file, framework="pt", device="cpu") as handle:
            for name, read in its_reads:
                tensor = state[name]
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                # A slice is a view of the mapped file: only the pages that its use touches are read.
                value = handle.get_slice(read.key)[read.source or ...]
                num_bytes += value.numel() * value.element_size()
                use(name, local[read.dest], read.key, value)
    return num_bytes


def _fill(name: str, part: torch.Tensor, key: str, value: torch.Tensor) -> None:
    part.copy_(value)


def _require_equal(name: str, part: torch.Tensor, key: str, value: torch.Tensor) -> None:
    if not torch.equal(part, value.to(part)):
        raise ValueError(
            f"{key} is tied to {name} by config.json, but the files hold both, with different values. "
            "Set tie_word_embeddings to false there, or drop the one that isn't meant."
        )
