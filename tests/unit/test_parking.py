"""Memory that is taken from tensors and brought back, in one process; tests/dist/test_rl_memory.py is about ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.ops.parking import FileTier, Parking, build_tier


def test_views_and_shared_storages_come_back_as_they_were(tmp_path: Path) -> None:
    big = torch.randn(3, 4)
    tensors = [big, big[1:], torch.arange(5), torch.zeros(0), torch.tensor(7.0)]
    before = [each.clone() for each in tensors]
    parking = Parking(build_tier("cpu", tmp_path / "new"))
    parking.park(tensors)
    assert parking.is_parked and parking.num_bytes == 48 + 40 + 4
    assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
    assert [each.shape for each in tensors] == [each.shape for each in before]
    parking.bring_back()
    assert not parking.is_parked and all(map(torch.equal, tensors, before))
    big += 1
    assert torch.equal(tensors[1], before[1] + 1), "still a view of the other"


def test_storages_of_any_sizes_lie_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.ops.parking.MAP_BYTES", 10_000)
    tensors = [torch.rand(size) for size in (1, 2000, 900, 3000, 1, 1, 5000, 10, 2500)]
    before = [each.clone() for each in tensors]
    parking = Parking(FileTier(tmp_path))
    for _ in range(2):
        parking.park(tensors)
        parking.bring_back()
        assert all(map(torch.equal, tensors, before))


def test_what_is_dropped_comes_back_as_large(tmp_path: Path) -> None:
    tensor = torch.rand(100)
    parking = Parking(FileTier(tmp_path / "never made"))
    parking.park([tensor], keeps=False)
    parking.bring_back()
    assert tensor.untyped_storage().nbytes() == 400 and not (tmp_path / "never made").exists()
