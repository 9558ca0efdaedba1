"""Reshard plans: every element arrives once and right, with the fewest bytes, whatever the layouts on both sides."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from bench.engine_layouts import MoeShape, build_target, engine_ranks
from moesaic.meshes import build_meshes
from moesaic.ops.placements import Block, local_shape
from moesaic.parallel.apply import ParallelOptions, parallelize
from moesaic.reshard import transfers
from moesaic.reshard.blocks import describe_source, find_holdings, replicated
from moesaic.reshard.layout import Copy, Held, Holding, SourceLayout, SourceTensor, TargetLayout, TargetTensor
from moesaic.reshard.messages import number_layers
from moesaic.reshard.transfers import plan_transfers
from moesaic.weights.agree import state_tensors
from tests.reshard_plans import (
    check,
    load_whole,
    random_values,
    run_in_one_process,
    shard_values,
)

SHAPE = MoeShape(
    num_layers=3,
    hidden_size=16,
    num_experts=8,
    intermediate_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=37,
)
UNEVEN = dataclasses.replace(SHAPE, num_experts=7)
TARGETS = ("tp1", "tp2", "tp4", "ep2", "tp2ep2", "dp2tp2", "pp2")
PATH_A = ParallelOptions(expert_parallel=False)


def build_model(shape: MoeShape, **changes: object) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=2,
        **changes,
    )
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@functools.cache
def trained(
    world_size: int,
    shape: MoeShape = SHAPE,
    options: ParallelOptions = ParallelOptions(),  # noqa: B008
    **sizes: int,
) -> SourceLayout:
    """A model sharded by ``parallelize`` on ranks that aren't there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        model = parallelize(build_model(shape), build_meshes("cpu", **sizes), None, options)
        return describe_source(model, dtype=torch.bfloat16)
    finally:
        dist.destroy_process_group()


SOURCES = {
    "ep4": lambda: trained(4, ep_size=4),
    "ep2-efsdp2": lambda: trained(4, ep_size=2),
    "hsdp-ep2": lambda: trained(4, mp_replicate_size=2, ep_size=2),
    "tp2-ep2": lambda: trained(4, tp_size=2, ep_size=2),
    "ep2-cp2": lambda: trained(4, cp_size=2, ep_size=2),
    "path-a": lambda: trained(4, options=PATH_A),
    "hsdp-tp2-cp2": lambda: trained(8, tp_size=2, cp_size=2, mp_replicate_size=2, ep_size=2),
    "uneven ep4": lambda: trained(4, UNEVEN, ep_size=4),
    "plain": lambda: replicate_all(1),
    "replicated": lambda: replicate_all(3),
    "strided": lambda: shard_by((2, 2), lambda held: (_StridedShard(0, split_factor=2), Shard(0))),
    "strided, unevenly": lambda: shard_by((3, 2), lambda held: (_StridedShard(0, split_factor=2), Shard(0))),
    "strided, replicated": lambda: shard_by((2, 2), lambda held: (_StridedShard(0, split_factor=2), Replicate())),
}


def replicate_all(num_ranks: int) -> SourceLayout:
    source = trained(4, ep_size=4)
    tensors = (dataclasses.replace(h, holdings=replicated(h.shape, range(num_ranks))) for h in source.tensors)
    return SourceLayout(num_ranks=num_ranks, tensors=tuple(tensors))


def shard_by(mesh_shape: tuple[int, ...], choose: Callable[[Held], Sequence[Placement]]) -> SourceLayout:
    source = trained(4, ep_size=4)
    num_ranks = int(torch.Size(mesh_shape).numel())
    tensors = [
        dataclasses.replace(held, holdings=find_holdings(held.shape, mesh_shape, range(num_ranks), choose(held)))
        for held in source.tensors
    ]
    return SourceLayout(num_ranks=num_ranks, tensors=tuple(tensors))


# Every third pair, so that each source and each target is among them; the others in `make test-slow`.
PAIRS = [
    pytest.param(origin, target, marks=[] if (row + column) % 3 == 0 else pytest.mark.slow, id=f"{origin}-{target}")
    for row, origin in enumerate(SOURCES)
    for column, target in enumerate(TARGETS)
]


@pytest.mark.parametrize(("origin", "target"), PAIRS)
def test_every_topology_to_every_engine(origin: str, target: str) -> None:
    source = SOURCES[origin]()
    shape = UNEVEN if origin == "uneven ep4" else SHAPE
    layouts = [build_target(shape, rank) for rank in engine_ranks(target, shape.num_layers)]
    plan = plan_transfers(source, layouts, max_message_bytes=4000)
    check(plan, source, layouts, [None] * len(layouts))
    assert all(plan.bytes_received(t) == plan.lower_bound(t) for t in range(len(layouts)))


def test_each_engine_rank_in_a_trainers_process_keeps_what_it_has() -> None:
    source = trained(4, mp_replicate_size=2, ep_size=2)
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)] * 2
    apart = plan_transfers(source, layouts)
    cases: list[tuple[list[int], list[int | None]]] = [([0, 1, 2, 3], [0, 1, 2, 3]), ([2, 9, 0, 5], [2, None, 0, None])]
    for processes, at_hand in cases:
        plan = plan_transfers(source, layouts, target_process=processes, max_message_bytes=999)
        check(plan, source, layouts, at_hand)
        for target, rank in enumerate(at_hand):
            assert plan.bytes_received(target) == plan.lower_bound(target)
            assert plan.bytes_received(target) + plan.bytes_local(target) == apart.bytes_received(target)
            assert (plan.bytes_local(target) > 0) == (rank is not None)


def test_one_process_copies_all() -> None:
    source = SOURCES["plain"]()
    (layout,) = (build_target(SHAPE, rank) for rank in engine_ranks("tp1", SHAPE.num_layers))
    plan = plan_transfers(source, [layout], target_process=[0])
    check(plan, source, [layout], [0])
    assert plan.num_processes == 1 and plan.bytes_received(0) == 0 and plan.imbalance == 1


@pytest.mark.parametrize(("origin", "most"), [("ep4", 1.02), ("hsdp-ep2", 1.02), ("tp2-ep2", 1.02), ("path-a", 1.02)])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_senders_share_the_work(origin: str, most: float, num_engines: int) -> None:
    source = SOURCES[origin]()
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)] * num_engines
    plan = plan_transfers(source, layouts, min_share_bytes=32)
    assert plan.imbalance <= most


@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_replicas_share_even_one_large_tensor(num_engines: int) -> None:
    held = Held(
        name="w",
        shape=(100, 30),
        dtype=torch.float32,
        wire_dtype=torch.float32,
        holdings=replicated((100, 30), range(7)),
    )
    source = SourceLayout(num_ranks=7, tensors=(held,))
    layout = whole_tensor_layout(held, torch.float32)
    plan = plan_transfers(source, [layout] * num_engines, min_share_bytes=16)
    check(plan, source, [layout] * num_engines, [None] * num_engines)
    assert plan.imbalance <= 1.05


def whole_tensor_layout(held: Held, dtype: torch.dtype, name: str = "t") -> TargetLayout:
    strides = [1]
    for size in reversed(held.shape[1:]):
        strides.insert(0, strides[0] * size)
    copy = Copy(
        source=held.name,
        target=name,
        shape=held.shape,
        source_start=(0,) * len(held.shape),
        source_dims=tuple(range(len(held.shape))),
        source_steps=(1,) * len(held.shape),
        target_offset=0,
        target_strides=tuple(strides),
    )
    target = TargetTensor(name=name, shape=held.shape, dtype=dtype)
    return TargetLayout(tensors=(target,), copies=(copy,), fills=())


@pytest.mark.parametrize(
    ("stored", "exported", "kept", "travels"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16),  # the engine's files were rounded twice
        (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16),
    ],
)
def test_the_narrower_dtype_travels(
    stored: torch.dtype, exported: torch.dtype, kept: torch.dtype, travels: torch.dtype
) -> None:
    held = Held(name="w", shape=(64, 9), dtype=stored, wire_dtype=exported, holdings=replicated((64, 9), [0]))
    layout = whole_tensor_layout(held, kept)
    source = SourceLayout(num_ranks=1, tensors=(held,))
    plan = plan_transfers(source, [layout])
    (message,) = plan.messages_of(0).sends
    assert {piece.wire_dtype for piece in message.pieces} == {travels}
    whole = random_values(source)
    ((target,), _) = run_in_one_process(plan, [layout], shard_values(source, whole))
    assert torch.equal(target["t"].float(), load_whole(layout, source, whole)["t"].float())


def test_a_repeated_element_travels_once() -> None:
    held = Held(name="w", shape=(5,), dtype=torch.float32, wire_dtype=torch.float32, holdings=replicated((5,), [0]))
    copy = Copy(
        source="w",
        target="t",
        shape=(3, 5, 2),
        source_start=(0,),
        source_dims=(None, 0, None),
        source_steps=(0, 1, 0),
        target_offset=0,
        target_strides=(10, 2, 1),
    )
    described = TargetTensor(name="t", shape=(3, 5, 2), dtype=torch.float32)
    layout = TargetLayout(tensors=(described,), copies=(copy,), fills=())
    source = SourceLayout(num_ranks=1, tensors=(held,))
    plan = plan_transfers(source, [layout])
    check(plan, source, [layout], [None])
    assert plan.bytes_received(0) == plan.lower_bound(0) == 20


def test_replicas_may_lie_at_different_places_of_their_local_tensors() -> None:
    upper, lower = Block((0, 0), (0, 0), (2, 3)), Block((2, 0), (2, 0), (2, 3))
    alone = Block((2, 0), (0, 0), (2, 3))
    holdings = (Holding(holders=((0, upper),)), Holding(holders=((0, lower), (1, alone))))
    held = Held(name="w", shape=(4, 3), dtype=torch.float32, wire_dtype=torch.float32, holdings=holdings)
    source, layout = SourceLayout(num_ranks=2, tensors=(held,)), whole_tensor_layout(held, torch.float32)
    plan = plan_transfers(source, [layout])
    check(plan, source, [layout], [None])
    assert [plan.bytes_sent(rank) for rank in range(2)] == [24, 24]


def test_no_number_begins_at_an_odd_offset_of_a_message() -> None:
    narrow, wide = (
        Held(name=name, shape=(3,), dtype=dtype, wire_dtype=dtype, holdings=replicated((3,), [0]))
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float32))
    )
    layouts = [whole_tensor_layout(held, held.dtype, held.name) for held in (narrow, wide)]
    both = TargetLayout(
        tensors=layouts[0].tensors + layouts[1].tensors, copies=layouts[0].copies + layouts[1].copies, fills=()
    )
    plan = plan_transfers(SourceLayout(num_ranks=1, tensors=(narrow, wide)), [both])
    (message,) = plan.messages_of(0).sends
    assert [piece.source.name for piece in message.pieces] == ["b", "a"]


def test_equal_layouts_are_planned_once_and_alike_in_every_process() -> None:
    source = trained(4, ep_size=2)
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)] * 8
    plan = plan_transfers(source, layouts)
    source, layouts = pickle.loads(pickle.dumps(source)), [pickle.loads(pickle.dumps(layout)) for layout in layouts]
    tensors = (pickle.loads(pickle.dumps(held)) for held in source.tensors)  # nothing shared any more
    again = plan_transfers(dataclasses.replace(source, tensors=tuple(tensors)), layouts)
    assert plan.summary().num_layouts == again.summary().num_layouts == 2
    assert plan.fingerprint == again.fingerprint
    assert [plan.messages_of(p) for p in range(20)] == [again.messages_of(p) for p in range(20)]
    assert plan_transfers(source, layouts, max_message_bytes=10**6).fingerprint != plan.fingerprint
    assert plan_transfers(source, layouts[1:] + layouts[:1]).fingerprint != plan.fingerprint


def test_a_plan_may_be_sent_and_shows_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    source = trained(4, ep_size=2)
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)]
    plan = plan_transfers(source, layouts, target_process=[4, 1])
    before = plan.fingerprint
    sent = pickle.dumps(plan)
    received = pickle.loads(sent)
    assert received.fingerprint == before
    assert [received.messages_of(p) for p in range(5)] == [plan.messages_of(p) for p in range(5)]
    monkeypatch.setattr(transfers, "PLAN_FORMAT", transfers.PLAN_FORMAT + 1)  # in a process with another version
    for other in (plan_transfers(source, layouts, target_process=[4, 1]), pickle.loads(sent)):
        assert other.fingerprint != before and other.messages_of(4).fingerprint == other.fingerprint


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_after_a_view(was_on: bool) -> None:
    plan = plan_transfers(trained(4, ep_size=2), [build_target(SHAPE, engine_ranks("tp1", SHAPE.num_layers)[0])])
    set_collector = {True: gc.enable, False: gc.disable}
    try:
        set_collector[was_on]()
        plan.messages_of(0)
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


@pytest.mark.parametrize("origin", ["ep2-efsdp2", "hsdp-ep2"])
def test_there_is_one_message_per_layer_and_pair(origin: str) -> None:
    source = SOURCES[origin]()
    layer_of, num_layers = number_layers([held.name for held in source.tensors])
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)]
    plan = plan_transfers(source, layouts)
    assert num_layers == SHAPE.num_layers + 2
    for view in map(plan.messages_of, range(6)):
        places = [
            (message.source_rank, message.target_rank, *{layer_of[piece.source.name] for piece in message.pieces})
            for message in (*view.sends, *view.receives)
        ]
        assert all(len(place) == 3 for place in places) and len(set(places)) == len(places)
        assert [place[2] for place in places] == sorted(place[2] for place in places)


def test_layers_follow_the_models_order() -> None:
    names = [
        "m.embed",
        "m.layers.0.a",
        "m.layers.0.x.3.b",
        "m.layers.1.a",
        "m.norm",
        "head",
        "v.0.a",
        "m.layers.0.c",
        "z",
    ]
    layer_of, count = number_layers(names)
    assert [layer_of[name] for name in names] == [0, 1, 1, 2, 3, 3, 4, 1, 5] and count == 6
    assert number_layers(["0.a", "1.a", "1.b"]) == ({"0.a": 0, "1.a": 1, "1.b": 1}, 2)


def test_the_plan_reads_well() -> None:
    source = trained(4, ep_size=2)
    layouts = [build_target(SHAPE, rank) for rank in engine_ranks("tp2", SHAPE.num_layers)] * 20
    plan = plan_transfers(source, layouts)
    content = json.loads(plan.to_json())
    assert content["total"]["received"] == content["total"]["sent"] == content["total"]["lower_bound"]
    assert sum(map(sum, content["traffic"]["num_bytes"])) == content["total"]["sent"]
    assert sum(kind["bytes"] for kind in content["kinds"]) == content["total"]["sent"]
    text = plan.table()
    assert "4 trainer ranks -> 40 engine ranks (2 layouts)" in text and "1.0000 of the lower bound" in text
    assert "model.layers.*.mlp.experts.gate_up_proj" in text and "0..3" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "cp_size": 2, "mp_replicate_size": 2, "ep_size": 2}, {"ep_size": 4}])
def test_every_rank_describes_the_same_and_holds_what_that_says(sizes: dict[str, int]) -> None:
    expected = trained(8, UNEVEN, **sizes)
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            model = parallelize(build_model(UNEVEN), build_meshes("cpu", **sizes))
            assert describe_source(model, dtype=torch.bfloat16) == expected
            for held, tensor in zip(expected.tensors, state_tensors(model).values(), strict=True):
                blocks = [block for its in held.holdings for holder, block in its.holders if holder == rank]
                assert isinstance(tensor, DTensor)
                assert torch.Size(local_shape(blocks, tensor.ndim)).numel() == tensor.to_local().numel(), held.name
                assert not blocks or local_shape(blocks, tensor.ndim) == tensor.to_local().shape
        finally:
            dist.destroy_process_group()


def test_a_thousand_ranks_are_described_in_one_process() -> None:
    source = trained(1024, ep_size=8, mp_replicate_size=2)
    assert source.num_ranks == 1024
    for held in source.tensors:
        ranks = [rank for holding in held.holdings for rank, _ in holding.holders]
        assert all(len(holding.holders) % 2 == 0 for holding in held.holdings) and max(ranks) < 1024
        covered = sum(torch.Size(holding.box.size).numel() for holding in held.holdings)
        assert covered == torch.Size(held.shape).numel(), held.name


def test_tied_and_plain_tensors_are_described_once() -> None:
    source = describe_source(build_model(SHAPE, tie_word_embeddings=True), num_ranks=3)
    names = [held.name for held in source.tensors]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert all([rank for rank, _ in held.holdings[0].holders] == [0, 1, 2] for held in source.tensors)
    assert all(held.wire_dtype == torch.float32 for held in source.tensors)


def test_mistakes_are_named() -> None:
    source = trained(4, ep_size=2)
    (layout,) = (build_target(SHAPE, rank) for rank in engine_ranks("tp1", SHAPE.num_layers))
    with pytest.raises(ValueError, match=r"target_process=\[4, 4\]: 2 different numbers"):
        plan_transfers(source, [layout, layout], target_process=[4, 4])
    with pytest.raises(ValueError, match="max_message_bytes=0"):
        plan_transfers(source, [layout], max_message_bytes=0)
    lost = dataclasses.replace(source, tensors=source.tensors[1:])
    with pytest.raises(ValueError, match=r"the trained model has no model\.embed_tokens\.weight"):
        plan_transfers(lost, [layout])
    with pytest.raises(ValueError, match="its shape is"):
        plan_transfers(source, [build_target(dataclasses.replace(SHAPE, vocab_size=99), engine_ranks("tp1", 3)[0])])
    first = source.tensors[0]
    for shape, dtype in (((first.shape[0] - 1, first.shape[1]), torch.bfloat16), (first.shape, torch.float16)):
        traced = dataclasses.replace(layout, sources=(SourceTensor(name=first.name, shape=shape, dtype=dtype),))
        with pytest.raises(
            ValueError, match=r"reads model\.embed_tokens\.weight as .*sends \(37, 16\) of torch\.bfloat16"
        ):
            plan_transfers(source, [traced])
    partly = dataclasses.replace(source.tensors[0], holdings=source.tensors[0].holdings[1:])
    with pytest.raises(ValueError, match="don't cover"):
        plan_transfers(dataclasses.replace(source, tensors=(partly, *source.tensors[1:])), [layout])
