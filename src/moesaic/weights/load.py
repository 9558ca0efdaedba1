"""Load Hugging Face safetensors into a sharded model: each rank reads only the slices that it holds.

headers of all files (every rank, the same) -> which key fills what -> all problems at once -> slices, file by file
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.ops.placements import Block, local_blocks, local_shape
from moesaic.weights.agree import find_mesh, raise_together, state_tensors
from moesaic.weights.files import FileTensor
from moesaic.weights.quantized import Stored
from moesaic.weights.source import WeightSource, log_kept, match_folder, remember_source
from moesaic.weights.tiles import Grid, Read, plan_reads

# Gets (parameter's name, part of its local tensor, key, values of the part's shape).
Use = Callable[[str, torch.Tensor, str, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank read.

    Attributes:
        num_bytes_read: size of the slices read, in the files' dtypes, scales included.
        num_reads: slices read; of a quantised tensor one per slice, however many it takes.
        ignored_keys: keys in the files that fill nothing and that the model declares ignorable, or that are further
            names of tied parameters.
    """

    num_bytes_read: int
    num_reads: int
    ignored_keys: tuple[str, ...]


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str | Path) -> LoadReport:
    """Fill the parameters and persistent buffers of ``model``, in place, from the safetensors of ``folder``.

    Files may be named and laid out in any way that transformers reads for this family, or as the modules are; fp8 by
    blocks and MXFP4 are unpacked. Values are cast to each parameter's dtype. Parameters may be plain tensors or
    DTensors with any number of sharded axes; they must have storage (``materialize``) and, if tied, be tied. Nothing is
    sent between ranks but one flag at the end: where the model has DTensors, every rank of their meshes must call. The
    model remembers the folder: an export has the files' names and layout, and what they hold beside the model. A value
    model's head is filled from a classifier's ``score``; where the folder has none, it is 0.

    Raises:
        ValueError: no safetensors in ``folder``; or keys that are missing, mis-shaped, of a dtype that can't be cast,
            or unknown, all of them in one message, before anything is read; or tied tensors that differ in the files.
        RuntimeError: another rank failed.
    """
    state = state_tensors(model)
    error: Exception | None = None
    report: LoadReport | None = None
    source: WeightSource | None = None
    try:
        source = match_folder(model, Path(folder).absolute())
        report = _load(state, source)
    except Exception as problem:  # not swallowed: raised below, when the other ranks know of it
        error = problem
    raise_together(error, find_mesh(state.values()), f"loading {folder}")
    assert report is not None and source is not None
    remember_source(model, source)
    if not dist.is_initialized() or dist.get_rank() == 0:
        log_kept(source)
    return report


def _load(state: Mapping[str, torch.Tensor], source: WeightSource) -> LoadReport:
    blocks = {name: _blocks(name, tensor) for name, tensor in state.items()}
    for name in state.keys() - source.grids.keys():  # a new value head: every value is 0 at first
        state[name].zero_()

    def reads_of(name: str, grid: Grid) -> list[tuple[str, Read]]:
        return [(name, read) for block in blocks[name] for read in plan_reads(grid, block)]

    fill = [each for name, grid in source.grids.items() for each in reads_of(name, grid)]
    num_bytes = _run_reads(fill, source.stored, state, _fill)
    # A file that holds a tied tensor under both names is right only where the two agree.
    compare = [each for name, grid in source.doubled for each in reads_of(name, grid)]
    num_bytes += _run_reads(compare, source.stored, state, _require_equal)
    return LoadReport(num_bytes_read=num_bytes, num_reads=len(fill) + len(compare), ignored_keys=source.ignored_keys)


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
    reads: Sequence[tuple[str, Read]], stored: Mapping[str, Stored], state: Mapping[str, torch.Tensor], use: Use
) -> int:
    """Give each slice to ``use``, file by file: open at a time are one file and, where a quantised tensor's scales lie
    in another, that one. Number of bytes read."""
    reads_of_files: dict[tuple[Path, ...], list[tuple[str, Read]]] = defaultdict(list)
    for name, read in reads:
        tensor = stored[read.key]
        files = [tensor.values.file] if tensor.scales is None else [tensor.values.file, tensor.scales.file]
        # Unpacking takes several times the bytes of its values: a stack of experts goes one by one.
        is_packed_stack = tensor.scales is not None and len(read.source) > 2
        reads_of_files[tuple(dict.fromkeys(files))] += [
            (name, part) for part in (read.split() if is_packed_stack else [read])
        ]
    num_bytes = 0
    for files_open, its_reads in reads_of_files.items():
        with contextlib.ExitStack() as stack:
            reader = _Reader({file: stack.enter_context(safe_open(file, "pt", device="cpu")) for file in files_open})
            for name, read in its_reads:
                whole = state[name]
                local = whole.to_local() if isinstance(whole, DTensor) else whole
                # A slice is a view of the mapped file: only the pages that its use touches are read.
                values = stored[read.key].read(read.source, reader.take)
                use(name, local[read.dest], read.key, order_dims(values, read.dims))
            num_bytes += reader.num_bytes
    return num_bytes


class _Reader:
    """Takes slices out of open files, and counts their bytes."""

    def __init__(self, handles: Mapping[Path, Any]) -> None:
        self._handles = handles
        self.num_bytes = 0

    def take(self, tensor: FileTensor, source: tuple[range, ...]) -> torch.Tensor:
        """The values at ``source``, one range per dim."""
        index = tuple(slice(each.start, each.stop, each.step) for each in source)
        values: torch.Tensor = self._handles[tensor.file].get_slice(tensor.key)[index or ...]
        self.num_bytes += values.numel() * values.element_size()
        return values


def order_dims(values: torch.Tensor, dims: Sequence[int | None]) -> torch.Tensor:
    """A view of ``values`` with its dims in the order ``dims``, and a new dim of 1 for each None."""
    ordered = values.permute(*(dim for dim in dims if dim is not None)) if values.ndim else values
    return ordered[tuple(None if dim is None else slice(None) for dim in dims)] if dims else ordered


def _fill(name: str, part: torch.Tensor, key: str, values: torch.Tensor) -> None:
    part.copy_(values)


def _require_equal(name: str, part: torch.Tensor, key: str, values: torch.Tensor) -> None:
    if not torch.equal(part, values.to(part)):
        raise ValueError(
            f"{key} is tied to {name} by config.json, but the files hold both, with different values. "
            "Set tie_word_embeddings to false there, or drop the one that isn't meant."
        )
