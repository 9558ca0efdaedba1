"""The two pages that ``make matrix`` writes: what sets families apart, and which topologies each is proven in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from moesaic.parallel.apply import ParallelOptions
from moesaic.specs import refusal
from tests.families.measure import Outcome, Row
from tests.oracle.test_topologies import SAMPLE
from tests.oracle.topologies import CASES, TOPOLOGIES

FAMILIES = """# Model families

Every family of transformers 5.23 whose experts are at its experts seam (`use_experts_implementation`), as
`make matrix`, which writes this page, found them. A family needs nothing registered here: where its experts are and how
they compute shows at the seam, and how its files name them is read from transformers. In which topologies each is
proven, and how closely, is in [parity.md](parity.md).

Layers of the same class elsewhere (a vision tower's) are experts too: a `ModelSpec` whose `experts` is a glob leaves
them out. Parameters that a family keeps in fp32 have the dtype of all others: FSDP2 wants one in a unit.
Under `bf16` they are gathered in bf16 like the rest (plain transformers would compute with them in fp32).
"""
PARITY = """# What is proven, and what is refused

`make matrix` writes this page: every family at transformers' experts seam ([families.md](families.md)) in each topology
with each registered dispatcher. A tiny model is trained for two steps (SGD with momentum, fp32, CPU, padded rows) on
four ranks, and in one process, a document at a time. Compared are the loss (1e-6), every gradient, the norms, and the
weights after the steps. A cell of the table is the largest error of all gradients, max|a-b| / max|b| of a tensor; its
bound is 1e-5. (f): a family's own rounding moves gradients or weights further (embeddings times 1 + 1e-7 * noise, in
one process, the largest of four draws), and the bound is twice that floor, which is below the table. The k-th and the
next score of every `topk` are at least 1e-4 apart, so that rounding can't choose another expert.

Attention is the one that transformers picks: sdpa, or eager for families that have no sdpa. Those are refused where
ranks share sequences: flash attention, which some of them have, needs an accelerator and isn't compared here. A family
is in this table with a number, or refused when its model is parallelized: nothing else occurs.
"""
COMPOSED = """## Topologies in full

`tests/oracle/topologies.py` composes tensor, context, expert and data parallelism on four and eight ranks, with
activation checkpointing, several micro-batches, packed rows, offload and FSDP2 alone among them. Each is compared for
three families (loss, every gradient, the norms, weights after two steps of SGD and of AdamW): those that say `test` in
`make test`, all others in `make test-slow`. Sizes that aren't named are 1, or follow. `qwen3_5_moe` has padded rows
everywhere: linear attention refuses packed ones.
"""


def render_families(rows: Sequence[Row]) -> str:
    """``docs/families.md``."""
    lines = ["| family | class | at the seam, and notes |", "|---|---|---|"]
    for row in rows:
        special = "; ".join(row.special) or "-"
        if (reason := refusal(row.family)) is not None:
            special = f"refused: {reason}"
        lines.append(f"| `{row.family}` | {row.lm_class} | {special} |")
    return "\n".join([FAMILIES, *lines]) + "\n"


def render_parity(rows: Sequence[Row]) -> str:
    """``docs/parity.md``."""
    cells = list(rows[0].outcomes)
    # Reasons are numbered in the order in which they occur.
    said = [outcome.refused for row in rows for outcome in row.outcomes.values() if outcome.refused is not None]
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(said), 1)}
    lines = [f"| family | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for row in rows:
        lines.append(f"| `{row.family}` | {' | '.join(_cell(row, row.outcomes[cell], numbers) for cell in cells)} |")
    proven = [sum(row.outcomes[cell].refused is None for row in rows) for cell in cells]
    lines += [f"| {len(rows)} families, of which proven | {' | '.join(map(str, proven))} |", ""]
    lines += [
        f"- (f) `{row.family}`: floor {row.floor['grads']:.1e}, of weights {row.floor['sgd']:.1e}"
        for row in rows
        if row.floor is not None
    ]
    lines += ["", "## Refused", "", "| refused | because | families |", "|---|---|---|"]
    for reason, number in numbers.items():
        refused = [f"`{row.family}`" for row in rows if reason in {o.refused for o in row.outcomes.values()}]
        lines.append(f"| {number} | {reason} | {', '.join(refused)} |")
    return "\n".join([PARITY, *lines, "", render_composed()])


def _cell(row: Row, outcome: Outcome, numbers: dict[str, int]) -> str:
    if outcome.refused is not None:
        return f"refused: {numbers[outcome.refused]}"
    return f"{outcome.errors['grads']:.1e}" + (" (f)" if row.floor is not None else "")


def render_composed() -> str:
    """The part of ``docs/parity.md`` that nothing has to be run for."""
    lines = [f"| topology | ranks | sizes and options | {' | '.join(CASES)} |", "|---" * (3 + len(CASES)) + "|"]
    for name, topology in TOPOLOGIES.items():
        sizes = [f"{axis.removesuffix('_size')} {size}" for axis, size in topology.sizes.items()]
        micro = [f"{topology.num_micro_batches} micro-batches"] * (topology.num_micro_batches > 1)
        what = ", ".join([*sizes, *_changed(topology.options), topology.layout, *micro])
        suites = ["test" if (family, name) in SAMPLE else "slow" for family in CASES]
        lines.append(f"| `{name}` | {topology.world_size} | {what} | {' | '.join(suites)} |")
    return "\n".join([COMPOSED, *lines]) + "\n"


def _changed(options: ParallelOptions) -> list[str]:
    """What isn't at its default, by the options' own names."""
    values = {field.name: (getattr(options, field.name), field.default) for field in fields(options)}
    return [f"{name} {str(value).lower()}" for name, (value, default) in values.items() if value != default]
