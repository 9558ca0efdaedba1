"""Named tensors on disk, read one at a time: a folder of safetensors (a dump, an export), or a checkpoint.

Needs torch and safetensors, no process group and no model: a tensor comes whole, whatever topology wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# A checkpoint keeps weights under this key and the module's own names below it.
MODEL_PREFIX = "model."
# Each rank's random states: as many as the run had ranks, and different between them.
RNG_PREFIX = "rng-"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a tensor without reading its values. ``dtype`` as torch writes it, e.g. ``float32``."""

    shape: tuple[int, ...]
    dtype: str


class Store(Protocol):
    """Tensors by name."""

    @property
    def facts(self) -> Mapping[str, Facts]:
        """Every tensor's shape and dtype."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, on the CPU."""
        ...


class SafetensorsStore:
    """All ``*.safetensors`` files under a folder. A file in a folder below gives its names that folder as a prefix:
    ``grad/model.norm.weight``.
    """

    def __init__(self, folder: Path) -> None:
        self._places: dict[str, tuple[Path, str]] = {}
        self._facts: dict[str, Facts] = {}
        for path in sorted(folder.rglob("*.safetensors")):
            below = path.parent.relative_to(folder)
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    name = (below / key).as_posix()
                    if name in self._places:
                        raise ValueError(f"{folder}: {name} is in {self._places[name][0].name} and in {path.name}.")
                    self._places[name] = (path, key)
                    part = file.get_slice(key)
                    self._facts[name] = Facts(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))

    @property
    def facts(self) -> Mapping[str, Facts]:
        """See ``Store``."""
        return self._facts

    def read(self, name: str) -> torch.Tensor:
        """See ``Store``."""
        path, key = self._places[name]
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor


class CheckpointStore:
    """The tensors of a DCP checkpoint. Weights are under the module's own names, moments under ``optimizer.state.``;
    the random states, and what is no tensor (schedule), are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._keys: dict[str, str] = {}
        self._facts: dict[str, Facts] = {}
        for key, saved in self._metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata) and not key.startswith(RNG_PREFIX):
                name = key.removeprefix(MODEL_PREFIX)
                self._keys[name] = key
                self._facts[name] = Facts(tuple(saved.size), _dtype_name(saved.properties.dtype))

    @property
    def facts(self) -> Mapping[str, Facts]:
        """See ``Store``."""
        return self._facts

    def read(self, name: str) -> torch.Tensor:
        """See ``Store``."""
        key = self._keys[name]
        saved = self._metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata), key
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        # What dcp.load does, without a process group and without reading the metadata anew for each tensor.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor


def open_store(folder: Path) -> Store:
    """The tensors in ``folder``.

    Raises:
        ValueError: it is neither a complete checkpoint nor a folder with safetensors in or below it.
    """
    if (folder / ".metadata").is_file():
        return CheckpointStore(folder)
    if folder.is_dir() and next(folder.rglob("*.safetensors"), None) is not None:
        return SafetensorsStore(folder)
    raise ValueError(
        f"{folder}: holds no tensors: no .metadata of a checkpoint, no *.safetensors. "
        "Name a dump's, an export's or a checkpoint's folder."
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# How a safetensors header writes the types that training knows.
_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
