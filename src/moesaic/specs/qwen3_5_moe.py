"""qwen3_5_moe (text): experts are stacked on the Hub exactly as in the module.

Folders of the whole model, with its vision tower, hold the text model one level deeper.
"""

from moesaic.specs.base import ModelSpec

SPEC = ModelSpec(
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hub_layout="stacked",
    other_prefixes=(("model.", "model.language_model."),),
)
