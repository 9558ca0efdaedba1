"""moesaic: post-train Hugging Face mixture-of-experts models on FSDP2, expert parallelism and expert-FSDP.

The public names below are loaded on first use (PEP 562), so that ``import moesaic`` and the parts without torch
(``moesaic.config``, ``moesaic.specs``) stay quick.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.config import load_recipe
    from moesaic.meshes import Meshes, build_meshes
    from moesaic.parallel import (
        ExpertPlan,
        FSDPPlan,
        ParallelOptions,
        apply_fsdp2,
        apply_plan,
        build_fsdp_mesh,
        expert_fully_shard_modules,
        expert_parallelize_modules,
        from_pretrained,
        fully_shard_planned,
        parallelize,
    )
    from moesaic.specs import ModelSpec, find_spec, register_spec
    from moesaic.train.grad_norm import clip_grad_norm_
    from moesaic.train.step import train_step
    from moesaic.weights import export_hf, load_full_state_dict

__version__ = "0.1.0"

__all__ = [
    "ExpertPlan",
    "FSDPPlan",
    "Meshes",
    "ModelSpec",
    "ParallelOptions",
    "__version__",
    "apply_fsdp2",
    "apply_plan",
    "build_fsdp_mesh",
    "build_meshes",
    "clip_grad_norm_",
    "expert_fully_shard_modules",
    "expert_parallelize_modules",
    "export_hf",
    "find_spec",
    "from_pretrained",
    "fully_shard_planned",
    "load_full_state_dict",
    "load_recipe",
    "parallelize",
    "register_spec",
    "train_step",
]

# Public name -> the module that defines it; the block above says the same to type checkers (tested to agree).
EXPORTS = MappingProxyType(
    {
        "ExpertPlan": "moesaic.parallel",
        "FSDPPlan": "moesaic.parallel",
        "Meshes": "moesaic.meshes",
        "ModelSpec": "moesaic.specs",
        "ParallelOptions": "moesaic.parallel",
        "apply_fsdp2": "moesaic.parallel",
        "apply_plan": "moesaic.parallel",
        "build_fsdp_mesh": "moesaic.parallel",
        "build_meshes": "moesaic.meshes",
        "clip_grad_norm_": "moesaic.train.grad_norm",
        "expert_fully_shard_modules": "moesaic.parallel",
        "expert_parallelize_modules": "moesaic.parallel",
        "export_hf": "moesaic.weights",
        "find_spec": "moesaic.specs",
        "from_pretrained": "moesaic.parallel",
        "fully_shard_planned": "moesaic.parallel",
        "load_full_state_dict": "moesaic.weights",
        "load_recipe": "moesaic.config",
        "parallelize": "moesaic.parallel",
        "register_spec": "moesaic.specs",
        "train_step": "moesaic.train.step",
    }
)


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    value = getattr(import_module(EXPORTS[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return __all__
