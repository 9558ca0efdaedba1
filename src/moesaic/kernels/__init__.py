"""Operators with several implementations: which there are, which a model gets, and how it gets them."""

from moesaic.kernels.base import Implementation, Operator, Package
from moesaic.kernels.bind import apply_kernels, find_bound_kernels
from moesaic.kernels.registry import BUILT_IN_OPERATORS, KernelChoice, KernelSelection, extend, select_kernels

__all__ = [
    "BUILT_IN_OPERATORS",
    "Implementation",
    "KernelChoice",
    "KernelSelection",
    "Operator",
    "Package",
    "apply_kernels",
    "extend",
    "find_bound_kernels",
    "select_kernels",
]
