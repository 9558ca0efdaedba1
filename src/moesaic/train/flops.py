"""How much work a batch is, and how much a device can do: what TFLOP/s and MFU are made of.

FLOPs of T tokens, forward and backward:  ``6 N T + 12 L A P``
    N  parameters that one token meets: of routed experts top_k / E, of an embedding that is only looked up none
    L  layers with softmax attention;  A  attention width, heads * head size
    P  (query, key) pairs of causal attention: n (n + 1) / 2 for a document of n tokens, summed over the documents

Source: PaLM, arXiv 2204.02311, appendix B: ``6 N + 12 L A S`` per token, where each token of a sequence of S meets all
S. Here a token meets what causal attention lets it see of its own document, so that the second term is half of PaLM's
for one document, and less for several. Padding counts nothing, neither in T nor in P.

Recomputation under activation checkpointing is no useful work and isn't counted. P is an upper bound where a layer has
a sliding window shorter than the documents; of a linear-attention layer only the parameters count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from moesaic.model.seam import find_experts
from moesaic.specs import ModelSpec

# Layers, as configs call their kinds, in which no token looks at another by softmax attention.
NO_PAIRS = frozenset({"linear_attention", "conv", "mamba", "moe", "mlp"})
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


def num_active_params(model: nn.Module, experts: Mapping[str, nn.Module], top_k: int) -> float:
    """Parameters that one token meets; see N above. Not collective: a DTensor knows its global size.

    Args:
        experts: modules of routed experts, by name; their own parameters are stacked on dim 0.
        top_k: experts that a token visits.
    """
    modules = dict(model.named_modules())
    looked_up = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    multiplied = {id(module.weight) for module in modules.values() if isinstance(module, nn.Linear)}
    total = 0.0
    for name, param in model.named_parameters():
        if id(param) in looked_up - multiplied:  # a tied embedding is the head's weight as well, and counts
            continue
        total += param.numel() * (top_k / param.size(0) if name.rpartition(".")[0] in experts else 1.0)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of a model, forward and backward: ``per_token`` is 6 N, ``per_pair`` is 12 L A (the module's formula)."""

    per_token: float
    per_pair: float

    def total(self, num_tokens: int, num_pairs: int) -> float:
        """``6 N T + 12 L A P``.

        Example: 10 parameters, 2 layers, width 4; one document of 8 tokens, 36 pairs: 60 * 8 + 96 * 36 = 3936.
        """
        return self.per_token * num_tokens + self.per_pair * num_pairs


def num_causal_pairs(document_lengths: Iterable[int]) -> int:
    """P, (query, key) pairs within documents, a token with itself included. Example: lengths 3, 2: 6 + 3 = 9."""
    return sum(length * (length + 1) // 2 for length in document_lengths)


def build_model_flops(model: PreTrainedModel, spec: ModelSpec) -> ModelFlops:
    """What a token and a pair cost in a Hugging Face model. Not collective.

    Raises:
        ValueError: the model has experts, and its config says in none of the spec's fields how many a token chooses.
    """
    text_config = model.config.get_text_config()
    config = text_config.to_dict()
    experts = find_experts(model, spec.experts)
    top_k = next((config[field] for field in spec.top_k_fields if isinstance(config.get(field), int)), None)
    if experts and top_k is None:
        raise ValueError(
            f"model_type={model.config.model_type!r}: its config has none of {spec.top_k_fields}, so the experts that "
            "a token chooses can't be counted. Register a ModelSpec with the family's top_k_fields."
        )
    num_heads = text_config.num_attention_heads
    head_size = config.get("head_dim") or text_config.hidden_size // num_heads
    kinds = config.get("layer_types") or config.get("layers_block_type")
    num_layers = sum(kind not in NO_PAIRS for kind in kinds) if kinds else text_config.num_hidden_layers
    return ModelFlops(
        per_token=6 * num_active_params(model, experts, top_k or 1),
        per_pair=12 * num_layers * num_heads * head_size,
    )
