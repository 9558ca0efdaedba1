"""qwen3_5_moe (text): experts are stacked on the Hub exactly as in the module."""

from moesaic.specs.base import ModelSpec

SPEC = ModelSpec(model_types=("qwen3_5_moe_text", "qwen3_5_moe"), hub_layout="stacked")
