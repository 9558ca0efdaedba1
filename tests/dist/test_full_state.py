"""A state dict of one rank into a sharded model: every rank gets its shards, and errors reach all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import moesaic.weights.full_state as full_state
from moesaic import load_full_state_dict
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from tests.dist.test_weights import Layout, shard
from tests.unit.tiny_checkpoints import assert_same_state, save_tiny


def build_sharded(reference: Any, layout: Layout) -> Any:
    model = build_on_meta(reference.config, attn_implementation=None, dtype=torch.float32)
    shard(model, layout)
    materialize(model, "cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    return model


def load_from_one(rank: int, reference: Any, layout: Layout, src: int) -> int:
    """Largest number of bytes that this rank held of one parameter beside its own."""
    model = build_sharded(reference, layout)
    largest = 0
    original = full_state._as_bytes

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.nbytes)
        return original(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_state, "_as_bytes", watched)
        load_full_state_dict(model, reference.state_dict() if rank == src else None, src)
    shard(reference, layout)  # the same cut of the same values
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor) and isinstance(theirs, DTensor)
        assert torch.equal(mine.to_local(), theirs.to_local()), name
    return largest


LAYOUTS: dict[str, tuple[dict[str, Any], Layout, int]] = {
    "fsdp2": ({}, Layout(1, 2, 1, expert_dim=0), 0),
    "efsdp2-ep2": ({}, Layout(1, 2, 2), 3),
    "efsdp2-ep2-dim0-tied": ({"tie_word_embeddings": True}, Layout(1, 2, 2, expert_dim=0), 1),
    "uneven-7-on-ep4": ({"num_experts": 7}, Layout(1, 1, 4), 0),
    "hsdp-edp2-ep2": ({}, Layout(2, 1, 2), 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_gets_its_shards(name: str, run_ranks: Any, tmp_path: Path) -> None:
    overrides, layout, src = LAYOUTS[name]
    reference = save_tiny(tmp_path, "qwen3_moe", **overrides)
    largest = max(parameter.nbytes for parameter in reference.parameters())
    assert all(0 < held < largest for held in run_ranks(load_from_one, layout.world_size, reference, layout, src))


def refuse(rank: int, reference: Any) -> list[str]:
    """What each rank says to states that don't fit; afterwards nothing has changed and one that fits loads."""
    model = build_sharded(reference, Layout(1, 2, 1))
    state = reference.state_dict()
    broken = {**state, "model.norm.weight": torch.ones(3), "extra": torch.ones(1)}
    del broken["lm_head.weight"]
    messages = []
    for mine, src in ((broken if rank == 0 else None, 0), (None, 0), (state, 0), (state, 5)):
        try:
            load_full_state_dict(model, mine, src)
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert all((parameter.to_local() == 7).all() for parameter in model.parameters())
    dist.barrier()
    load_full_state_dict(model, state if rank == 1 else None, src=1)
    assert not (model.lm_head.weight.to_local() == 7).all()
    return messages


def test_what_does_not_fit_is_refused_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(refuse, 2, save_tiny(tmp_path, "qwen3_moe"))
    assert len(first) == len(second) == 4
    assert "3 problems" in first[0] and "missing: lm_head.weight [48, 16]" in first[0]
    assert "shape: model.norm.weight is [3], needs [16]" in first[0] and "unknown: extra [1]" in first[0]
    assert second[0].startswith("PeerFailed: load_full_state_dict failed on another rank")
    assert first[1].startswith("ValueError: state=None on rank src") and "PeerFailed" in second[1]
    assert "PeerFailed" in first[2] and second[2].startswith("ValueError: state is given on a rank that isn't src")
    assert "src is none of the model's ranks" in first[3] and "src is none of the model's ranks" in second[3]


def test_one_process_and_tied_names(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    model = build_on_meta(reference.config, attn_implementation=None, dtype=torch.bfloat16)
    materialize(model, "cpu")
    state = reference.state_dict()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= state.keys()
    load_full_state_dict(model, state)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_state(model, reference.to(torch.bfloat16))
    with pytest.raises(ValueError, match="tied: model.embed_tokens.weight and lm_head.weight are one parameter"):
        load_full_state_dict(model, {**state, "lm_head.weight": torch.zeros(48, 16)})
    del state["model.embed_tokens.weight"]
    load_full_state_dict(model, state)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_sides_exchange_on_the_meshs_device_where_shards_lie_on_the_cpu(rank: int) -> None:
    """As under ``offload``; meta stands for the accelerator."""
    mesh = DeviceMesh("meta", [0, 1], _init_backend=False, _rank=rank)
    meta = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
    sharded = DTensor(torch.zeros(2, 2), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
    devices: list[str] = []

    def message(tensor: torch.Tensor, **_: int) -> None:
        devices.append(tensor.device.type)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(dist, "send", message)
        patch.setattr(dist, "recv", message)
        if rank:
            full_state._receive(sharded, src=0)
        else:
            full_state._send(sharded, torch.ones(4, 2), [0, 1], src=1)
    assert devices == ["meta"]
