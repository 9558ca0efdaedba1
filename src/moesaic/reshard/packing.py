"""Bytes of messages: what a piece takes of a shard, how pieces lie in a message, its checksum, memory for it.

Example, a message of a bf16 piece of 3 elements and an fp32 piece of 2: bytes 0..7 are the fp32 piece, 8..13 the other;
with a checksum, bytes 14..29 are that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moesaic.reshard.layout import Message, Piece

ALIGNMENT = 64  # bytes; of a message in the ring, so that any dtype can be viewed in it
CHECKSUM_BYTES = 16
CHECKSUM_COLUMNS = 1024


def select(local: Tensor, piece: Piece) -> Tensor:
    """What a piece takes of a trainer rank's local tensor, as a view [the source's shape of the piece].

    Example: local [6, 4], slices (1:2, 0:4), dims (1,): row 1 as [4].
    """
    region = piece.source
    walked = [dim for dim in region.dims if dim is not None]
    dropped = [dim for dim in range(local.ndim) if dim not in walked]
    view = local[region.slices].permute([*walked, *dropped])
    for _ in dropped:
        view = view.select(-1, 0)
    for position, dim in enumerate(region.dims):
        if dim is None:
            view = view.unsqueeze(position)
    return view


def copy_rounded(target: Tensor, values: Tensor, dtype: torch.dtype, max_bytes: int) -> None:
    """``target = values.to(dtype)`` with at most ``max_bytes`` beside the two."""
    if dtype in (values.dtype, target.dtype):
        target.copy_(values)
    elif values.numel() * dtype.itemsize <= max(max_bytes, ALIGNMENT):
        target.copy_(values.to(dtype))
    else:
        dim = max(range(values.ndim), key=lambda dim: values.shape[dim])
        for target_half, half in zip(target.tensor_split(2, dim), values.tensor_split(2, dim), strict=True):
            copy_rounded(target_half, half, dtype, max_bytes)


def pack(message: Message, source: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Write a message's elements to ``buffer``: bytes [at least the message's size], aligned."""
    for piece, part in unpack(message, buffer):
        part.copy_(select(source[piece.source.name], piece))


def unpack(message: Message, buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Where each piece lies in a buffer, as a view of its source's shape and its dtype.

    Pieces of wider dtypes come first: each then begins at a multiple of its element's size, without any padding.
    """
    start = 0
    for piece in sorted(message.pieces, key=lambda piece: -piece.wire_dtype.itemsize):
        part = buffer[start : start + piece.num_bytes]
        yield piece, part.view(piece.wire_dtype).view(piece.source.shape)
        start += piece.num_bytes


def checksum(data: Tensor) -> Tensor:
    """Two int64 numbers made of bytes [N], on their device, to find damage on the way.

    Sums of 8-byte words over the columns and over the rows of a table of 1,024 columns, each weighted by an odd number
    of its own, modulo 2^64. What is changed within one word always shows. What changes several words, or their order,
    mostly does, not always: not two words swapped in one row that differ in their highest bit only, nor one added and
    subtracted so that all sums of columns and rows stay. No protection against who means harm.
    """
    size = data.numel() // 8 * 8
    words = data[:size].view(torch.int64)
    full = words.numel() // CHECKSUM_COLUMNS * CHECKSUM_COLUMNS
    table = words[:full].view(-1, CHECKSUM_COLUMNS)
    rest = torch.cat([words[full:], data[size:].to(torch.int64)])
    columns = torch.cat([table.sum(0), rest])
    rows = torch.cat([table.sum(1), rest])
    return torch.stack([(sums * _odd_numbers(sums)).sum() for sums in (columns, rows)])


def put_checksum(buffer: Tensor) -> None:
    """Write the checksum of all but the last 16 bytes to these."""
    buffer[-CHECKSUM_BYTES:].copy_(checksum(buffer[:-CHECKSUM_BYTES]).view(torch.uint8))


def has_checksum(buffer: Tensor) -> bool:
    """Whether the last 16 bytes are the checksum of the rest."""
    return torch.equal(buffer[-CHECKSUM_BYTES:], checksum(buffer[:-CHECKSUM_BYTES]).view(torch.uint8))


def _odd_numbers(like: Tensor) -> Tensor:
    return torch.arange(1, 2 * like.numel(), 2, dtype=torch.int64, device=like.device)


class Ring:
    """Memory for messages, taken and freed in one order.

    Attributes:
        memory: bytes [capacity], taken once.
        bytes_taken: by messages that are not freed yet.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.bytes_taken = 0
        self._taken: deque[tuple[int, int]] = deque()  # (start, end), oldest first

    def take(self, size: int) -> Tensor | None:
        """The next ``size`` bytes, aligned; ``None`` where the oldest must be freed first."""
        start = self._find(size)
        if start is None:
            return None
        self._taken.append((start, start + size))
        self.bytes_taken += size
        return self.memory[start : start + size]

    def free_oldest(self) -> None:
        """Give back what was taken first."""
        start, end = self._taken.popleft()
        self.bytes_taken -= end - start

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= self.memory.numel() else None
        oldest, newest = self._taken[0][0], self._taken[-1]
        start = align(newest[1])
        if newest[0] < oldest:  # it has gone round
            return start if start + size <= oldest else None
        if start + size <= self.memory.numel():
            return start
        return 0 if size <= oldest else None


def align(size: int) -> int:
    """``size`` rounded up to a place where a message may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
