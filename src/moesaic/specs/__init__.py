"""Model families as data: where the experts are, which modules are blocks, how the Hub's files name them."""

from moesaic.specs.base import ExpertParam, ModelSpec
from moesaic.specs.registry import find_spec, match_names, register_spec, registered_specs

__all__ = ["ExpertParam", "ModelSpec", "find_spec", "match_names", "register_spec", "registered_specs"]
