"""What keeps plans small: walks as boxes, runs of copies as one, layers repeated. And parameters in place of keys."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moesaic.reshard.coverage import require_complete
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.lift import lift_copies, replicate_layers
from moesaic.reshard.resolve import replay, resolve_layout
from moesaic.reshard.strides import Boxes, Walk, contiguous_strides, infer_shape, meet
from moesaic.reshard.trace import trace_loader
from moesaic.weights.tiles import Grid, concatenate, interleave, stack
from tests.tiny_engine import (
    HEAD,
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    NUM_HEADS,
    NUM_KV_HEADS,
    RANKS,
    VOCAB,
    Load,
    Pairs,
    Tensors,
    TinyEngine,
    describe,
    encode,
    make_files,
    random_view,
)


def test_random_walks_split_into_boxes_that_are_the_walk() -> None:
    choose = random.Random(0)
    boxes = Boxes()
    for _ in range(400):
        shape = tuple(choose.choice([1, 2, 3, 4, 6]) for _ in range(choose.randint(1, 3)))
        view = random_view(torch.arange(math.prod(shape)).view(shape), choose)
        if not view.numel():
            continue
        to = contiguous_strides(view.shape)
        walk = Walk(int(view.storage_offset()), 5, tuple(zip(view.shape, view.stride(), to, strict=True)))
        flat = torch.full((view.numel() + 5,), -1)
        for box in boxes.split(walk, shape):
            for place in itertools.product(*map(enumerate, box.ranges)):
                b = box.b + sum(at * stride for (at, _), stride in zip(place, box.strides, strict=True))
                assert flat[b] == -1
                index = sum(i * unit for (_, i), unit in zip(place, contiguous_strides(shape), strict=True))
                flat[b] = index
            assert boxes.split(box.walk(shape), shape) == [box]
        assert torch.equal(flat[5:].view(view.shape), view)


def test_meeting_ranges_are_what_sets_share() -> None:
    choose = random.Random(1)
    for _ in range(2000):
        x, y = (range(start := choose.randrange(12), start + choose.randrange(20), choose.randint(1, 6)) for _ in "ab")
        if x and y:
            shared = meet([x], [y])
            assert (set(shared[0]) if shared else set()) == set(x) & set(y)


def test_inferred_shapes_have_as_many_elements() -> None:
    assert infer_shape(128, (16, 1)) == (8, 16)
    assert infer_shape(24, (1, 6)) == (4, 6)
    for strides in itertools.product(range(9), repeat=2):
        assert math.prod(infer_shape(24, strides)) == 24


def resolve(layout: TargetLayout, grids: dict[str, Grid], files: Tensors) -> TargetLayout:
    """Of a model that is exported as ``files``."""
    dtypes = {name: files[grid.tiles[0].key].dtype for name, grid in grids.items()}
    return resolve_layout(layout, grids, {key: tuple(tensor.shape) for key, tensor in files.items()}, dtypes)


def build_grids(*, interleaved: bool) -> tuple[dict[str, Grid], Callable[[Tensors], Tensors]]:
    """The trained model's parameters of one layer of ``make_files``: stacked, transposed experts; q, k, v in one."""

    def whole(key: str, *shape: int) -> Grid:
        return Grid.whole(f"layers.0.{key}", shape)

    halves = [
        stack([whole(f"experts.{e}.{name}", INNER, HIDDEN) for e in range(NUM_EXPERTS)], 0) for name in ("gate", "up")
    ]
    both = concatenate(halves, 1)
    fused = interleave(both, 1, inverse=True) if interleaved else both
    down = stack([whole(f"experts.{e}.down", HIDDEN, INNER) for e in range(NUM_EXPERTS)], 0)
    grids = {
        "layers.0.gate_up": fused.transpose(1, 2),
        "layers.0.down": down,
        "layers.0.qkv": concatenate(
            [
                whole(f"{part}.weight", heads * HEAD, HIDDEN)
                for part, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS))
            ],
            0,
        ),
        **{
            f"layers.0.{part}.bias": whole(f"{part}.bias", heads * HEAD)
            for part, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS))
        },
        # One key in two parameters.
        "layers.0.o_left": whole("o.weight", HIDDEN, NUM_HEADS * HEAD).cut(1, range(20)),
        "layers.0.o_right": whole("o.weight", HIDDEN, NUM_HEADS * HEAD).cut(1, range(20, NUM_HEADS * HEAD)),
        "layers.0.norm": whole("norm.weight", HIDDEN),
        "embed": Grid.whole("embed.weight", (VOCAB, HIDDEN)),
        "head": Grid.whole("head.weight", (VOCAB, HIDDEN)),
        "head_again": Grid.whole("head.weight", (VOCAB, HIDDEN)),
    }
    return grids, lambda files: {name: fill_grid(grid, files) for name, grid in grids.items()}


def fill_grid(grid: Grid, files: Tensors) -> torch.Tensor:
    """The parameter itself."""
    result = torch.full(grid.shape, -1, dtype=next(iter(files.values())).dtype)
    for tile in grid.tiles:
        part = files[tile.key][tuple(slice(part.start, part.stop, part.step) for part in tile.source)]
        kept = [dim for dim in tile.dims if dim is not None]
        part = part.permute(kept).reshape(tile.size)
        result[tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.size, strict=True))] = part
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_resolved_to_parameters_it_fills_the_same(rank: dict[str, Any], interleaved: bool) -> None:
    files = encode(make_files())
    engine = TinyEngine(**rank, dtype=torch.int64)
    layout = trace_loader(engine.load, engine.params, describe(files), may_skip=lambda key: ".experts." in key)
    grids, build = build_grids(interleaved=interleaved)
    resolved = resolve(layout, grids, files)
    expected = replay(layout, files)
    for name, tensor in replay(resolved, build(files)).items():
        assert torch.equal(tensor, expected[name]), name
    assert {copy.source for copy in resolved.copies} <= grids.keys() - {"head_again"}
    o_parts = {copy.source for copy in resolved.copies if copy.target == "layers.0.o.weight"}
    columns = engine.num_heads * HEAD  # of which the left parameter holds the first 20
    first = engine.tp_rank * columns
    assert ("layers.0.o_left" in o_parts, "layers.0.o_right" in o_parts) == (first < 20, first + columns > 20)
    experts = [copy for copy in resolved.copies if copy.target.endswith(("w13", "w2"))]
    assert len(experts) == 3  # gate, up, down: each of all experts
    assert sum(copy.num_elements for copy in resolved.copies) == sum(copy.num_elements for copy in layout.copies)


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_resolve(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(40):
        grid = Grid.whole("w0", (4, 6, 4))
        for _ in range(choose.randrange(4)):
            kind, dim = choose.randrange(3), choose.randrange(3)
            if kind == 0:
                grid = grid.transpose(dim, choose.randrange(3))
            elif kind == 1:
                grid = interleave(grid, dim, inverse=choose.random() < 0.5)
            else:
                cut = choose.randint(1, grid.shape[dim] - 1)
                rest = grid.cut(dim, range(cut, grid.shape[dim]))
                grid = concatenate([rest, grid.cut(dim, range(cut))], dim)
        files = encode({"w0": torch.empty(4, 6, 4)})
        view_seed = choose.randrange(10**6)
        view = random_view(files["w0"], random.Random(view_seed))
        if not view.numel():
            continue
        target = {"p": torch.empty(view.shape, dtype=torch.int64)}

        def load(weights: Pairs, target: Tensors = target, view_seed: int = view_seed) -> None:
            for _, tensor in weights:
                target["p"].copy_(random_view(tensor, random.Random(view_seed)))

        layout = resolve(trace_loader(load, target, describe(files)), {"param": grid}, files)
        assert torch.equal(replay(layout, {"param": fill_grid(grid, files)})["p"], view)


def test_keys_that_the_model_does_not_have_are_refused() -> None:
    engine = TinyEngine()
    files = make_files()
    layout = trace_loader(engine.load, engine.params, describe(files))
    grids, _ = build_grids(interleaved=False)
    without = {name: grid for name, grid in grids.items() if name != "layers.0.norm"}
    with pytest.raises(ValueError, match=r"layers\.0\.norm\.weight, which no parameter"):
        resolve(layout, without, files)
    without = {name: grid for name, grid in grids.items() if name != "layers.0.o_right"}
    with pytest.raises(ValueError, match=r"from layers\.0\.o\.weight.*'layers\.0\.o_left'.* lack 96 elements"):
        resolve(layout, without, files)


def load_w(target: Tensors) -> Load:
    return lambda weights: [target["p"].copy_(tensor) for _, tensor in weights]


@pytest.mark.parametrize("shape", [(4, 2), (6, 3), (6, 2, 1)])
def test_a_key_traced_in_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Its tail would never be sent."""
    target = {"p": torch.empty(shape)}
    layout = trace_loader(load_w(target), target, {"w": (shape, torch.float32)})
    with pytest.raises(ValueError, match=r"traced with w of shape .*export has it as \(6, 2\)"):
        resolve(layout, {"param": Grid.whole("w", (6, 2))}, {"w": torch.empty(6, 2)})


@pytest.mark.parametrize(
    ("traced", "exported", "passes"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, True),  # what doesn't round the wider doesn't round the narrower
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.bfloat16, False),
    ],
)
def test_a_key_traced_in_a_narrower_dtype_is_refused(traced: torch.dtype, exported: torch.dtype, passes: bool) -> None:
    """A loader's cast to what the trace was given is seen to do nothing, and rounds what really comes."""
    target = {"p": torch.empty(6, 2)}
    cast = {"p": target["p"]}

    def load(weights: Pairs) -> None:
        for _, tensor in weights:
            cast["p"].copy_(tensor.to(traced))

    layout = trace_loader(load, target, {"w": ((6, 2), traced)})
    files = {"w": torch.empty(6, 2, dtype=exported)}
    if passes:
        assert resolve(layout, {"param": Grid.whole("w", (6, 2))}, files).sources[0].dtype == exported
        return
    with pytest.raises(ValueError, match=rf"w as {traced}, and param is exported as {exported}"):
        resolve(layout, {"param": Grid.whole("w", (6, 2))}, files)


def test_what_parameters_hold_of_a_key_is_covered_not_counted() -> None:
    files = encode({"w": torch.empty(6, 2)})
    target = {"p": torch.empty(6, 2, dtype=torch.int64)}
    layout = trace_loader(load_w(target), target, describe(files))
    whole = Grid.whole("w", (6, 2))
    top, bottom, odd = whole.cut(0, range(3)), whole.cut(0, range(3, 6)), whole.cut(0, range(1, 6, 2))
    for grids in (
        {"a": top, "b": top},  # as many elements as the key
        {"a": concatenate([top, top], 0)},  # in one parameter
        {"a": top, "b": bottom, "c": odd},
    ):
        with pytest.raises(ValueError, match=r"p is loaded from w, of which \[.*'a'.*\] hold [36] elements twice"):
            resolve(layout, grids, files)
    for grids in (
        {"a": top, "b": bottom},
        {"a": top, "tied": top, "all": whole},  # one parameter that has all of it
        {"a": concatenate([odd, whole.cut(0, range(0, 6, 2))], 0)},
    ):
        parameters = {name: fill_grid(grid, files) for name, grid in grids.items()}
        assert torch.equal(replay(resolve(layout, grids, files), parameters)["p"], files["w"])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rank", [RANKS[0], RANKS[2], RANKS[-1]], ids=str)
def test_layers_replicated_equal_the_full_trace(rank: dict[str, Any], stacked: bool) -> None:
    def trace(num_layers: int) -> TargetLayout:
        engine = TinyEngine(**rank, num_layers=num_layers)
        files = describe(make_files(stacked=stacked, num_layers=num_layers))
        return trace_loader(engine.load, engine.params, files, may_skip=lambda key: ".experts." in key)

    full, two = trace(11), trace(2)
    assert replicate_layers(two, range(11)) == full
    # A pipeline stage that has layers 4..6 of what is traced as 0..1.
    stage = replicate_layers(two, range(4, 7), like=lambda layer: layer % 2)
    names = {tensor.name for tensor in stage.tensors if tensor.name.startswith("layers.")}
    assert {name.split(".")[1] for name in names} == {"4", "5", "6"}
    assert {c for c in stage.copies if "layers" in c.target} == {
        c for c in full.copies if c.target.startswith(("layers.4.", "layers.5.", "layers.6."))
    }


def test_replication_refuses_what_it_would_get_wrong() -> None:
    engine = TinyEngine(num_layers=2)
    layout = trace_loader(engine.load, engine.params, describe(make_files(num_layers=2)))
    first = next(copy for copy in layout.copies if copy.target == "layers.1.norm.weight")
    others = tuple(copy for copy in layout.copies if copy is not first)
    with pytest.raises(ValueError, match="layers 0 and 1 of the traced model differ"):
        replicate_layers(replace(layout, copies=others), range(4))
    crossed = replace(layout, copies=(*others, replace(first, source="layers.0.norm.weight")))
    with pytest.raises(ValueError, match="of another layer"):
        replicate_layers(crossed, range(4))
    with pytest.raises(ValueError, match="layer 2 wasn't traced"):
        replicate_layers(layout, range(4), like=lambda layer: layer)
    with pytest.raises(ValueError, match="nothing to replicate"):
        replicate_layers(replace(layout, tensors=layout.tensors[:1]), range(4))


def trace_stack(num_layers: int, *, shared: bool = False) -> TargetLayout:
    """Layers' norms out of one tensor of the files: a row each, or all the same."""
    target = {f"layers.{layer}.norm": torch.empty(3) for layer in range(num_layers)}

    def load(weights: Pairs) -> None:
        for _, tensor in weights:
            for layer, name in enumerate(target):
                target[name].copy_(tensor[0 if shared else layer])

    return trace_loader(load, target, {"norms": ((8, 3), torch.float32)})


def test_a_source_without_a_layers_number_is_replicated_only_where_two_layers_show_that_it_is_shared() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.norm is filled from norms, which has no layer's number"):
        replicate_layers(trace_stack(1), range(4))
    with pytest.raises(ValueError, match="layers 0 and 1 of the traced model differ"):
        replicate_layers(trace_stack(2), range(4))
    for like in (lambda layer: layer % 2, lambda layer: 1 if layer == 1 else 0):
        with pytest.raises(ValueError, match="which has no layer's number"):
            replicate_layers(trace_stack(2), range(4), like=like)
    with pytest.raises(ValueError, match="layers 0 and 2 of the traced model differ"):
        replicate_layers(trace_stack(3), range(4), like=lambda layer: layer % 2)
    assert replicate_layers(trace_stack(2, shared=True), range(8)) == trace_stack(8, shared=True)
    assert replicate_layers(trace_stack(4, shared=True), range(8), like=lambda i: i % 2) == trace_stack(8, shared=True)


def test_what_is_of_no_layer_may_not_be_filled_from_one() -> None:
    target = {"layers.0.norm": torch.empty(3), "norm": torch.empty(3)}

    def load(weights: Pairs) -> None:
        for key, tensor in weights:
            target[key.replace("layers.0.last", "norm")].copy_(tensor)

    files = {key: ((3,), torch.float32) for key in ("layers.0.norm", "layers.0.last")}
    with pytest.raises(ValueError, match=r"norm is of no layer, and filled from layers\.0\.last"):
        replicate_layers(trace_loader(load, target, files), range(4))


@pytest.mark.parametrize("tied", [False, True])
def test_a_replicated_layout_is_compared_with_the_engines_real_model(tied: bool) -> None:
    engine = TinyEngine(num_layers=2, tied=tied)
    two = trace_loader(engine.load, engine.params, describe(make_files(num_layers=2, tied=tied)))
    real = TinyEngine(num_layers=5, tied=tied).params
    require_complete(replicate_layers(two, range(5)), real)
    with pytest.raises(ValueError, match=r"lacks 6 of the engine's 32 parameters \(layers\.3\.norm\.weight"):
        require_complete(replicate_layers(two, [0, 1, 2, 4]), real)
    with pytest.raises(ValueError, match=r"lacks 0 of .* has 6 that the engine hasn't \(layers\.5"):
        require_complete(replicate_layers(two, range(6)), real)
    other = {**real, "layers.4.w2": real["layers.4.w2"][1:]}
    with pytest.raises(ValueError, match=r"layers\.4\.w2 as \(6, 8, 12\) .* engine as \(5, 8, 12\)"):
        require_complete(replicate_layers(two, range(5)), other)
    with pytest.raises(ValueError, match=r"embed\.weight as .* torch\.float32, and the engine as .* torch\.float16"):
        require_complete(replicate_layers(two, range(5)), {**real, "embed.weight": real["embed.weight"].half()})


def test_runs_are_lifted_in_order_only() -> None:
    target = {"p": torch.empty(4, 2, 3)}
    files = {"w": torch.randn(8, 3)}

    def load(weights: Pairs) -> None:
        for _, tensor in weights:
            for e in (1, 0, 2, 3):  # not ascending at first
                target["p"][e, 0].copy_(tensor[e])
                target["p"][e, 1].copy_(tensor[4 + e])

    layout = trace_loader(load, target, describe(files))
    assert torch.equal(replay(layout, files)["p"], torch.stack([files["w"][:4], files["w"][4:]], 1))
    assert lift_copies(layout.copies) == layout.copies
    assert len(layout.copies) < 8
