"""A loader's trace, replayed, is bitwise the loader: on values, and on tensors whose elements are their own index."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.record import holds
from moesaic.reshard.resolve import replay
from moesaic.reshard.trace import trace_loader
from tests.tiny_engine import (
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    RANKS,
    Load,
    Pairs,
    Tensors,
    TinyEngine,
    describe,
    encode,
    make_files,
    random_view,
)


def assign(p: torch.Tensor, index: Any, value: torch.Tensor | float) -> object:
    p[index] = value
    return p


def one(load: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[Tensors], Load]:
    """A loader of one tensor ``w`` of the files into one parameter ``p``."""

    def bind(params: Tensors) -> Load:
        return lambda weights: [load(params["p"], tensor) for _, tensor in weights]

    return bind


def check(
    bind: Callable[[Tensors], Load], params: Mapping[str, torch.Tensor], files: Mapping[str, torch.Tensor]
) -> TargetLayout:
    """The trace, replayed, equals the loader itself: on the values, and on indices."""
    for case in (files, encode(files)):
        dtypes = {name: torch.int64 if case is not files else param.dtype for name, param in params.items()}
        real = {name: torch.full_like(param, -7, dtype=dtypes[name]) for name, param in params.items()}
        bind(real)((key, tensor.clone()) for key, tensor in case.items())
        traced = {name: torch.full_like(param, -7, dtype=dtypes[name]) for name, param in params.items()}
        layout = trace_loader(bind(traced), traced, describe(case))
        assert all((param == -7).all() for param in traced.values()), "parameters aren't touched"
        replayed = replay(layout, case)
        assert replayed.keys() == real.keys()
        for name, tensor in real.items():
            assert torch.equal(replayed[name], tensor), name
    return layout


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_engine_loader_replayed_is_bitwise_the_loader(rank: dict[str, Any], stacked: bool, tied: bool) -> None:
    files = make_files(stacked=stacked, tied=tied)

    def may_skip(key: str) -> bool:
        return "ep_size" in rank and ".experts." in key

    for case in (files, encode(files)):
        dtype = next(iter(case.values())).dtype
        real = TinyEngine(**rank, tied=tied, dtype=dtype)
        real.load((key, tensor.clone()) for key, tensor in case.items())
        traced = TinyEngine(**rank, tied=tied, dtype=dtype)
        layout = trace_loader(traced.load, traced.params, describe(case), may_skip=may_skip)
        replayed = replay(layout, case)
        assert list(replayed) == [name for name in real.params if not (tied and name == "head.weight")]
        for name, tensor in replayed.items():
            assert torch.equal(tensor, real.params[name]), name
    written = sum(copy.num_elements for copy in layout.copies) + sum(math.prod(fill.shape) for fill in layout.fills)
    assert written == sum(tensor.numel() for tensor in replayed.values())
    is_last = rank.get("tp_rank", 0) == rank.get("tp_size", 1) - 1
    assert len(layout.fills) == (2 - tied if is_last else 0)


def test_experts_of_a_stacked_key_are_one_copy() -> None:
    engine = TinyEngine(tp_size=2, tp_rank=1)
    layout = trace_loader(engine.load, engine.params, describe(make_files(stacked=True)))
    w13 = [copy for copy in layout.copies if copy.target == "layers.0.w13"]
    assert [copy.shape for copy in w13] == [(NUM_EXPERTS, INNER // 2, HIDDEN)] * 2
    assert [copy.source_start for copy in w13] == [(0, INNER // 2, 0), (0, INNER + INNER // 2, 0)]
    assert [copy.target_offset for copy in w13] == [0, INNER // 2 * HIDDEN]


# (name, loader of w [4, 6] into p, shape of p)
MOVES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], tuple[int, ...]]] = {
    "transpose": (lambda p, w: p.copy_(w.t()), (6, 4)),
    "write through a transposed view": (lambda p, w: p.t().copy_(w), (6, 4)),
    "flatten": (lambda p, w: p.copy_(w.flatten()), (24,)),
    "reshape across rows": (lambda p, w: p.copy_(w.view(3, 8)), (3, 8)),
    "part of a flat view": (lambda p, w: p.copy_(w.view(-1)[5:20]), (15,)),
    "every other row": (lambda p, w: p.copy_(w[1::2]), (2, 6)),
    "steps that cross rows": (lambda p, w: p.copy_(w.view(-1)[1:23:4]), (6,)),
    "reshape of a transpose": (lambda p, w: p.copy_(w.t().reshape(4, 6)), (4, 6)),
    "heads": (lambda p, w: p.copy_(w.view(2, 2, 6).transpose(0, 1).reshape(4, 6)), (4, 6)),
    "unflatten, permute": (lambda p, w: p.copy_(w.unflatten(1, (2, 3)).permute(2, 0, 1)), (3, 4, 2)),
    "narrow, chunk": (lambda p, w: [p[i].copy_(c) for i, c in enumerate(w.narrow(0, 1, 2).chunk(2, 1))], (2, 2, 3)),
    "unbind": (lambda p, w: [p[:, i].copy_(row) for i, row in enumerate(w.unbind(0))], (6, 4)),
    "item assignment": (lambda p, w: assign(p, slice(0, 4), w), (4, 6)),
    "constant assignment": (lambda p, w: [assign(p, 0, 2), p[1:].copy_(w)], (5, 6)),
    "a diagonal": (lambda p, w: p.copy_(w.diagonal()), (4,)),
    "cat": (lambda p, w: p.copy_(torch.cat([w[2:], w[:2]])), (4, 6)),
    "cat along columns, then rows of it": (lambda p, w: p.copy_(torch.cat([w[:, 3:], w], 1)[1:3, 1:8]), (2, 7)),
    "cat with zeros": (lambda p, w: p.copy_(torch.cat([w, torch.zeros(2, 6, dtype=w.dtype)])), (6, 6)),
    "stack": (lambda p, w: p.copy_(torch.stack([w[:2], w[2:]], 1)), (2, 2, 6)),
    "stack of stacks": (lambda p, w: p.copy_(torch.stack([torch.stack([w, w]), torch.stack([w, w])])), (2, 2, 4, 6)),
    "clone, then flat": (lambda p, w: p.copy_(w.t().contiguous().view(-1)[3:17]), (14,)),
    "clone that keeps strides": (lambda p, w: p.copy_(w.t().clone()[1:]), (5, 4)),
    "broadcast": (lambda p, w: p.copy_(w[0]), (3, 6)),
    "expand between": (lambda p, w: p.copy_(w[:, None].expand(4, 2, 6)), (4, 2, 6)),
    "repeat": (lambda p, w: p.copy_(w.repeat(2, 1, 2)), (2, 4, 12)),
    "repeat_interleave": (lambda p, w: p.copy_(w.repeat_interleave(2, 0)), (8, 6)),
    "pad": (lambda p, w: p.copy_(torch.nn.functional.pad(w, (1, 2, 0, 1), value=3)), (5, 9)),
    "index_select": (lambda p, w: p.copy_(w.index_select(0, torch.tensor([3, 0, 0]))), (3, 6)),
    "interleave halves": (lambda p, w: p.copy_(w.view(2, 2, 6).transpose(0, 1).flatten(0, 1)), (4, 6)),
    "fill, then copy over it": (lambda p, w: [p.zero_(), p[1:5, 2:].copy_(w[:, :4])], (7, 6)),
    "copy, then fill over it": (lambda p, w: [p.copy_(w), p[2:, 1::2].fill_(5)], (4, 6)),
    "zero_ of the source": (lambda p, w: [w.zero_(), p.copy_(w)], (4, 6)),
    "zero_ of a part of the source": (lambda p, w: [w[1:3, ::2].zero_(), p.copy_(w)], (4, 6)),
    "copy within the source": (lambda p, w: [w[:2].copy_(w[2:].clone()), p.copy_(w)], (4, 6)),
    "a target read again": (lambda p, w: [p[:4].copy_(w), p[4:].copy_(p[1:3])], (6, 6)),
    "a buffer of real memory": (
        lambda p, w: [(b := torch.ones(5, 6, dtype=p.dtype))[1:].copy_(w), p.copy_(b)],
        (5, 6),
    ),
    "a buffer like the source": (
        lambda p, w: [(b := w.new_zeros(6, 6))[2:].copy_(w), b[:1].fill_(4), p.copy_(b.t())],
        (6, 6),
    ),
    "empty_like": (lambda p, w: [(b := torch.empty_like(w)).copy_(w), p.copy_(b)], (4, 6)),
    "full_like": (lambda p, w: [p[:4].copy_(w), p[4:].copy_(torch.full_like(w, 3))], (8, 6)),
    "to another device's copy": (lambda p, w: p.copy_(w.to(p.device, copy=True)), (4, 6)),
    "foreach": (lambda p, w: torch._foreach_copy_([p[:2], p[2:]], [w[2:], w[:2]]), (4, 6)),
    "under inference_mode": (
        lambda p, w: torch.inference_mode()(lambda: p.copy_(w.t().reshape(-1).contiguous().repeat_interleave(2)))(),
        (48,),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves_of_values_are_understood(move: str) -> None:
    load, shape = MOVES[move]
    check(one(load), {"p": torch.empty(shape)}, {"w": torch.randn(4, 6)})


@pytest.mark.parametrize("shape", [(), (1,), (1, 5, 1)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    layout = check(one(lambda p, w: p.copy_(w)), {"p": torch.empty(shape)}, {"w": torch.randn(shape)})
    assert len(layout.copies) == 1
    assert len(layout.copies[0].source_start) == len(shape)


def test_empty_tensors_need_nothing() -> None:
    layout = check(one(lambda p, w: p.copy_(w)), {"p": torch.empty(0, 3)}, {"w": torch.randn(0, 3)})
    assert layout.copies == ()


def test_casts_that_are_one_rounding_pass() -> None:
    files = {"w": torch.randn(4, 6) * 1e3}
    target = {"p": torch.empty(4, 6, dtype=torch.bfloat16)}
    for load in (
        lambda p, w: p.copy_(w),
        lambda p, w: p.copy_(w.to(torch.bfloat16)),
        lambda p, w: p.copy_(w.double()),
        lambda p, w: p.copy_(w.bfloat16().float()),
    ):
        real = {"p": target["p"].clone()}
        one(load)(real)(files.items())
        layout = trace_loader(one(load)(target), target, describe(files))
        assert torch.equal(replay(layout, files)["p"], real["p"])


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.copy_(w.to(torch.bfloat16)),
        lambda p, w: p.copy_(w.to(torch.float16)),
        lambda p, w: p.copy_(w.to(torch.float16).to(torch.bfloat16)),
    ],
)
def test_rounding_that_no_single_cast_gives_is_refused(load: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    target = {"p": torch.empty(4)}
    with pytest.raises(ValueError, match=r"w .*torch\.(bfloat16|float16)|w is rounded twice"):
        trace_loader(one(load)(target), target, {"w": ((4,), torch.float32)})


def test_which_dtype_holds_another() -> None:
    assert holds(torch.float32, torch.bfloat16)
    assert holds(torch.float32, torch.float16)
    assert holds(torch.bfloat16, torch.float8_e4m3fn)
    assert holds(torch.int64, torch.int32)
    assert not holds(torch.bfloat16, torch.float16)
    assert not holds(torch.float16, torch.bfloat16)
    assert not holds(torch.float32, torch.int32)
    assert not holds(torch.int8, torch.uint8)


def test_constants_are_rounded_to_the_target() -> None:
    target = {"p": torch.empty(4, dtype=torch.bfloat16)}
    layout = trace_loader(lambda weights: [target["p"].fill_(0.1), list(weights)], target, {})
    assert layout.fills[0].value == float(torch.tensor(0.1, dtype=torch.bfloat16))


NOT_UNDERSTOOD: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "arithmetic": (lambda p, w: p.copy_(w * 2), r"aten\.mul.* w of the files"),
    "in place": (lambda p, w: p.copy_(w.add_(1)), r"aten\.add_.* w of the files"),
    "in place on the target": (lambda p, w: [p.copy_(w), p.mul_(2)], r"aten\.mul_.* the engine's p"),
    "random": (lambda p, w: p.normal_(), r"aten\.normal_.* the engine's p"),
    "flip": (lambda p, w: p.copy_(w.flip(0)), r"aten\.flip"),
    "a look at a value": (lambda p, w: p.copy_(w) if w[0, 0] > 0 else None, r"aten\.gt.* w of the files"),
    "bytes of another dtype": (lambda p, w: p.copy_(w.view(torch.int32).view(torch.float32)), r"aten\.view\.dtype"),
    "an index": (lambda p, w: p.copy_(w[torch.tensor([1, 0, 2, 3])]), r"aten\.index\.Tensor"),
    "writing by an index": (lambda p, w: assign(p, torch.tensor([0, 1, 2, 3]), w), r"aten\.index_put_"),
    "values from elsewhere": (lambda p, w: p.copy_(torch.arange(24).view(4, 6)), r"aten\.copy_.* neither from"),
    "memory never written": (lambda p, w: p.copy_(torch.empty_like(w)), r"before anything is written"),
    "a target read too early": (lambda p, w: p.copy_(p.clone()), r"clone.*before anything is written"),
    "an expanded target": (lambda p, w: p[0].expand(4, 6).copy_(w), r"expanded"),
    "a temporary": (lambda p, w: p.copy_(torch.cat([w[:2], w[2:]]).sin()), r"aten\.sin.* made from w"),
    "negative padding": (lambda p, w: p.copy_(torch.nn.functional.pad(w, (-1, 1))), r"constant_pad_nd.*negative"),
    "under inference_mode": (lambda p, w: torch.inference_mode()(lambda: p.copy_(w.square()))(), r"aten\.pow|square"),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_what_is_not_understood_raises_with_operation_and_tensor(case: str) -> None:
    load, message = NOT_UNDERSTOOD[case]
    target = {"p": torch.empty(4, 6)}
    with pytest.raises(ValueError, match=message):
        trace_loader(one(load)(target), target, {"w": ((4, 6), torch.float32)})


def test_a_loader_cannot_swallow_what_was_not_understood() -> None:
    target = {"p": torch.empty(4, 6)}

    def load(weights: Pairs) -> None:
        for _, tensor in weights:
            try:
                target["p"].copy_(tensor * 2)
            except ValueError:
                target["p"].copy_(tensor)

    with pytest.raises(ValueError, match=r"aten\.mul"):
        trace_loader(load, target, {"w": ((4, 6), torch.float32)})


def test_a_loaders_own_error_comes_through() -> None:
    def load(weights: Pairs) -> None:
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter"):
        trace_loader(load, {"p": torch.empty(4)}, {"w": ((4,), torch.float32)})


def replace_data(p: torch.Tensor, w: torch.Tensor) -> None:
    p.copy_(w)
    p.data = p.data.t()


GAPS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "a column is left": (lambda p, w: p[:, 1:].copy_(w[:, 1:]), "leaves 4 of 24 elements of the engine's p"),
    "nothing is written": (lambda p, w: None, "leaves 24 of 24"),
    "every other row is left": (lambda p, w: p[::2].copy_(w[::2]), "leaves 12 of 24"),
    "a copy is overwritten": (lambda p, w: [p.copy_(w), p[1:3].copy_(w[:2])], "p twice, from w and from w"),
    "param.data is replaced": (replace_data, "another memory"),
}


@pytest.mark.parametrize("case", GAPS)
def test_coverage_gate(case: str) -> None:
    load, message = GAPS[case]
    target = {"p": torch.empty(4, 6)}
    with pytest.raises(ValueError, match=message):
        trace_loader(one(load)(target), target, {"w": ((4, 6), torch.float32)})


def test_sources_that_go_nowhere_are_refused_unless_allowed() -> None:
    target = {"p": torch.empty(4, 6)}
    files = {"w": ((4, 6), torch.float32), "experts.1": ((2,), torch.float32), "other": ((2,), torch.float32)}
    buffer = torch.empty(2)

    def load(weights: Pairs) -> None:
        for key, tensor in weights:
            if key == "w":
                target["p"].copy_(tensor)
            elif key == "other":
                buffer.copy_(tensor)  # not one of the targets

    with pytest.raises(ValueError, match=r"2 tensors of the files nowhere: experts\.1, other"):
        trace_loader(load, target, files)
    with pytest.raises(ValueError, match="1 tensors of the files nowhere: other"):
        trace_loader(load, target, files, may_skip=lambda key: "experts" in key)
    trace_loader(load, target, files, may_skip=lambda key: key != "w")


def test_targets_in_one_storage() -> None:
    flat = torch.empty(30)
    target = {"a": flat[:12].view(3, 4), "b": flat[12:24].view(4, 3), "tied": flat[:12].view(3, 4)}

    def load(weights: Pairs) -> None:
        for _, tensor in weights:
            target["b"].copy_(tensor)
            target["tied"].t().copy_(tensor)

    files = {"w": torch.randn(4, 3)}
    layout = trace_loader(load, target, describe(files))
    assert [tensor.name for tensor in layout.tensors] == ["a", "b"]
    replayed = replay(layout, files)
    assert torch.equal(replayed["a"], files["w"].t())
    assert torch.equal(replayed["b"], files["w"])
    with pytest.raises(ValueError, match="beyond the engine's a"):
        trace_loader(lambda weights: flat[6:18].zero_(), target, {})
    with pytest.raises(ValueError, match="share a part"):
        trace_loader(load, {**target, "c": flat[6:18]}, describe(files))
    with pytest.raises(ValueError, match=r"laid out with strides \(1, 4\)"):
        trace_loader(load, {"p": torch.empty(3, 4).t()}, describe(files))


def random_load(params: Tensors, weights: Pairs, seed: int) -> None:
    """Views, temporaries, constants and overlaid writes of all kinds, the same for the same seed."""
    choose = random.Random(seed)
    pool = []
    for _, tensor in weights:
        pool.append(tensor)
        if choose.randrange(4) == 0 and (part := random_view(tensor, choose)).numel():
            part.fill_(choose.randrange(3))
    for _ in range(choose.randrange(5)):
        value = random_view(choose.choice(pool), choose)
        if not value.numel():
            continue
        kind = choose.randrange(5)
        if kind == 0:
            pool.append(value.clone())
        elif kind == 1 and value.dim():
            pool.append(torch.cat([value, value.narrow(0, 0, (len(value) + 1) // 2)]))
        elif kind == 2:
            pool.append(torch.stack([value, value], choose.randrange(value.dim() + 1)))
        elif kind == 3:
            buffer = torch.zeros_like(value, memory_format=torch.contiguous_format)
            part = random_view(buffer, choose)
            part.copy_(value.new_full((), 9))
            pool.append(buffer)
        else:
            pool.append(value.contiguous())
    for param in params.values():
        param.fill_(3)
        part = random_view(param, choose)
        value = random_view(choose.choice(pool), choose).reshape(-1)
        if part.numel() and value.numel():
            size = part.numel()
            value = value.repeat(-(-size // value.numel()))[:size]
            part.copy_(value.view(part.shape))
        if choose.randrange(3) == 0 and (part := random_view(param, choose)).numel():
            part.zero_()


@pytest.mark.parametrize("block", range(6))
def test_random_strided_loaders(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        choose = random.Random(f"shapes {seed}")
        files = {
            f"w{i}": torch.randn([choose.choice([1, 2, 3, 4, 6, 8]) for _ in range(choose.randint(1, 3))])
            for i in range(choose.randint(1, 3))
        }
        files = encode(files)
        shapes = [[choose.choice([2, 3, 4, 6]) for _ in range(choose.randint(1, 3))] for _ in range(2)]
        real = {f"p{i}": torch.full(shape, -7) for i, shape in enumerate(shapes)}
        random_load(real, ((key, tensor.clone()) for key, tensor in files.items()), seed)
        traced = {name: torch.full_like(param, -7) for name, param in real.items()}

        def load(weights: Pairs, params: Tensors = traced, seed: int = seed) -> None:
            random_load(params, weights, seed)

        layout = trace_loader(load, traced, describe(files), may_skip=lambda key: True)
        for name, tensor in replay(layout, files).items():
            assert torch.equal(tensor, real[name]), (seed, name)
