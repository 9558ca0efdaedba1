"""The layouts that benchmarks and tests without vLLM take for an engine's are what vLLM's own loader gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import sync
from bench.engine_layouts import MoeShape, build_target, engine_ranks
from bench.reshard_plan import CASES
from bench.traced_layouts import build_config, describe_export, repeat, resolve, trace_ranks
from moesaic.engines import vllm_layout
from moesaic.reshard.layout import TargetLayout

TINY = MoeShape(
    num_layers=4,
    hidden_size=64,
    num_experts=8,
    intermediate_size=32,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=500,  # padded to 512
)
UNEVEN = dataclasses.replace(TINY, num_experts=7)
BENCHMARKS = {
    **{name: case.shape for name, case in CASES.items()},
    **{f"sync-{name}": shape for name, shape in sync.SIZES.items()},
}
# Name of a layout -> vLLM's ranks of it.
ENGINES = {
    "tp1": vllm_layout.EngineRank.all_of(),
    "tp2": vllm_layout.EngineRank.all_of(tp_size=2),
    "tp4": vllm_layout.EngineRank.all_of(tp_size=4),
    "tp8": vllm_layout.EngineRank.all_of(tp_size=8),
    "ep2": vllm_layout.EngineRank.all_of(dp_size=2, expert_parallel=True),
    "tp2ep2": vllm_layout.EngineRank.all_of(tp_size=2, expert_parallel=True),
    "dp2tp2": vllm_layout.EngineRank.all_of(dp_size=2, tp_size=2, expert_parallel=True),
    "pp2": vllm_layout.EngineRank.all_of(pp_size=2),
}


def simplify(layout: TargetLayout) -> tuple[object, ...]:
    """Without what means nothing: the order of targets, and dims of 1."""
    copies = []
    for copy in layout.copies:
        kept = [dim for dim, size in enumerate(copy.shape) if size > 1]
        copies.append(
            dataclasses.replace(
                copy,
                shape=tuple(copy.shape[dim] for dim in kept),
                source_dims=tuple(copy.source_dims[dim] for dim in kept),
                source_steps=tuple(copy.source_steps[dim] for dim in kept),
                target_strides=tuple(copy.target_strides[dim] for dim in kept),
            )
        )
    return (
        sorted(layout.tensors, key=lambda tensor: tensor.name),
        sorted(copies, key=lambda copy: (copy.target, copy.target_offset)),
        sorted(layout.fills, key=lambda fill: (fill.target, fill.target_offset)),
    )


def assert_equal(written: TargetLayout, traced: TargetLayout) -> None:
    for ours, theirs in zip(simplify(written), simplify(traced), strict=True):
        assert ours == theirs


@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        *(pytest.param(TINY, engine, id=f"even-{engine}") for engine in ENGINES),
        # Seven experts; vLLM has no more ranks than experts.
        *(pytest.param(UNEVEN, engine, id=f"uneven-{engine}") for engine in ENGINES if engine != "tp8"),
    ],
)
def test_closed_form_is_the_real_trace(shape: MoeShape, engine: str, tmp_path: Path) -> None:
    build_config(shape, shape.num_layers).save_pretrained(tmp_path)
    files = describe_export(shape, shape.num_layers)
    ranks = engine_ranks(engine, shape.num_layers)
    for rank, traced in zip(ranks, trace_ranks(tmp_path, ENGINES[engine], files), strict=True):
        assert_equal(build_target(shape, rank), resolve(traced, files))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_closed_form_of_what_benchmarks_plan(name: str, tmp_path: Path) -> None:
    shape, engine = BENCHMARKS[name], "tp4" if name.startswith("sync") else "tp8"
    build_config(shape, 2).save_pretrained(tmp_path)
    files = describe_export(shape, 2)
    for rank, traced in zip(
        engine_ranks(engine, shape.num_layers), trace_ranks(tmp_path, ENGINES[engine], files), strict=True
    ):
        assert_equal(build_target(shape, rank), *repeat([traced], files, shape.num_layers))
