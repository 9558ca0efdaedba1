"""Topologies of tensor, context, expert and data parallelism, and the families that each is proven on."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.parallel.apply import ParallelOptions
from tests.oracle.cells import Cell
from tests.oracle.reference import Case

PLAIN = ParallelOptions()
PATH_A = ParallelOptions(expert_parallel=False)
CHECKPOINTED = ParallelOptions(activation_checkpointing=True)
RESENT = ParallelOptions(activation_checkpointing=True, exchanged_tokens="recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """``sizes`` are those of ``build_meshes``; ``options`` beside them, to compose with each size once somewhere."""

    world_size: int
    sizes: dict[str, int]
    options: ParallelOptions = PLAIN
    layout: str = "padded"
    num_micro_batches: int = 1

    def cell(self, case: Case) -> Cell:
        """One family's parity cell. Packed hybrid models are refused, so theirs is padded."""
        return Cell(
            world_size=self.world_size,
            sizes=self.sizes,
            options=self.options,
            layout="padded" if case.family == "qwen3_5_moe" else self.layout,
            num_micro_batches=self.num_micro_batches,
        )


def _four(options: ParallelOptions = PLAIN, layout: str = "padded", micro: int = 1, **sizes: int) -> Topology:
    return Topology(world_size=4, sizes=sizes, options=options, layout=layout, num_micro_batches=micro)


def _eight(options: ParallelOptions = PLAIN, layout: str = "padded", micro: int = 1, **sizes: int) -> Topology:
    return Topology(world_size=8, sizes=sizes, options=options, layout=layout, num_micro_batches=micro)


TOPOLOGIES: dict[str, Topology] = {
    # Tensor parallelism.
    "fsdp-tp2": _four(tp_size=2),
    "tp4": _four(layout="packed", tp_size=4),
    "fsdp-ep2-tp2": _four(layout="packed", micro=2, tp_size=2, ep_size=2),
    "fsdp-ep4-tp2": _four(CHECKPOINTED, tp_size=2, ep_size=4),
    "ep2-tp4": _four(RESENT, layout="packed", tp_size=4, ep_size=2),
    "hsdp-tp2": _four(tp_size=2, mp_replicate_size=2),
    "hsdp-ep2-tp2": _four(tp_size=2, mp_replicate_size=2, ep_size=2),
    "path-a-tp2": _four(PATH_A, layout="packed", tp_size=2),
    "custom-ep4-tp2": _four(ParallelOptions(fsdp_implementation="custom"), tp_size=2, ep_size=4),
    "offload-ep2-tp2": _four(ParallelOptions(offload=True), tp_size=2, ep_size=2),
    # Context parallelism.
    "fsdp-cp2": _four(layout="packed", micro=2, cp_size=2),
    "cp4": _four(cp_size=4),
    "fsdp-ep2-cp2": _four(CHECKPOINTED, layout="packed", cp_size=2, ep_size=2),
    "fsdp-ep4-cp2": _four(cp_size=2, ep_size=4),
    "cp4-ep2": _four(layout="packed", cp_size=4, ep_size=2),
    "hsdp-cp2": _four(cp_size=2, mp_replicate_size=2),
    "hsdp-ep2-cp2": _four(layout="packed", cp_size=2, mp_replicate_size=2, ep_size=2),
    "path-a-cp2": _four(PATH_A, cp_size=2),
    # Both.
    "cp2-tp2": _four(layout="packed", cp_size=2, tp_size=2),
    "ep2-cp2-tp2": _four(micro=2, cp_size=2, tp_size=2, ep_size=2),
    "ep4-cp2-tp2": _four(CHECKPOINTED, layout="packed", cp_size=2, tp_size=2, ep_size=4),
    "path-a-cp2-tp2": _four(PATH_A, layout="packed", cp_size=2, tp_size=2),
    # Eight ranks.
    "dp2-cp2-tp2-ep4": _eight(layout="packed", cp_size=2, tp_size=2, ep_size=4),
    "dp4-cp2-ep4": _eight(cp_size=2, ep_size=4),
    "hsdp-ep2-tp2-8": _eight(CHECKPOINTED, layout="packed", tp_size=2, mp_replicate_size=2, ep_size=2),
    "hsdp-tp2-cp2": _eight(cp_size=2, tp_size=2, mp_replicate_size=2),
    "hsdp-ep2-cp2-tp2": _eight(layout="packed", cp_size=2, tp_size=2, mp_replicate_size=2, ep_size=2),
    "hsdp-ep4-cp2-edp1": _eight(cp_size=2, mp_replicate_size=2, edp_size=1, ep_size=4),
}

CASES: dict[str, Case] = {
    "qwen3_moe": Case(num_documents=16),
    "deepseek_v3": Case(family="deepseek_v3", is_listed=True, num_documents=16),
    "qwen3_5_moe": Case(family="qwen3_5_moe", num_documents=16),
}
