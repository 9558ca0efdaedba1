"""Model families as data: what a model doesn't show by itself, and which families expert parallelism can't train."""

from moesaic.specs.base import ModelSpec
from moesaic.specs.refused import refusal
from moesaic.specs.registry import find_spec, match_names, register_spec

__all__ = ["ModelSpec", "find_spec", "match_names", "refusal", "register_spec"]
