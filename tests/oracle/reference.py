"""The reference of every parity cell: plain transformers, one process, one document at a time, no padding or packing.

``load_reference`` makes (once per folder) a tiny checkpoint and, beside it, what one process computes on it: loss,
every gradient, the gradient norms, and the weights after two steps of SGD with momentum, and of AdamW with eps 1e-4
(with the default eps AdamW turns the rounding of near-zero gradients into steps of +-lr).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from moesaic.data.batch import IGNORE_INDEX, Sample

NUM_STEPS = 2
# Rounding must not flip a route: the k-th and (k+1)-th score of every token are further apart than this.
MIN_ROUTE_GAP = 1e-4

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.06,
    "attn_implementation": "sdpa",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny model and its documents. ``vocabulary`` limits the tokens that occur: 2 leaves experts without any."""

    family: str = "qwen3_moe"
    num_experts: int = 8
    tied: bool = False
    num_documents: int = 16
    vocabulary: int = 96

    @property
    def name(self) -> str:
        tied = "-tied" if self.tied else ""
        return f"{self.family}-e{self.num_experts}{tied}-d{self.num_documents}-v{self.vocabulary}"


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process computed. Keys are the Hugging Face module's parameter names."""

    folder: Path
    documents: list[Sample]
    loss: float
    norms: dict[float, float]
    grads: dict[str, Tensor]
    weights: dict[str, dict[str, Tensor]]


def build_config(case: Case) -> PretrainedConfig:
    """A tiny config of the case's family."""
    top_k = min(2, case.num_experts - 1)
    common = {**COMMON, "tie_word_embeddings": case.tied, "num_experts_per_tok": top_k}
    # Normalised weights of a single choice are always 1, and the router's gradient is then zero but for rounding.
    normalised = top_k > 1
    if case.family == "qwen3_moe":
        return Qwen3MoeConfig(
            **common, head_dim=16, num_experts=case.num_experts, moe_intermediate_size=32, norm_topk_prob=normalised
        )
    if case.family == "qwen2_moe":
        return Qwen2MoeConfig(
            **common,
            num_experts=case.num_experts,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            intermediate_size=96,
            norm_topk_prob=normalised,
            decoder_sparse_step=1,
        )
    if case.family == "qwen3_5_moe":
        return Qwen3_5MoeTextConfig(
            **common,
            head_dim=16,
            num_experts=case.num_experts,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    assert case.family == "mixtral", case.family
    return MixtralConfig(**common, num_local_experts=case.num_experts, intermediate_size=32, sliding_window=None)


def build_documents(case: Case) -> list[Sample]:
    """Documents of 3 to 14 tokens, most with a prompt that carries no loss."""
    random = torch.Generator().manual_seed(1)
    documents = []
    for _ in range(case.num_documents):
        length = int(torch.randint(3, 15, (), generator=random))
        ids = torch.randint(0, case.vocabulary, (length,), generator=random).tolist()
        prompt = int(torch.randint(0, length - 1, (), generator=random))
        labels = [IGNORE_INDEX if t < prompt else ids[t + 1] for t in range(length - 1)] + [IGNORE_INDEX]
        documents.append(Sample(input_ids=ids, labels=labels))
    return documents


def build_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": build_sgd,
    "adamw": build_adamw,
}


def load_reference(case: Case, root: Path) -> Reference:
    """The case's reference, computed the first time and read from ``root`` afterwards."""
    folder = root / case.name
    cached = folder / "reference.pt"
    if not cached.exists():
        _save_reference(case, folder, cached)
    return Reference(folder, build_documents(case), **torch.load(cached))


def _save_reference(case: Case, folder: Path, cached: Path) -> None:
    for seed in range(200):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(build_config(case), experts_implementation="eager").float()
        _spread_routers(model)
        _slow_decays(model)
        model.save_pretrained(folder)
        result = _run(model, build_documents(case))
        if result is not None:
            torch.save(result, cached)
            return
    raise AssertionError(f"{case}: no seed keeps every route gap above {MIN_ROUTE_GAP}")


def _spread_routers(model: PreTrainedModel) -> None:
    """Routers as decided as a trained model's: with the initial 0.02 all scores would nearly tie."""
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                nn.init.normal_(module.get_parameter("weight"), std=0.15)


def _slow_decays(model: PreTrainedModel) -> None:
    """Linear attention that forgets slowly. With the initial rates, up to 16 per token, what sets the decay has
    gradients that are mostly rounding: 1e-7 in the embeddings moves them by 2e-5, twice the tolerance."""
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("GatedDeltaNet"):
                module.get_parameter("A_log").uniform_(-3, 0)


def _run(model: PreTrainedModel, documents: list[Sample]) -> dict[str, Any] | None:
    """Two steps with each optimizer from the same weights; None where a route came too close."""
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    result: dict[str, Any] = {"weights": {}}
    for name, build_optimizer in OPTIMIZERS.items():
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(start[key])
        optimizer = build_optimizer(model.parameters())
        for step in range(NUM_STEPS):
            with _RouteGap(model) as gap:
                loss = backward_in_one_process(model, documents)
            if gap.smallest < MIN_ROUTE_GAP:
                return None
            if step == 0:
                grads = {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}
                flat = torch.cat([grad.flatten().double() for grad in grads.values()])
                norms = {p: float(torch.linalg.vector_norm(flat, p)) for p in (1.0, 2.0, 3.0, float("inf"))}
                result |= {"loss": loss, "grads": grads, "norms": norms}
            optimizer.step()
            optimizer.zero_grad()
        result["weights"][name] = {key: param.detach().clone() for key, param in model.named_parameters()}
    return result


def backward_in_one_process(model: PreTrainedModel, documents: list[Sample]) -> float:
    """Gradients of sum of token losses / number of loss tokens, one document at a time; returns the loss."""
    num_tokens = sum(document.num_loss_tokens for document in documents)
    total = 0.0
    for document in documents:
        logits = model(input_ids=torch.tensor([document.input_ids]), use_cache=False).logits[0]
        loss = F.cross_entropy(logits, torch.tensor(document.labels), reduction="sum", ignore_index=IGNORE_INDEX)
        (loss / num_tokens).backward()
        total += loss.item()
    return total / num_tokens


class _RouteGap:
    """Smallest distance between the k-th and the (k+1)-th routing score of any token, over the forwards inside."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.smallest = float("inf")
        self._routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._top_k = model.config.num_experts_per_tok
        self._handles: list[Any] = []

    def __enter__(self) -> _RouteGap:
        assert self._routers
        self._handles = [router.register_forward_hook(self._measure) for router in self._routers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _measure(self, _module: nn.Module, _args: Any, output: Any) -> None:
        scores = output[0].detach().float().softmax(-1).sort(descending=True).values
        gap = (scores[..., self._top_k - 1] - scores[..., self._top_k]).min().item()
        self.smallest = min(self.smallest, gap)
