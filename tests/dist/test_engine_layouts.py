"""What ranks tell one another of their engines' layouts before a planned transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moesaic.engines.hf import HfEngine
from moesaic.engines.sync import Agreement, WeightSync
from moesaic.engines.transfer import PlannedTransfer
from moesaic.reshard.layout import Copy, SourceTensor, TargetLayout, TargetTensor
from moesaic.weights.agree import state_tensors
from moesaic.weights.export import find_layout
from tests.dist.test_engine_sync import agreement, assert_equal, own_engine, trained, whole
from tests.pool import RunRanks
from tests.unit.tiny_checkpoints import save_tiny


class ByFiles(HfEngine):
    """Names its layout as files do, with experts one by one, like engines whose loader was traced."""

    names = "files"

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        state = state_tensors(self.model)
        grids, shapes = find_layout(self.model, state)
        copies = []
        for name, tensor in state.items():
            for tile in grids[name].tiles:
                offset = sum(start * stride for start, stride in zip(tile.offset, tensor.stride(), strict=True))
                dims = {own: dim for dim, own in enumerate(tile.dims) if own is not None}
                ndim = len(shapes[tile.key])
                copies.append(
                    Copy(
                        source=tile.key,
                        target=name,
                        shape=shapes[tile.key],
                        source_start=(0,) * ndim,
                        source_dims=tuple(range(ndim)),
                        source_steps=(1,) * ndim,
                        target_offset=offset,
                        target_strides=tuple(tensor.stride(dims[own]) for own in range(ndim)),
                    )
                )
        return (
            TargetLayout(
                tensors=tuple(TargetTensor(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in state.items()),
                copies=tuple(copies),
                fills=(),
                sources=tuple(
                    SourceTensor(name=key, shape=tuple(shape), dtype=torch.float32) for key, shape in shapes.items()
                ),
            ),
        )


def share_layouts(rank: int, folder: Path) -> dict[str, int]:
    """Two engines with equal layouts in files' keys, one in the model's names: what travels, and what arrives."""
    model = trained(folder, ep_size=2)
    engine = own_engine(folder)
    if rank in (0, 2):
        engine = ByFiles(engine.model)
    engines = [engine] if rank < 3 else []
    sizes: list[int] = []
    send = dist.broadcast_object_list

    def count(objects: list[Any], src: int) -> None:
        sizes.append(src)
        send(objects, src=src)

    transfer = PlannedTransfer(model, timeout_s=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", count)
        WeightSync(engines, transfer, agreement(rank)).sync(1)
    expected = whole(model)
    for each in engines:
        assert_equal(each, expected)
    view = transfer._view
    WeightSync(engines, transfer, Agreement(dist.distributed_c10d._get_default_store(), rank, 4, prefix="b")).sync(2)
    assert transfer._view is view, "found once"
    assert transfer.plan is not None
    return {"sent": len(sizes), "planned": len(transfer.plan._layouts)}


def test_equal_layouts_travel_once_in_the_models_names(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3_moe")
    for report in run_ranks(share_layouts, 4, tmp_path / "model"):
        assert report == {"sent": 2, "planned": 2}
