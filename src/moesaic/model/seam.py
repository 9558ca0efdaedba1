"""transformers' experts seam: which modules hold the stacked experts of a model, and what their parameters are.

The decorator ``use_experts_implementation`` sets flags on each module of a class that it decorates; they mark the
module, and say how it computes. Shapes of the stacked parameters (E experts, I their width, H what they take and give,
which isn't always the model's hidden size):

    default                gate_up_proj [E, 2I, H]       down_proj [E, H, I]
    ``has_gate=False``     up_proj [E, I, H] in place of gate_up_proj
    ``is_transposed``      dims 1 and 2 swapped
    ``has_bias``           gate_up_proj_bias [E, 2I] (or up_proj_bias [E, I]), down_proj_bias [E, H]
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from moesaic.specs import match_names

SEAM_FLAGS = frozenset({"has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"})
DOWN = "down_proj"


def is_at_seam(module: nn.Module) -> bool:
    """True for a module that holds stacked experts and computes them through the seam."""
    return vars(module).keys() >= SEAM_FLAGS


def find_experts(model: nn.Module, pattern: str | None = None) -> dict[str, nn.Module]:
    """Experts modules by name, in the model's order. Empty for a dense model.

    Args:
        pattern: glob of the modules that count, ``*`` standing for one path segment; None: every module at the seam.

    Raises:
        ValueError: the pattern matches nothing, or a module that is not at the seam.
    """
    modules = dict(model.named_modules())
    if pattern is None:
        return {name: module for name, module in modules.items() if is_at_seam(module)}
    found = {name: modules[name] for name in match_names(pattern, modules)}
    strangers = [f"{name} ({type(module).__name__})" for name, module in found.items() if not is_at_seam(module)]
    if strangers:
        raise ValueError(
            f"not at transformers' experts seam (use_experts_implementation): {', '.join(strangers)}. "
            "Name the modules that hold the stacked experts, or use FSDP2 alone for this model."
        )
    return found


def num_experts(experts: nn.Module) -> int:
    """E. What the modules call ``num_experts`` is transformers' own affair, and nothing here relies on it."""
    return experts.get_parameter(DOWN).size(0)


def up_name(experts: nn.Module) -> str:
    """Name of the first of the two stacked weights."""
    return "gate_up_proj" if cast(Any, experts).has_gate else "up_proj"


def stacked_params(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters, each ``[E, ...]``; not those of modules in it, which all experts share.

    Raises:
        ValueError: a parameter of its own that isn't one slice per expert, or not known at the seam.
    """
    params = dict(experts.named_parameters(recurse=False))
    up = up_name(experts)
    expected = {up, DOWN} | ({f"{up}_bias", f"{DOWN}_bias"} if cast(Any, experts).has_bias else set())
    if params.keys() != expected or any(param.size(0) != num_experts(experts) for param in params.values()):
        shapes = {name: tuple(param.shape) for name, param in params.items()}
        raise ValueError(
            f"{type(experts).__name__} holds {shapes}; at transformers' experts seam, with its flags, it has "
            f"{sorted(expected)}, each [experts, ...]. Use FSDP2 alone for this model."
        )
    return params
