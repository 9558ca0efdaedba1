"""Every family at transformers' experts seam, in every topology, with every dispatcher, against one process.

    python -m tests.families.matrix                                            # all; writes the pages
    python -m tests.families.matrix --families zaya jamba --topologies ep2-cp2    # only printed

For each family: a tiny model, saved by transformers; one process, a document at a time; then four ranks, cell by cell.
Loss, every gradient, the norms and the weights after two steps of SGD are compared. A family may refuse a topology, by
name and with its reason; whatever else isn't within its bounds is a failure. Writes ``docs/families.md`` and
``docs/parity.md`` where there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from moesaic.dispatch import DISPATCHERS
from moesaic.parallel.apply import ParallelOptions
from tests.families.configs import MODEL_TYPES
from tests.families.measure import Row, measure
from tests.families.pages import render_families, render_parity
from tests.oracle.cells import Cell
from tests.pool import WorkerPool

DOCS = Path("docs")
WORLD_SIZE = 4
TOPOLOGIES = {
    "ep2-efsdp2": {"ep_size": 2},
    "ep2-tp2": {"ep_size": 2, "tp_size": 2},
    "ep2-cp2": {"ep_size": 2, "cp_size": 2},
    "ep4-cp2-tp2": {"ep_size": 4, "cp_size": 2, "tp_size": 2},
}


def build_cells(topologies: Iterable[str], dispatchers: Iterable[str]) -> dict[str, Cell]:
    """Each topology with each dispatcher, by name."""
    return {
        f"{topology} {dispatcher}": Cell(
            world_size=WORLD_SIZE,
            sizes=TOPOLOGIES[topology],
            options=ParallelOptions(ep_dispatcher=dispatcher),
            optimizers=("sgd",),
        )
        for topology in topologies
        for dispatcher in dispatchers
    }


def report(row: Row, spent_s: float) -> None:
    """A line for each cell, and one for the family."""
    for name, outcome in row.outcomes.items():
        errors = " ".join(f"{key} {error:.1e}" for key, error in outcome.errors.items())
        verdict = "FAIL" if name in row.failed else "----" if outcome.refused is not None else "ok  "
        said = outcome.failure or outcome.refused or f"{errors} at {outcome.where}"
        print(f"{verdict} {row.family} {name}: {said}", flush=True)
    print(f"     {row.family}: floor {row.floor}, {spent_s:.1f} s", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The part to run; all of it by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.matrix", description=__doc__.splitlines()[0])
    choices = {"families": MODEL_TYPES, "topologies": tuple(TOPOLOGIES), "dispatchers": tuple(DISPATCHERS)}
    for name, known in choices.items():
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known, metavar="NAME")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure what was chosen; 1 where something is neither within its bounds nor refused."""
    chosen = parse(arguments)
    cells = build_cells(chosen.topologies, chosen.dispatchers)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    pool, rows = WorkerPool(warning_filters=()), []
    with tempfile.TemporaryDirectory() as folder:
        for family in chosen.families:
            start = time.perf_counter()
            rows.append(measure(pool, family, cells, Path(folder)))
            report(rows[-1], time.perf_counter() - start)
    pool.close()
    failed = [f"{row.family} {name}" for row in rows for name in row.failed]
    print(f"{len(rows)} families in {len(cells)} cells, {len(failed)} failed: {failed}")
    if not failed and not arguments:
        (DOCS / "families.md").write_text(render_families(rows), encoding="utf-8")
        (DOCS / "parity.md").write_text(render_parity(rows), encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
