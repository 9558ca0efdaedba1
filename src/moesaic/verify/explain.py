"""From measured ratios to the mesh axis that explains them. Pure: numbers in, sentences out.

What a fault does to a gradient g over an axis of n ranks, and what is measured then (``Measured.ratio``, ``cosine``):

| fault | ratio | cosine |
|---|---|---|
| counted by each of n ranks, or summed twice | n | 1 |
| divided by n once too often | 1/n | 1 |
| not summed: each rank keeps its own part | 1/n exactly, whatever the parts are | below 1 |
| nothing arrives: detached | 0 | none |
| anything else: other tokens, other routes, another loss | no such number | below 1 |

The norm is another matter: right gradients, of which one group counts n times, give
``sqrt(total + (n - 1) * group)`` in squares; so each group of parameters that lie alike is tried with each axis.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moesaic.config import ParallelSizes
from moesaic.verify.compare import Measured

# A ratio is a factor's where it is this close: far more than rounding, far less than what lies between two factors.
MATCH = 2e-4
# A multiple: the angle between two fp32 gradients that differ by rounding only is far smaller.
MULTIPLE_COSINE = 1 - 1e-6
ZERO = 1e-6

EXPERT_AXES = ("ep", "efsdp", "edp")
DENSE_AXES = ("mp_shard", "mp_replicate", "tp")
DATA_AXES = ("dp", "cp", "tp")

LOAD, DETACHED, COUNTED, DIVIDED, UNREDUCED, OTHER, NORM, ROUTER, LOSS, UPDATE, CHECKPOINT = (
    "load", "detached", "counted", "divided", "not reduced", "other", "norm", "router loss", "loss", "update",
    "checkpoint",
)  # fmt: skip

LOOK_AT: Mapping[str, str] = {
    LOAD: "how its slices are read (weights/load.py, and ops/placements.py for how it lies); everything after follows",
    DETACHED: "what lies between it and the loss: a gather, a to_local() or a detach() without a gradient",
    COUNTED: "whether the tokens of one rank of that axis reach it once, and its unit's divide factor "
    "(parallel/efsdp.py::set_gradient_sum)",
    DIVIDED: "the divide factor of its FSDP unit (parallel/efsdp.py::set_gradient_sum): gradients are sums here, and "
    "the loss is divided once, by the global token count",
    UNREDUCED: "the mesh of the FSDP unit that owns it (moesaic train --verbose lists them): it must span that axis",
    OTHER: "what is computed with other values on some ranks: routes, masks, positions, or a term of the loss that is "
    "each rank's own",
    NORM: "how copies are counted (train/grad_norm.py): a value that several ranks hold counts once",
    ROUTER: "the counts of chosen experts behind it: they are of the whole step, over all ranks and micro-batches "
    "(train/router.py)",
    LOSS: "which tokens each rank has, and the count that their losses are divided by",
    UPDATE: "the optimizer's step and the clipping coefficient",
    CHECKPOINT: "how its blocks are written and read (checkpoint.py, ops/block_planner.py)",
}
# Causes before what follows from them.
ORDER = (LOAD, DETACHED, COUNTED, DIVIDED, UNREDUCED, LOSS, ROUTER, NORM, OTHER, UPDATE, CHECKPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: one of ``LOOK_AT``'s keys.
        names: what it was measured at, layers written as ``*``; the worst first.
        count: how many tensors these names stand for.
        ratio: ours / the reference's, where the tensors share one.
        axes: mesh axes with a size that explains the ratio, the likeliest first; ``a * b`` is a product.
        text: all of it in a sentence.
        look_at: where to look.
    """

    kind: str
    names: tuple[str, ...]
    count: int
    ratio: float | None
    axes: tuple[str, ...]
    text: str
    look_at: str


def explain_gradients(failed: Sequence[Measured], experts: Iterable[str], sizes: ParallelSizes) -> list[Finding]:
    """Findings for the gradients that are beyond their bounds, alike ones together.

    Args:
        experts: names of the routed experts' parameters.
    """
    expert_names = frozenset(experts)
    groups: dict[tuple[str, float | None, tuple[str, ...]], list[Measured]] = {}
    for one in failed:
        kind, axes = classify(one, one.name in expert_names, sizes)
        exact = kind in (COUNTED, DIVIDED, UNREDUCED)
        groups.setdefault((kind, _round(one.ratio) if exact else None, axes), []).append(one)
    return [_finding(kind, axes, members) for (kind, _, axes), members in groups.items()]


def classify(measured: Measured, is_expert: bool, sizes: ParallelSizes) -> tuple[str, tuple[str, ...]]:
    """The kind of a wrong gradient, and the axes whose sizes explain its ratio. See the module's table."""
    ratio, cosine = measured.ratio, measured.cosine
    if ratio is None or not math.isfinite(measured.error):
        return OTHER, ()
    if abs(ratio) < ZERO and measured.power <= ZERO**2 * measured.reference_power:
        return DETACHED, ()
    if ratio < ZERO:
        return OTHER, ()
    larger, smaller = matching_axes(ratio, is_expert, sizes), matching_axes(1 / ratio, is_expert, sizes)
    if cosine is not None and cosine > MULTIPLE_COSINE:
        if larger or ratio > 1 + MATCH:
            return COUNTED, larger
        return (DIVIDED, smaller) if ratio < 1 - MATCH else (OTHER, ())
    return (UNREDUCED, _least_sharded_first(smaller, measured.placements)) if smaller else (OTHER, ())


def _least_sharded_first(axes: Sequence[str], placements: str) -> tuple[str, ...]:
    """Of axes of one size: FSDP has reduced over those that it shards, so a missing sum is over another one."""
    lying = dict(part.split(": ") for part in placements.split("; ") if ": " in part)

    def suspicion(axis: str) -> int:
        if axis not in lying:
            return 2 if axis in DATA_AXES else 1
        return 1 if lying[axis] == "R" else 3

    return tuple(sorted(axes, key=suspicion))


def matching_axes(factor: float, is_expert: bool, sizes: ParallelSizes) -> tuple[str, ...]:
    """Axes with ``factor`` ranks: of the parameter's own view first, then of the data's; else products of two."""
    known = axis_sizes(sizes)
    order = dict.fromkeys((*(EXPERT_AXES if is_expert else DENSE_AXES), *DATA_AXES))
    usable = [axis for axis in order if known[axis] > 1]
    single = tuple(axis for axis in usable if _is_close(factor, known[axis]))
    if single:
        return single
    pairs = itertools.combinations(usable, 2)
    return tuple(f"{a} * {b}" for a, b in pairs if _is_close(factor, known[a] * known[b]))


def axis_sizes(sizes: ParallelSizes) -> dict[str, int]:
    """Every axis of the three views and its number of ranks."""
    return {
        "dp": sizes.dp_size,
        "cp": sizes.cp_size,
        "tp": sizes.tp_size,
        "mp_replicate": sizes.mp_replicate_size,
        "mp_shard": sizes.mp_shard_size,
        "edp": sizes.edp_size,
        "efsdp": sizes.efsdp_size,
        "ep": sizes.ep_size,
    }


def explain_norm(
    norm: float, reference: float, gradients: Sequence[Measured], experts: Iterable[str], sizes: ParallelSizes
) -> Finding:
    """Why a norm is wrong: because the gradients are, or because some of them count more or less than once."""
    ratio = norm / reference if reference else math.inf
    own = math.sqrt(sum(one.power for one in gradients))
    if _is_close(norm, own) and not _is_close(own, reference):
        text = f"the norm is {ratio:.6g} of the reference's, as the wrong gradients above make it"
        return Finding(
            kind=NORM, names=("norm",), count=1, ratio=ratio, axes=(), text=text, look_at="the gradients first"
        )
    matches = list(_norm_candidates(norm, gradients, frozenset(experts), sizes))
    reason = f"; it is what {matches[0][1]} would give" if matches else ""
    text = f"the norm is {ratio:.6g} of what its gradients have{reason}"
    axes = tuple(dict.fromkeys(axis for axis, _ in matches))
    return Finding(kind=NORM, names=("norm",), count=1, ratio=ratio, axes=axes, text=text, look_at=LOOK_AT[NORM])


def _norm_candidates(
    norm: float, gradients: Sequence[Measured], experts: frozenset[str], sizes: ParallelSizes
) -> Iterator[tuple[str, str]]:
    """Axes, and in words which gradients counted by how many ranks give ``norm``."""
    total = sum(one.power for one in gradients)
    groups = {"all gradients": total}
    for one in gradients:
        group = "the experts' gradients" if one.name in experts else "the dense gradients"
        groups[group] = groups.get(group, 0.0) + one.power
        lying = f"gradients that lie {one.placements}"
        groups[lying] = groups.get(lying, 0.0) + one.power
    for group, power in groups.items():
        for axis, size in axis_sizes(sizes).items():
            for factor, words in ((size, f"{size} times"), (1 / size, f"1/{size} times")):
                if size > 1 and _is_close(norm, math.sqrt(total + (factor - 1) * power)):
                    yield axis, f"{group} counted {words} ({axis} has {size} ranks)"


def finding(kind: str, name: str, text: str, ratio: float | None = None, axes: tuple[str, ...] = ()) -> Finding:
    """One about a single quantity."""
    return Finding(kind=kind, names=(name,), count=1, ratio=ratio, axes=axes, text=text, look_at=LOOK_AT[kind])


def group_finding(kind: str, members: Sequence[Measured], text: str) -> Finding:
    """One about several tensors, the worst first; ``text`` follows their names."""
    worst = sorted(members, key=lambda one: -one.error)
    names = tuple(dict.fromkeys(layers_as_stars(one.name) for one in worst))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Finding(
        kind=kind,
        names=names,
        count=len(members),
        ratio=None,
        axes=(),
        text=f"{shown}: {text}",
        look_at=LOOK_AT[kind],
    )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Causes first."""
    return tuple(sorted(findings, key=lambda one: ORDER.index(one.kind)))


def layers_as_stars(name: str) -> str:
    """``model.layers.3.mlp.gate.weight`` -> ``model.layers.*.mlp.gate.weight``."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _finding(kind: str, axes: tuple[str, ...], members: Sequence[Measured]) -> Finding:
    ratio = members[0].ratio if kind in (COUNTED, DIVIDED, UNREDUCED) else None
    size = f" ({_round(max(ratio, 1 / ratio)):g} ranks)" if ratio else ""
    where = f"{' or '.join(axes)}{size}" if axes else "no axis has that size"
    worst = max(members, key=lambda one: one.error)
    words = {
        DETACHED: "the gradient is zero",
        COUNTED: f"the gradient is {ratio:.6g} times the reference's: {where}" if ratio else "",
        DIVIDED: f"the gradient is {ratio:.6g} of the reference's, and a multiple of it: {where}" if ratio else "",
        UNREDUCED: f"each rank has its own part of the gradient, {ratio:.6g} of it on average: not summed over {where}"
        if ratio
        else "",
        OTHER: f"the gradient is another one, by up to {worst.error:.1e} (rank {worst.rank} of {worst.name})",
    }
    found = group_finding(kind, members, words[kind])
    return Finding(
        kind=kind,
        names=found.names,
        count=found.count,
        ratio=ratio,
        axes=axes,
        text=found.text,
        look_at=found.look_at,
    )


def _is_close(value: float, expected: float) -> bool:
    return abs(value - expected) <= MATCH * abs(expected)


def _round(ratio: float | None) -> float | None:
    return None if ratio is None else float(f"{ratio:.3g}")
