"""Composing FSDP2, expert parallelism and expert-FSDP on an unmodified Hugging Face model."""

from moesaic.parallel.apply import ParallelOptions, from_pretrained, parallelize
from moesaic.parallel.efsdp import FSDPPlan, expert_fully_shard_modules
from moesaic.parallel.experts import ExpertPlan, expert_parallelize_modules
from moesaic.parallel.outer import apply_fsdp2
from moesaic.parallel.plan import apply_plan, build_fsdp_mesh, fully_shard_planned

__all__ = [
    "ExpertPlan",
    "FSDPPlan",
    "ParallelOptions",
    "apply_fsdp2",
    "apply_plan",
    "build_fsdp_mesh",
    "expert_fully_shard_modules",
    "expert_parallelize_modules",
    "from_pretrained",
    "fully_shard_planned",
    "parallelize",
]
