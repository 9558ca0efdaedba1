"""Memory that is taken from tensors and brought back, the tensors being the same objects throughout.

What is taken is the storage, resized to nothing: parameters, DTensors, views and an optimizer's state keep their shapes
and stay where they are, and must not be read meanwhile. A storage that several tensors share is taken once.

Where the bytes go meanwhile is a tier:

| device      | tier         | bytes                                                                      |
|-------------|--------------|----------------------------------------------------------------------------|
| CPU         | ``FileTier`` | a map of a file in a scratch folder, that is unmapped until they come back |
| accelerator | ``HostTier`` | pinned host memory, kept for the next time                                |

The file has no name (``O_TMPFILE``, or unlinked when it is made): whatever ends the process, nothing of it is left.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

# Small storages are mapped together, up to so many bytes: they are twice in memory for as long as a copy takes.
MAP_BYTES = 64 * 2**20


class Kept(Protocol):
    """Bytes of storages, in order."""

    def read(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy them into ``storages``, as large as those they were taken from."""
        ...

    def close(self) -> None:
        """They are not needed any more."""
        ...


class Tier(Protocol):
    """Where bytes are kept."""

    def keep(self, storages: Sequence[UntypedStorage]) -> Kept:
        """Copy the bytes of ``storages``.

        Raises:
            OSError: there is no room.
        """
        ...


def build_tier(device_type: str, folder: str | Path | None = None) -> Tier:
    """The tier for memory of a device.

    Args:
        folder: of ``FileTier``; default: the system's, for temporary files.
    """
    return FileTier(Path(folder or tempfile.gettempdir())) if device_type == "cpu" else HostTier()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor itself. Not differentiable."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of tensors (of DTensors, this rank's) that have memory: each once, in order."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


class Parking:
    """What one owner has parked: all of it comes back together. Not thread-safe.

    Args:
        tier: of the device that the tensors are on.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._storages: list[UntypedStorage] = []
        self._sizes: list[int] = []
        self._kept: Kept | None = None

    @property
    def is_parked(self) -> bool:
        """Whether something is."""
        return bool(self._storages)

    @property
    def num_bytes(self) -> int:
        """How much is parked, or dropped."""
        return sum(self._sizes)

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor], *, keeps: bool = True) -> None:
        """Take the memory of ``tensors``. Where that fails, they have it all.

        Args:
            keeps: their values come back with the memory; else anything does.

        Raises:
            OSError: the tier has no room.
        """
        assert not self._storages, "already parked"
        storages = local_storages(tensors)
        self._kept = self._tier.keep(storages) if keeps and storages else None
        self._storages, self._sizes = storages, [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        if any(storage.device.type == "cpu" for storage in storages):
            return_freed_memory()

    @torch.no_grad()
    def bring_back(self) -> None:
        """Give the tensors memory again, with what they held."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        if self._kept is not None:
            self._kept.read(self._storages)
        self.close()

    def close(self) -> None:
        """Forget what is parked: those tensors have no memory and no values from here on."""
        if self._kept is not None:
            self._kept.close()
        self._storages, self._sizes, self._kept = [], [], None


class FileTier:
    """One file for what is kept together, in ``folder``: of a disk, for on tmpfs it is memory all the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, storages: Sequence[UntypedStorage]) -> Kept:
        """See ``Tier``. The room is reserved first: writing to a map of a full disk would end the process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = [storage.nbytes() for storage in storages]
        with tempfile.TemporaryFile(dir=self._folder, prefix="moesaic-parked-", buffering=0) as file:
            _reserve(file.fileno(), _file_bytes(sizes))
            for part, mapped in _mapped_parts(file.fileno(), sizes):
                mapped.copy_(_as_bytes(storages[part]))
            return _InFile(os.dup(file.fileno()))


class _InFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Also where the owner is forgotten while it is parked.
        self._close = weakref.finalize(self, os.close, descriptor)

    def read(self, storages: Sequence[UntypedStorage]) -> None:
        for part, mapped in _mapped_parts(self._descriptor, [storage.nbytes() for storage in storages]):
            _as_bytes(storages[part]).copy_(mapped)

    def close(self) -> None:
        self._close()


class HostTier:
    """Pinned memory of the host; one block for each size, used again: pinning takes longer than copying."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def keep(self, storages: Sequence[UntypedStorage]) -> Kept:
        """See ``Tier``."""
        blocks = [self._take(storage.nbytes()) for storage in storages]
        for block, storage in zip(blocks, storages, strict=True):
            block.copy_(_as_bytes(storage), non_blocking=True)
        _wait_for(storages)
        return _InHostMemory(blocks, self._free)

    def _take(self, size: int) -> Tensor:
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _InHostMemory:
    def __init__(self, blocks: Sequence[Tensor], free: dict[int, list[Tensor]]) -> None:
        self._blocks = list(blocks)
        self._free = free

    def read(self, storages: Sequence[UntypedStorage]) -> None:
        for block, storage in zip(self._blocks, storages, strict=True):
            _as_bytes(storage).copy_(block, non_blocking=True)
        _wait_for(storages)

    def close(self) -> None:
        for block in self._blocks:
            self._free.setdefault(block.numel(), []).append(block)
        self._blocks.clear()


def return_freed_memory() -> None:
    """Have the C library give pages back that nothing uses any more; glibc's keeps those between pages in use."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library, which has no such call
        return


def _as_bytes(storage: UntypedStorage) -> Tensor:
    """The storage itself, as a tensor [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for(storages: Sequence[UntypedStorage]) -> None:
    if any(storage.device.type != "cpu" for storage in storages):
        torch.accelerator.synchronize()


def _reserve(descriptor: int, size: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _cut_runs(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Parts of a file that are mapped at a time: (first storage, end of storages, offset in the file, bytes). Offsets
    are multiples of what a map may begin at; within one, storages lie end to end."""
    first, offset = 0, 0
    while first < len(sizes):
        end, num_bytes = first + 1, sizes[first]
        while end < len(sizes) and num_bytes + sizes[end] <= MAP_BYTES:
            num_bytes += sizes[end]
            end += 1
        yield first, end, offset, num_bytes
        first, offset = end, offset + -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _file_bytes(sizes: Sequence[int]) -> int:
    _, _, offset, num_bytes = list(_cut_runs(sizes))[-1]
    return offset + num_bytes


def _mapped_parts(descriptor: int, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(number of a storage, its bytes in the map), to be used before the next is asked for."""
    for first, end, offset, num_bytes in _cut_runs(sizes):
        mapped = mmap.mmap(descriptor, num_bytes, offset=offset)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        yield from zip(range(first, end), whole.split(list(sizes[first:end])), strict=True)
        # The pages leave this process with the last tensor on the map.
        del whole, mapped
