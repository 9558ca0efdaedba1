"""Streaming a sharded model: the tensors of its export, bit for bit, on every rank, within one bucket of memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode

import moesaic.weights.stream as stream_module
from moesaic.meshes import build_meshes
from moesaic.model.buffers import materialize
from moesaic.model.build import build_on_meta
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.weights import export_hf, load_weights, match_folder, remember_source, stream_hf_tensors
from moesaic.weights.agree import state_tensors
from moesaic.weights.expert_names import name_experts
from moesaic.weights.export import find_layout
from tests.dist.test_weights import Layout, shard
from tests.unit.hub_folders import HUB_MODELS, write_folder
from tests.unit.test_weights_layouts import assert_same, contents, save_random
from tests.unit.tiny_checkpoints import assert_same_state, save_tiny

BUCKET_MIB = 24 / 1024  # eight times the largest tensor, a sixth of the model: 24 KiB


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made since, as long as they live: now, and the most at a time."""

    def __init__(self, known: Iterator[torch.Tensor], device: str = "cpu") -> None:
        super().__init__()
        self.now = self.peak = self.num_made = 0
        self._device = device
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or (key in self._seen and self._seen[key]() is not None):
            return
        self._seen[key] = weakref.ref(storage)
        self.now += storage.nbytes()
        self.num_made += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


@contextlib.contextmanager
def counted_messages() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends and receives."""
    counter = {"isend": 0, "irecv": 0}
    exchange = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> Any:
        for each in operations:
            counter[each.op.__name__] += each.tensor.nbytes
        return exchange(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted)
        yield counter


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stream_beside_export(model: Any, folder: Path, **options: Any) -> None:
    """Stream and export; same tensors, no byte too many, and all of it within the bucket."""
    dtype = options.get("dtype")
    export_hf(model, folder, dtype=dtype, keep_unused=False)
    dist.barrier()
    files = contents(folder)
    known = (local_of(tensor).detach() for tensor in model.state_dict().values())
    streamed: dict[str, torch.Tensor] = {}
    stream = stream_hf_tensors(model, BUCKET_MIB, **options)
    with counted_messages() as counter, LiveBytes(known) as memory:
        for name, tensor in stream:
            assert name not in streamed and tensor.is_contiguous()
            with torch._C._DisableTorchDispatch():  # the test's own copies don't count
                streamed[name] = tensor.clone()
    assert_same(streamed, files)
    assert memory.num_made > 10
    assert 0 < memory.peak <= BUCKET_MIB * 2**20
    itemsize = None if dtype is None else dtype.itemsize
    lacking = sum((each.numel() - local_of(each).numel()) * (itemsize or each.itemsize) for each in model.parameters())
    assert counter["irecv"] == lacking


def stream_torch_sharded(rank: int, folder: Path, layout: Layout) -> None:
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    shard(model, layout)
    materialize(model, "cpu")
    load_weights(model, folder)
    for dtype in (None, torch.bfloat16):
        stream_beside_export(model, folder.parent / str(dtype), dtype=dtype)


LAYOUTS: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "fsdp2-dim0": ("qwen3_moe", {}, Layout(1, 2, 1, expert_dim=0)),
    "ep4": ("mixtral", {}, Layout(1, 1, 4)),
    "efsdp2-ep2-tied": ("qwen3_moe", {"tie_word_embeddings": True}, Layout(1, 2, 2)),
    "efsdp2-ep2-strided": ("qwen2_moe", {}, Layout(1, 2, 2, expert_dim=0)),
    "uneven-7-on-ep4": ("qwen3_moe", {"num_experts": 7}, Layout(1, 1, 4)),
    "hsdp-edp2-ep2": ("qwen3_moe", {}, Layout(2, 1, 2)),
    "stacked-in-files": ("qwen3_5_moe_text", {}, Layout(1, 2, 2)),
    "uneven-7-on-efsdp3-ep2-strided": ("qwen3_moe", {"num_experts": 7}, Layout(1, 3, 2, expert_dim=0)),
}


# Run by `make test-slow`: others show the same together with something else.
SLOW = {"fsdp2-dim0", "ep4", "hsdp-edp2-ep2"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LAYOUTS])
def test_the_stream_is_the_export(name: str, run_ranks: Any, tmp_path: Path) -> None:
    model_type, overrides, layout = LAYOUTS[name]
    save_tiny(tmp_path / "hub", model_type, **overrides)
    run_ranks(stream_torch_sharded, layout.world_size, tmp_path / "hub", layout)


def stream_two_dtypes(rank: int, folder: Path) -> None:
    model = build_on_meta(folder, attn_implementation=None, dtype=torch.float32)
    model._keep_in_fp32_modules_strict = {"k_norm"}
    shard(model, Layout(1, 2, 2))
    materialize(model, "cpu")
    load_weights(model, folder)
    export_hf(model, folder.parent / "out", dtype=torch.bfloat16)
    streamed = {name: tensor.clone() for name, tensor in stream_hf_tensors(model, dtype=torch.bfloat16)}
    assert {tensor.dtype for tensor in streamed.values()} == {torch.bfloat16, torch.float32}
    dist.barrier()
    assert_same(streamed, contents(folder.parent / "out"))


def test_two_dtypes_in_one_message(run_ranks: Any, tmp_path: Path) -> None:
    """Each rank has one value of q_norm: k_norm, which is wider, would begin at an odd offset behind it."""
    save_tiny(tmp_path / "hub", "qwen3_moe")
    run_ranks(stream_two_dtypes, 4, tmp_path / "hub")


TOPOLOGIES: dict[str, tuple[dict[str, int], ParallelOptions]] = {
    "ep4": ({"ep_size": 4}, ParallelOptions()),
    "ep2-efsdp2": ({"ep_size": 2}, ParallelOptions()),
    "R2-ep2": ({"mp_replicate_size": 2, "ep_size": 2}, ParallelOptions()),
    "R2-edp1-ep2": ({"mp_replicate_size": 2, "edp_size": 1, "ep_size": 2}, ParallelOptions()),
    "tp2-ep2": ({"tp_size": 2, "ep_size": 2}, ParallelOptions()),
    "ep2-cp2": ({"cp_size": 2, "ep_size": 2}, ParallelOptions()),
    "path-a": ({}, ParallelOptions(expert_parallel=False)),
    "whole-attention": ({"ep_size": 2}, ParallelOptions(fsdp_ignored_modules=("model.layers.*.self_attn",))),
    "checkpointing-offload": ({"ep_size": 2}, ParallelOptions(activation_checkpointing=True, offload=True)),
}


def stream_topologies(rank: int, folder: Path) -> None:
    for name, (sizes, options) in TOPOLOGIES.items():
        model = from_pretrained(folder, build_meshes("cpu", **sizes), options=options)
        stream_beside_export(model, folder.parent / name)


def test_every_topology(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    run_ranks(stream_topologies, 4, tmp_path / "hub")


def stream_to_one(rank: int, folder: Path, dst: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    model = from_pretrained(folder, build_meshes("cpu", mp_replicate_size=2, ep_size=2))
    with counted_messages() as counter:
        streamed = {name: tensor.clone() for name, tensor in stream_hf_tensors(model, BUCKET_MIB, dst=dst)}
    return streamed, counter


def test_only_one_rank_receives(run_ranks: Any, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "hub", "qwen3_moe")
    num_bytes = sum(parameter.nbytes for parameter in reference.parameters())
    results = run_ranks(stream_to_one, 4, tmp_path / "hub", 2)
    for rank, (streamed, counter) in enumerate(results):
        if rank == 2:
            assert_same(streamed, contents(tmp_path / "hub"))
            assert num_bytes / 3 < counter["irecv"] < num_bytes * 2 / 3 and not counter["isend"]
        else:  # those of the other replica hold nothing that rank 2's own doesn't
            assert not streamed and not counter["irecv"] and bool(counter["isend"]) == (rank == 3)


@pytest.mark.parametrize("model_type", ["kimi_linear", "inkling2_text", "aria_text", "ernie4_5_moe", "gpt_oss"])
def test_other_layouts_in_one_process(model_type: str, tmp_path: Path) -> None:
    """Transposed, alternating, packed together: no rank has anything to send."""
    model = save_random(tmp_path / "hub", model_type)
    export_hf(model, tmp_path / "out", dtype=torch.bfloat16)
    streamed = dict(stream_hf_tensors(model, 1 / 1024, dtype=torch.bfloat16))
    assert_same(streamed, contents(tmp_path / "out"))
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in streamed.values()}


def test_experts_one_by_one_or_stacked(tmp_path: Path) -> None:
    """In-memory names; and those that transformers writes for a family whose files on the Hub are stacked."""
    model = save_tiny(tmp_path / "apart", "qwen3_moe")
    stacked = dict(stream_hf_tensors(model, experts="stacked"))
    assert_same(stacked, model.state_dict())
    assert_same(dict(stream_hf_tensors(model, experts="per_expert")), contents(tmp_path / "apart"))
    model = save_tiny(tmp_path / "stacked", "qwen3_5_moe_text")
    assert any(".experts.0." in name for name in contents(tmp_path / "stacked"))
    assert_same(dict(stream_hf_tensors(model, experts="per_expert")), contents(tmp_path / "stacked"))
    assert dict(stream_hf_tensors(model, experts="stacked")).keys() == dict(stream_hf_tensors(model)).keys()


def test_experts_of_a_text_model_keep_the_prefix_of_its_files(tmp_path: Path) -> None:
    """Files of a model for several media, stacked; the model is its text part."""
    hub = HUB_MODELS["Qwen3.5-35B-A3B"]
    write_folder(tmp_path, hub, hub.few_layers)
    model = build_on_meta(tmp_path, attn_implementation=None, dtype=torch.bfloat16)
    remember_source(model, match_folder(model, tmp_path))
    grids, shapes = find_layout(model, state_tensors(model))
    apart, new_shapes = name_experts(model, grids, shapes, "per_expert")
    name = next(name for name in grids if name.endswith(".experts.down_proj"))
    (tile,) = grids[name].tiles
    assert tile.key.startswith("model.language_model.") and not name.startswith("model.language_model.")
    prefix = tile.key.removesuffix(".down_proj")
    assert [tile.key for tile in apart[name].tiles][:2] == [f"{prefix}.{e}.down_proj.weight" for e in range(2)]
    assert new_shapes.keys() == {tile.key for grid in apart.values() for tile in grid.tiles}


def test_families_without_such_names_refuse(tmp_path: Path) -> None:
    model = save_random(tmp_path / "hub", "gpt_oss")
    with pytest.raises(ValueError, match=r"experts='per_expert': transformers has no names for single experts"):
        stream_hf_tensors(model, experts="per_expert")
    with pytest.raises(ValueError, match="experts='both' must be"):
        stream_hf_tensors(model, experts="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_mib=0 must be"):
        stream_hf_tensors(model, 0)
    with pytest.raises(ValueError, match=r"dst=3 must be one of the model's ranks, \[0\]"):
        stream_hf_tensors(model, dst=3)


def test_what_the_family_keeps_in_fp32_is_not_cast(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hub", "mixtral")
    model._keep_in_fp32_modules_strict = {"norm"}
    for name, tensor in stream_hf_tensors(model, dtype=torch.bfloat16):
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def wrap(model: Any) -> Any:
    """Checkpoint wrappers inside, torch.compile's around a layer and around it all."""
    layers = model.model.layers
    layers[0].mlp = checkpoint_wrapper(layers[0].mlp)
    layers[1] = torch.compile(layers[1], backend="eager")
    return torch.compile(model, backend="eager")


def test_names_are_free_of_wrappers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "hub", "qwen3_moe", tie_word_embeddings=True)
    model = wrap(save_tiny(tmp_path / "again", "qwen3_moe", tie_word_embeddings=True))
    assert any("_orig_mod" in name for name in model.state_dict())
    assert_same(dict(stream_hf_tensors(model)), contents(tmp_path / "hub"))
    names = set(dict(stream_hf_tensors(model, experts="stacked")))
    assert names == set(reference.state_dict()) - {"lm_head.weight"}


def on_meta_mesh(module: nn.Module) -> None:
    """Half of each parameter's rows on the host, of a mesh of two accelerators; meta stands for them."""
    mesh = DeviceMesh("meta", [0, 1], _init_backend=False, _rank=0)
    for owner in list(module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
            local = parameter.detach().chunk(2)[0]
            sharded = DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
            owner.register_parameter(name, nn.Parameter(sharded, requires_grad=False))


class BroughtOver(TorchDispatchMode):
    """Bytes that are copied from the host to the device that meta stands for."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_of_what_lies_on_the_host_only_a_bucket_comes_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "hub", "qwen3_moe")
    shapes = {name: tuple(tensor.shape) for name, tensor in contents(tmp_path / "hub").items()}
    on_meta_mesh(model)
    monkeypatch.setattr(stream_module, "raise_together", lambda *_, **__: None)
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: [])
    local = [tensor.to_local() for tensor in model.parameters()]
    stream = stream_hf_tensors(model, BUCKET_MIB, dtype=torch.bfloat16)
    streamed = {}
    with LiveBytes(iter(()), "meta") as device, LiveBytes(iter(local)) as host, BroughtOver() as copies:
        for name, tensor in stream:
            assert tensor.device.type == "meta"
            streamed[name] = tuple(tensor.shape)
    assert streamed == shapes
    assert BUCKET_MIB * 2**20 / 2 < device.peak <= BUCKET_MIB * 2**20
    assert host.peak == 0  # nothing but what is cast on its way
    assert copies.num_bytes == sum(tensor.numel() for tensor in local) * 2  # each value once, in its dtype there


def small(folder: Path) -> Any:
    return from_pretrained(folder, build_meshes("cpu", ep_size=2))


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def take(model: Any, num: int | None, **options: Any) -> int:
    """Take ``num`` tensors and break off; all of them: None."""
    num_taken = 0
    with contextlib.closing(stream_hf_tensors(model, BUCKET_MIB, **options)) as stream:
        for _ in stream:
            num_taken += 1
            if num_taken == num:
                break
    return num_taken


def go_wrong(rank: int, folder: Path) -> list[str]:
    """What each rank says where rank 1 does otherwise; afterwards the stream works again."""
    model = small(folder)
    messages = [message_of(lambda: take(model, 1 if rank else None))]
    last = take(model, None)
    messages.append(message_of(lambda: take(model, last if rank else None)))  # its last tensor, but not the end
    messages.append(message_of(lambda: take(model, 1)))  # all of them break off
    messages.append(message_of(lambda: take(model, None, experts="both" if rank else None)))
    messages.append(message_of(lambda: take(model, None, dtype=torch.bfloat16 if rank else None)))
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(stream_module._Ring, "pack", out_of_memory)
        messages.append(message_of(lambda: take(model, None)))
    with contextlib.closing(stream_hf_tensors(model, BUCKET_MIB)) as first:
        next(first)
        messages.append(message_of(lambda: take(model, None)))
        assert len(list(first)) == last - 1
    assert take(model, None) == last
    dist.barrier()
    return messages


def out_of_memory(*_: object) -> None:
    raise MemoryError("no memory for the bucket")


def test_whoever_stops_or_fails_fails_all(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    first, second = run_ranks(go_wrong, 2, tmp_path / "hub")
    failed = "PeerFailed: streaming weights failed on another rank; its own message says why."
    not_in_step = "RuntimeError: streaming weights: the ranks aren't in step."
    under_way = "RuntimeError: streaming weights: a stream of this model is under way."
    assert first[:2] == [failed, failed] and second[:2] == ["done", "done"]
    assert first[2] == second[2] == "done"
    assert first[3] == failed and second[3].startswith("ValueError: experts='both' must be")
    assert first[4].startswith(not_in_step) and second[4].startswith(not_in_step)
    assert first[5] == failed and second[5] == "MemoryError: no memory for the bucket"
    assert first[6].startswith(under_way) and second[6].startswith(under_way)


def stream_after_a_forward(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """The root keeps its parameters whole after a forward; between two tensors a rank may compute."""
    model = small(folder)
    tokens = torch.arange(8).reshape(1, 8)
    model(tokens)
    streamed = {}
    for name, tensor in stream_hf_tensors(model, BUCKET_MIB):
        streamed[name] = tensor.clone()
        if len(streamed) == 2:
            model(tokens)
    assert all(isinstance(parameter, DTensor) for parameter in model.model.layers.parameters())
    return streamed


def test_a_forward_before_and_in_between(run_ranks: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hub", "qwen3_moe")
    for streamed in run_ranks(stream_after_a_forward, 2, tmp_path / "hub"):
        assert_same(streamed, contents(tmp_path / "hub"))


def test_the_stream_loads_another_model(tmp_path: Path) -> None:
    model, other = save_tiny(tmp_path / "one", "qwen2_moe"), save_tiny(tmp_path / "two", "qwen2_moe")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(dict(stream_hf_tensors(model, experts="stacked")))
    assert_same_state(other, model)
