"""qwen3_moe: one tensor per expert on the Hub, stacked in the module."""

from moesaic.specs.base import ModelSpec

SPEC = ModelSpec(model_types=("qwen3_moe",))
