"""Write a sharded model as Hugging Face safetensors, in the Hub's own keys; no rank ever holds more than one parameter.

plan (export_plan.py, the same on every rank): parameter -> shares -> entries of files, each file with one writer
run, parameter by parameter: holders send their shards to the share's writer, which appends its entries to its file
finish, by the first rank: index, configs, tokenizer, rename
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.model.build import find_fp32_names
from moesaic.model.tokenizer_files import copy_tokenizer
from moesaic.ops.placements import local_shape
from moesaic.specs import ModelSpec
from moesaic.weights.agree import find_mesh, raise_together, state_tensors
from moesaic.weights.export_plan import ExportPlan, FilePlan, Share, build_shares, plan_export
from moesaic.weights.family import require_spec
from moesaic.weights.keys import HubTensor

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@torch.no_grad()
def export_hf(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    spec: ModelSpec | None = None,
    max_shard_gib: float = 4.0,
    dtype: torch.dtype | None = None,
    tokenizer_folder: str | Path | None = None,
) -> None:
    """Write ``model`` to ``folder`` so that plain ``from_pretrained`` loads it.

    Written to ``<folder>.tmp`` beside and renamed when complete. Every rank of the model's meshes must call, outside
    forward and backward, and see the same file system. Shards travel by point-to-point messages in the default group. A
    model without DTensors is written by the calling process alone: call on one rank.

    Args:
        spec: how the Hub names and stores experts; default: the registered one of the config's ``model_type``. A model
            without stacked experts needs none: every tensor is written under the module's own name.
        max_shard_gib: limit of a file, unless one tensor is larger; files may be smaller.
        dtype: cast floating-point weights to it (what the family keeps in fp32 stays); default: as they are.
        tokenizer_folder: copy the tokenizer's files from there.

    Raises:
        ValueError: ``folder`` isn't empty, or the family has stacked experts and no spec; before anything is sent.
        RuntimeError: another rank failed; nothing was renamed.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"folder={str(folder)!r} isn't empty; an export never overwrites. Name another folder or remove it."
        )
    if max_shard_gib <= 0:
        raise ValueError(
            f"max_shard_gib={max_shard_gib} must be above 0; give the size of a file in GiB, for example 4.0."
        )
    spec = require_spec(model, spec)
    left_out = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in state_tensors(model).items() if name not in left_out}
    mesh = find_mesh(state.values())
    rank = 0 if mesh is None else dist.get_rank()
    ranks: list[int] = [0] if mesh is None else mesh.mesh.flatten().tolist()
    root = ranks[0]
    shares = build_shares(state, spec, _file_dtypes(model, state, dtype), ranks)
    plan = plan_export(shares, max_file_bytes=int(max_shard_gib * 2**30))

    beside = folder.with_name(folder.name + ".tmp")
    error = _attempt(_make_empty, beside) if rank == root else None
    raise_together(error, mesh, f"exporting to {folder}")
    raise_together(_run(plan, state, beside, rank), mesh, f"exporting to {folder}")
    if rank == root:
        tokenizer = None if tokenizer_folder is None else Path(tokenizer_folder)
        error = _attempt(_finish, model, plan, beside, folder, dtype, tokenizer)
    raise_together(error, mesh, f"exporting to {folder}")


def gather_share(share: Share, local: torch.Tensor, writer: int, rank: int, device: str) -> torch.Tensor | None:
    """The share's box on ``writer``, ``None`` elsewhere. Holders and the writer must call (others may): a holder sends
    its whole ``local`` tensor through the default group, the writer receives from one holder after the other.

    Shapes: ``local`` as the rank's shard; result ``share.size``, in ``share.dtype``.
    """
    if rank != writer:
        if any(rank == holder for holder, _ in share.holders):
            dist.send(_as_bytes(local.to(device=device, dtype=share.dtype)), dst=writer)
        return None
    if len(share.holders) == 1 and share.holders[0][0] == rank:
        return local.to(share.dtype)
    box = torch.empty(share.size, dtype=share.dtype, device=device)
    for holder, blocks in share.holders:
        if holder == rank:
            received = local
        else:
            shape = local_shape(blocks, len(share.size))
            received = torch.empty(shape, dtype=share.dtype, device=device)
            dist.recv(_as_bytes(received), src=holder)
        for block in blocks:
            where = zip(block.global_slices, share.offset, strict=True)
            box[tuple(slice(part.start - start, part.stop - start) for part, start in where)] = received[
                block.local_slices
            ]
    return box


def _run(plan: ExportPlan, state: Mapping[str, torch.Tensor], folder: Path, rank: int) -> Exception | None:
    """Gather and write all that this rank takes part in. A failure to write is returned, not raised: this rank still
    receives what the others send, so that none of them waits for ever."""
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        writers = {
            index: stack.enter_context(contextlib.closing(FileWriter(folder / plan.file_name(index), file)))
            for index, file in enumerate(plan.files)
            if file.writer == rank
        }
        for share, indices in plan.steps:
            problem = _write_share(share, indices, state[share.name], plan.files[indices[0]].writer, rank, writers)
            error = error or problem
    return error


def _write_share(
    share: Share,
    indices: Sequence[int],
    tensor: torch.Tensor,
    writer: int,
    rank: int,
    writers: Mapping[int, FileWriter],
) -> OSError | None:
    """One step of the plan. A function of its own so that the gathered box is freed before the next is made."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    box = gather_share(share, local, writer, rank, device)
    if box is None:
        return None
    try:
        for entry, index in zip(share.entries, indices, strict=True):
            part = box[_entry_slices(entry, share)].reshape(entry.shape)
            writers[index].append(_as_bytes(part).cpu().numpy().data)
    except OSError as problem:
        return problem
    return None


class FileWriter:
    """Writes one safetensors file, tensor behind tensor, and is open only from its first to its last."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self._path = path
        self._plan = plan
        self._num_left = len(plan.tensors)
        self._file: BinaryIO | None = None

    def append(self, data: memoryview) -> None:
        """The next tensor of the plan, as bytes."""
        if self._file is None:
            self._file = self._path.open("wb")
            self._file.write(_header(self._plan))
        self._file.write(data)
        self._num_left -= 1
        if not self._num_left:
            self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _header(file: FilePlan) -> bytes:
    """What precedes the data of a safetensors file. Written by hand because safetensors' own writer wants all tensors
    of a file at once; here they pass one at a time."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for key, (dtype, shape, start) in file.tensors.items():
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        content[key] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, start + num_bytes],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _finish(
    model: PreTrainedModel,
    plan: ExportPlan,
    beside: Path,
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer_folder: Path | None,
) -> None:
    """Index, configs, tokenizer; then the rename. By the root rank, when every file is complete."""
    weight_map = {key: plan.file_name(index) for index, file in enumerate(plan.files) for key in file.tensors}
    index = {"metadata": {"total_size": sum(file.num_bytes for file in plan.files)}, "weight_map": weight_map}
    (beside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = copy.deepcopy(model.config)
    config.architectures = [next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule)).__name__]
    config.dtype = dtype or model.dtype
    config.save_pretrained(beside)
    if model.can_generate():
        model.generation_config.save_pretrained(beside)
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, beside)
    if folder.is_dir():  # empty: checked at the beginning
        folder.rmdir()
    beside.rename(folder)


def _file_dtypes(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each tensor in the files."""
    if dtype is None:
        return {name: tensor.dtype for name, tensor in state.items()}
    kept = find_fp32_names(model, dtype)
    return {
        name: tensor.dtype if not tensor.is_floating_point() or (kept and kept.search(name)) else dtype
        for name, tensor in state.items()
    }


def _entry_slices(entry: HubTensor, share: Share) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(entry.offset, share.offset, entry.size, strict=True)
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory (a copy where it isn't contiguous) as flat bytes, so that any dtype can be sent and written."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _make_empty(folder: Path) -> None:
    if folder.exists():  # left by an export that was killed
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _attempt(function: Callable[..., None], *args: object) -> Exception | None:
    """Run; the exception instead of raising it, for ``raise_together``."""
    try:
        function(*args)
    except Exception as problem:
        return problem
    return None
