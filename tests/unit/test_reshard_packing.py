"""Bytes of messages: rounding in parts, and what a checksum shows and what not, as its docstring says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.reshard.packing import CHECKSUM_COLUMNS, checksum, copy_rounded


@pytest.mark.parametrize("shape", [(), (3,), (41,), (7, 33), (2, 5, 64)])
def test_values_are_rounded_alike_in_parts(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    memory = torch.full((*shape, 2), torch.nan)
    copy_rounded(memory[..., 1], values, torch.bfloat16, max_bytes=0)
    assert torch.equal(memory[..., 1], values.bfloat16().float()) and memory[..., 0].isnan().all()


@pytest.mark.parametrize("num_bytes", [1, 13, 8 * CHECKSUM_COLUMNS, 24 * CHECKSUM_COLUMNS + 21])
def test_a_change_within_one_word_always_shows(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for position in {0, num_bytes // 2, num_bytes - 1}:
        for bit in range(8):
            changed = data.clone()
            changed[position] ^= 1 << bit
            assert not torch.equal(checksum(changed), checksum(data)), (position, bit)


def words(changes: dict[tuple[int, int], int]) -> Tensor:
    """Bytes of two rows of the table, zeros but for ``changes``."""
    table = torch.zeros(2, CHECKSUM_COLUMNS, dtype=torch.int64)
    for place, value in changes.items():
        table[place] = value
    return table.flatten().view(torch.uint8)


def test_what_changes_several_words_may_not_show() -> None:
    highest = -(2**63)
    assert not torch.equal(checksum(words({(0, 3): 5})), checksum(words({(0, 4): 5})))  # swapped: shows
    assert not torch.equal(checksum(words({(0, 3): 5})), checksum(words({(1, 3): 5})))
    assert torch.equal(checksum(words({(0, 3): highest})), checksum(words({(0, 4): highest})))
    corners = {(0, 3): 5, (1, 4): 5, (0, 4): -5, (1, 3): -5}
    assert torch.equal(checksum(words(corners)), checksum(words({})))
