"""Write a sharded model as Hugging Face safetensors, named as its files were; no rank holds more than one parameter.

plan (export_plan.py, the same on every rank): parameter -> shares -> entries of files, each file with one writer
run, parameter by parameter: holders send their shards to the share's writer, which writes its entries to its files;
then each writer copies, from the folder that the model was loaded from, what the model has no use for
finish, by the first rank: index, configs, tokenizer, rename
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from moesaic.model.build import find_fp32_names
from moesaic.model.tokenizer_files import copy_tokenizer
from moesaic.ops.placements import local_shape
from moesaic.weights.agree import find_mesh, raise_together, state_tensors
from moesaic.weights.conversions import derive_default_grids, original_class
from moesaic.weights.entries import Entry, as_bytes, cut_tile, put_tiles
from moesaic.weights.export_plan import SAFETENSORS_DTYPES, ExportPlan, FilePlan, Share, build_shares, plan_export
from moesaic.weights.family import require_known_layout
from moesaic.weights.files import FileTensor, read_bytes, read_config
from moesaic.weights.quantized import Stored
from moesaic.weights.source import WeightSource, is_part_of_composite, recall_source
from moesaic.weights.tiles import Grid, Shape


@torch.no_grad()
def export_hf(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    max_shard_gib: float = 4.0,
    dtype: torch.dtype | None = None,
    tokenizer_folder: str | Path | None = None,
    keep_unused: bool = True,
) -> None:
    """Write ``model`` to ``folder`` so that plain ``from_pretrained`` loads it.

    A model that ``load_weights`` loaded comes out as it came: the same keys in the same layout, but without
    quantisation, which is undone on loading. Any other is named and laid out as on the Hub.

    Written to ``<folder>.tmp`` beside and renamed when complete. Every rank of the model's meshes must call, outside
    forward and backward, and see the same file system. Shards travel by point-to-point messages in the default group. A
    model without DTensors is written by the calling process alone: call on one rank.

    Args:
        max_shard_gib: limit of a file, unless one tensor is larger; files may be smaller.
        dtype: cast floating-point weights to it (what the family keeps in fp32 stays); default: as they are.
        tokenizer_folder: copy the tokenizer's files from there.
        keep_unused: copy what the folder that the model was loaded from holds beside it (a vision tower, layers for
            multi-token prediction): bit for bit, but quantised tensors unpacked, to ``dtype`` or the model's.

    Raises:
        ValueError: ``folder`` isn't empty, the names of stacked experts in files aren't known, or a tensor lies on some
            of the model's ranks only; before anything is sent. Or the folder that the model was loaded from is gone,
            and holds what is to be kept.
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
    state, mesh = find_state(model)
    source = recall_source(model)
    kept = source.kept if source is not None and keep_unused else ()
    rank = 0 if mesh is None else dist.get_rank()
    ranks: list[int] = [0] if mesh is None else mesh.mesh.flatten().tolist()
    root = ranks[0]
    shares = build_shares(state, *find_layout(model, state), file_dtypes(model, state, dtype), ranks)
    plan = plan_export(
        shares, max_file_bytes=int(max_shard_gib * 2**30), kept=kept, unpacked=dtype or model.dtype, ranks=ranks
    )

    beside = folder.with_name(folder.name + ".tmp")
    error = _attempt(_require_files, kept)
    error = error or (_attempt(_make_empty, beside) if rank == root else None)
    raise_together(error, mesh, f"exporting to {folder}")
    raise_together(_run(plan, state, beside, rank), mesh, f"exporting to {folder}")
    if rank == root:
        tokenizer = None if tokenizer_folder is None else Path(tokenizer_folder)
        config = _export_config(model, source if kept else None, dtype or model.dtype)
        error = _attempt(_finish, model, plan, beside, folder, config, tokenizer)
    raise_together(error, mesh, f"exporting to {folder}")


def find_state(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], DeviceMesh | None]:
    """What an export holds of ``model``, by name, and the mesh of all ranks that hold a part of it; no communication.

    Raises:
        ValueError: the names of stacked experts in files aren't known, or a tensor lies on some of the ranks only.
    """
    require_known_layout(model)
    left_out = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in state_tensors(model).items() if name not in left_out}
    mesh = find_mesh(state.values())
    _refuse_partial_meshes(state, mesh)
    return state, mesh


def _refuse_partial_meshes(state: Mapping[str, torch.Tensor], mesh: DeviceMesh | None) -> None:
    """Every rank plans files and messages from what it holds: tensors of some ranks only would give them two plans."""
    for name, tensor in state.items():
        if mesh is not None and isinstance(tensor, DTensor) and tensor.device_mesh.size() < mesh.size():
            raise ValueError(
                f"{name} lies on {tensor.device_mesh.size()} of the model's {mesh.size()} ranks: it can't be exported. "
                "Shard it over a mesh that names every axis, e.g. with fully_shard_planned(replicate=...)."
            )


def find_layout(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Grid], dict[str, Shape]]:
    """How an export holds the tensors of ``state``: each one's tiles, and the shapes of the files' tensors."""
    source = recall_source(model)
    if source is not None:
        came = {name: grid.shape for name, grid in source.grids.items()}
        # A model that was changed since (a larger vocabulary) isn't what its files were.
        if all(came.get(name) == tuple(tensor.shape) for name, tensor in state.items()):
            return {name: source.grids[name] for name in state}, source.shapes
    return derive_default_grids(model, state)


def gather_share(share: Share, local: torch.Tensor, writer: int, rank: int, device: str) -> torch.Tensor | None:
    """The share's box on ``writer``, ``None`` elsewhere. Holders and the writer must call (others may): a holder sends
    its whole ``local`` tensor through the default group, the writer receives from one holder after the other.

    Shapes: ``local`` as the rank's shard; result ``share.size``, in ``share.dtype``.
    """
    if rank != writer:
        if any(rank == holder for holder, _ in share.holders):
            dist.send(as_bytes(local.to(device=device, dtype=share.dtype)), dst=writer)
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
            dist.recv(as_bytes(received), src=holder)
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
        for stored, index in plan.copies if error is None else ():
            if index in writers:
                error = error or _attempt(_copy, stored, writers[index])
    return error


def _write_share(
    share: Share,
    indices: Sequence[int],
    tensor: torch.Tensor,
    writer: int,
    rank: int,
    writers: Mapping[int, FileWriter],
) -> Exception | None:
    """One step of the plan. A function of its own so that the gathered box is freed before the next is made."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    box = gather_share(share, local, writer, rank, device)
    if box is None:
        return None
    try:
        for entry, index in zip(share.entries, indices, strict=True):
            writers[index].write_entry(entry, share, box)
    except OSError as problem:
        return problem
    return None


def _copy(stored: Stored, writer: FileWriter) -> None:
    """One tensor from the folder that the model was loaded from."""
    if stored.scales is None:
        writer.write(stored.key, map(memoryview, read_bytes(stored.values)))
        return

    def take(tensor: FileTensor, source: tuple[range, ...]) -> torch.Tensor:
        with safe_open(tensor.file, "pt", device="cpu") as handle:
            return handle.get_slice(tensor.key)[tuple(slice(part.start, part.stop) for part in source)]

    writer.write_tensor(stored.key, stored.read(tuple(map(range, stored.shape)), take))


class FileWriter:
    """Writes one safetensors file, each tensor to its place, and is open only from its first to its last."""

    def __init__(self, path: Path, plan: FilePlan) -> None:
        self._path = path
        self._plan = plan
        self._left = set(plan.tensors)
        self._file: BinaryIO | None = None
        self._start = 0
        # Tensors that are pieced together, and how many of their values are still to come.
        self._pieces: dict[str, tuple[torch.Tensor, int]] = {}

    def write_entry(self, entry: Entry, share: Share, box: torch.Tensor) -> None:
        """A tensor, or a piece of it, out of the box of a parameter."""
        if entry.is_whole:
            self.write_tensor(entry.key, cut_tile(entry.tiles[0], share.offset, box))
            return
        empty = torch.empty(entry.shape, dtype=share.dtype, device=box.device)
        whole, num_left = self._pieces.pop(entry.key, (empty, empty.numel()))
        num_left -= put_tiles(entry, share.offset, box, whole)
        if num_left:
            self._pieces[entry.key] = (whole, num_left)
        else:
            self.write_tensor(entry.key, whole)

    def write_tensor(self, key: str, tensor: torch.Tensor) -> None:
        """A whole tensor of the plan, in its dtype there."""
        dtype = next(dtype for dtype, name in SAFETENSORS_DTYPES.items() if name == self._plan.tensors[key].dtype)
        self.write(key, [as_bytes(tensor.to(dtype)).cpu().numpy().data])

    def write(self, key: str, data: Iterable[memoryview]) -> None:
        """The bytes of a tensor of the plan."""
        if self._file is None:
            self._file = self._path.open("wb")
            header = _header(self._plan)
            self._file.write(header)
            self._start = len(header)
        self._file.seek(self._start + self._plan.tensors[key].start)
        for part in data:
            self._file.write(part)
        self._left.remove(key)
        if not self._left:
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
    for key, entry in file.tensors.items():
        content[key] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.num_bytes],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _export_config(model: PreTrainedModel, source: WeightSource | None, dtype: torch.dtype) -> PreTrainedConfig:
    """The config that describes the files: the model's own, or where a text model is exported together with the other
    parts of the ``source`` that it is from, that one's. Without quantisation: the files hold plain values."""
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    if source is not None and is_part_of_composite(model, read_config(source.folder)):
        whole = AutoConfig.from_pretrained(str(source.folder), local_files_only=True)
        whole.text_config = config
        config.architectures = None
        config.dtype = dtype
        config = whole
    config.dtype = dtype
    for part in (config, config.get_text_config()):
        if "quantization_config" in part.to_dict():
            del part.quantization_config
    return config


def _finish(
    model: PreTrainedModel,
    plan: ExportPlan,
    beside: Path,
    folder: Path,
    config: PreTrainedConfig,
    tokenizer_folder: Path | None,
) -> None:
    """Index, configs, tokenizer; then the rename. By the root rank, when every file is complete."""
    weight_map = {key: plan.file_name(index) for index, file in enumerate(plan.files) for key in file.tensors}
    index = {"metadata": {"total_size": sum(file.num_bytes for file in plan.files)}, "weight_map": weight_map}
    (beside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config.save_pretrained(beside)
    if model.can_generate():
        model.generation_config.save_pretrained(beside)
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, beside)
    if folder.is_dir():  # empty: checked at the beginning
        folder.rmdir()
    beside.rename(folder)


def file_dtypes(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each tensor of ``state`` in the files of an export with ``dtype``."""
    if dtype is None:
        return {name: tensor.dtype for name, tensor in state.items()}
    kept = find_fp32_names(model, dtype)
    return {
        name: tensor.dtype if not tensor.is_floating_point() or (kept and kept.search(name)) else dtype
        for name, tensor in state.items()
    }


def _require_files(kept: Sequence[Stored]) -> None:
    lost = {tensor.values.file.parent for tensor in kept if not tensor.values.file.is_file()}
    if lost:
        raise ValueError(
            f"{', '.join(map(str, lost))} is gone, from which {len(kept)} tensors that the model doesn't hold were to "
            "be copied. Put it back, or export with keep_unused=False."
        )


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
