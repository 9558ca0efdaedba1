"""What a folder's safetensors files hold: each tensor's place, shape and dtype, read from the headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
COPY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: as the header has it, e.g. ``BF16``, ``F8_E4M3``.
        start, end: its bytes in the file.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.end - self.start


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """Key -> what the header says, for all tensors of a folder (one file, or an index and its files). Files are read in
    their headers only: by hand, because safetensors hands out neither offsets nor dtypes that torch doesn't have.

    Raises:
        ValueError: no safetensors file is there, one is damaged, or the index names a file or a key that isn't there.
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
    headers = {tensor.key: tensor for file in files for tensor in _read_header(file)}
    lost = [key for key, name in expected.items() if key not in headers or headers[key].file.name != name]
    if lost:
        raise ValueError(
            f"model={str(folder)!r}: {INDEX_FILE} names keys that its files don't hold: {lost}. Download again."
        )
    return headers


def find_weights(folder: str | Path) -> bool:
    """Whether a folder has safetensors of a model, or an index of them."""
    return any((Path(folder) / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's ``config.json``; empty where there is none."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_header(path: Path) -> list[FileTensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        entries = json.loads(text)
        tensors = [
            FileTensor(
                file=path,
                key=key,
                shape=tuple(entry["shape"]),
                dtype=entry["dtype"],
                start=8 + size + entry["data_offsets"][0],
                end=8 + size + entry["data_offsets"][1],
            )
            for key, entry in entries.items()
            if key != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} isn't a safetensors file ({type(error).__name__}: {error}). Download again."
        ) from error
    length = path.stat().st_size
    if any(tensor.end > length for tensor in tensors):
        raise ValueError(f"{path} is cut off: it has {length} bytes, fewer than its header names. Download again.")
    return tensors


def read_bytes(tensor: FileTensor) -> Iterator[bytes]:
    """A tensor's bytes as they are, in pieces of at most ``COPY_BYTES``."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.end, COPY_BYTES):
            yield file.read(min(COPY_BYTES, tensor.end - start))
