"""How much work a token is, and how much a device can do: what TFLOP/s and MFU are made of.

FLOPs per token, forward and backward (PaLM, arXiv 2204.02311, appendix B):  ``6 N + 12 L A S``
    N  parameters that one token meets: of routed experts top_k / E, of an embedding that is only looked up none
    L  layers;  A  attention width, heads * head size;  S  tokens of a sequence
Recomputation under activation checkpointing is no useful work and isn't counted. The term in S is an upper bound for
causal attention and for packed sequences.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from moesaic.specs import ModelSpec, match_names

# Dense bf16 peak of one device, FLOP/s, from the makers' data sheets; a name's first match counts.
PEAK_FLOPS_PER_S: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
)


def peak_flops_per_s(device_name: str | None) -> float | None:
    """bf16 peak of a device by its name, or None where it isn't known (every CPU): MFU is then not a number we have."""
    if device_name is None:
        return None
    return next((peak for part, peak in PEAK_FLOPS_PER_S if part in device_name), None)


def num_active_params(model: nn.Module, spec: ModelSpec | None, top_k: int) -> float:
    """Parameters that one token meets; see N above. Not collective: a DTensor knows its global size.

    Args:
        spec: names the routed experts, stacked on dim 0; None for a model without any.
        top_k: experts that a token visits.
    """
    modules = dict(model.named_modules())
    experts = set() if spec is None else set(match_names(spec.experts, modules))
    looked_up = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    multiplied = {id(module.weight) for module in modules.values() if isinstance(module, nn.Linear)}
    total = 0.0
    for name, param in model.named_parameters():
        if id(param) in looked_up - multiplied:  # a tied embedding is the head's weight as well, and counts
            continue
        total += param.numel() * (top_k / param.size(0) if name.rpartition(".")[0] in experts else 1.0)
    return total


def flops_per_token(active_params: float, num_layers: int, attention_size: int, seq_len: int) -> float:
    """``6 N + 12 L A S``. Example: 10 parameters, 2 layers, width 4, 8 tokens: 60 + 768 = 828."""
    return 6 * active_params + 12 * num_layers * attention_size * seq_len


def model_flops_per_token(model: PreTrainedModel, spec: ModelSpec | None, seq_len: int) -> float:
    """FLOPs per token of a Hugging Face model for sequences of ``seq_len`` tokens."""
    text_config = model.config.get_text_config()
    config = text_config.to_dict()
    top_k = 1 if spec is None else config[text_config.attribute_map.get(spec.top_k_field, spec.top_k_field)]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return flops_per_token(
        num_active_params(model, spec, top_k),
        config["num_hidden_layers"],
        config["num_attention_heads"] * head_size,
        seq_len,
    )
