"""Families whose experts can't be trained with expert parallelism as a causal language model, and why. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NOT_AT_SEAM = "its experts aren't at transformers' experts seam (use_experts_implementation)"

# model_type -> reason, in words that follow "can't be trained with expert parallelism:".
REFUSED_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "openai_privacy_filter": "it labels tokens in both directions; transformers has no causal language model of it",
        "diffusion_gemma": "it denoises blocks of tokens (no causal language model), and its encoder and decoder share "
        "their experts, which would be split twice",
        "qwen3_omni_moe": "the whole of it has no forward to train; its thinker (qwen3_omni_moe_thinker) has one",
        "qwen3_omni_moe_talker": "it predicts audio codes from the thinker's states, not the next token of a text",
    }
    | dict.fromkeys(
        (
            "dbrx",
            "doge",
            "jetmoe",
            "llama4",
            "llama4_text",
            "longcat_flash",
            "nllb-moe",
            "step3p7",
            "switch_transformers",
        ),
        _NOT_AT_SEAM,
    )
)


def refusal(model_type: str) -> str | None:
    """Why the family can't be trained with expert parallelism, or None where nothing is known against it.

    Example: ``openai_privacy_filter`` -> "it labels tokens in both directions; ...".
    """
    return REFUSED_FAMILIES.get(model_type)
