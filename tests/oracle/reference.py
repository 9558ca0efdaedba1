"""The reference of every parity cell: plain transformers, one process, one document at a time, no padding or packing.

``load_reference`` makes (once per folder) a tiny checkpoint and, beside it, what one process computes on it: loss,
every gradient, the gradient norms, and the weights after two steps of SGD with momentum, and of AdamW with eps 1e-4
(with the default eps AdamW turns the rounding of near-zero gradients into steps of +-lr).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

from moesaic.data.batch import IGNORE_INDEX, Sample
from moesaic.model.build import find_auto_class
from moesaic.model.seam import find_experts
from tests.families.configs import FIRST_TOKEN, tiny_config

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
    """A tiny model and its documents. ``vocabulary`` limits the tokens that occur: 2 leaves experts without any.

    ``is_listed``: the model is that of ``tests/families``; ``num_experts`` and ``tied`` have no effect then.
    """

    family: str = "qwen3_moe"
    is_listed: bool = False
    num_experts: int = 8
    tied: bool = False
    num_documents: int = 8
    vocabulary: int = 96

    @property
    def name(self) -> str:
        tied = "-tied" if self.tied else ""
        if self.is_listed:
            return f"listed-{self.family}-d{self.num_documents}-v{self.vocabulary}"
        return f"{self.family}-e{self.num_experts}{tied}-d{self.num_documents}-v{self.vocabulary}"


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process computed. Keys are the Hugging Face module's parameter names."""

    folder: Path
    is_listed: bool
    documents: list[Sample]
    loss: float
    norms: dict[float, float]
    grads: dict[str, Tensor]
    weights: dict[str, dict[str, Tensor]]


def build_config(case: Case) -> PretrainedConfig:
    """A tiny config of the case's family."""
    if case.is_listed:
        config = tiny_config(case.family)
        config.get_text_config().initializer_range = 0.06  # as COMMON's; the default of 0.02 leaves small gradients
        return config
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
        first = FIRST_TOKEN if case.is_listed else 0
        ids = torch.randint(first, first + case.vocabulary, (length,), generator=random).tolist()
        prompt = int(torch.randint(0, length - 1, (), generator=random))
        labels = [IGNORE_INDEX if t < prompt else ids[t + 1] for t in range(length - 1)] + [IGNORE_INDEX]
        documents.append(Sample(input_ids=ids, labels=labels))
    return documents


def build_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build_adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Fused: one DTensor dispatch a step instead of several a parameter (SGD has it for plain tensors only).
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4, weight_decay=0.1, fused=True)


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
    return Reference(folder, case.is_listed, build_documents(case), **torch.load(cached))


def _save_reference(case: Case, folder: Path, cached: Path) -> None:
    for seed in range(200):
        torch.manual_seed(seed)
        config = build_config(case)
        model = find_auto_class(config).from_config(config, experts_implementation="eager").float()
        _spread_routers(model)
        _slow_decays(model)
        _spread_hashes(model)
        documents = build_documents(case)
        with torch.no_grad(), _RouteGap() as gap:
            for document in documents:
                model(input_ids=torch.tensor([document.input_ids]), use_cache=False)
        if gap.smallest < MIN_ROUTE_GAP:
            continue
        model.save_pretrained(folder)
        result = _run(model, documents)
        if result is not None:
            torch.save(result, cached)
            return
    raise AssertionError(f"{case}: no seed keeps every route gap above {MIN_ROUTE_GAP}")


def _spread_routers(model: PreTrainedModel) -> None:
    """Routers as decided as a trained model's: with the initial 0.02 all scores would nearly tie.

    A router is what stands beside the experts under one of these names.
    """
    with torch.no_grad():
        for name in find_experts(model):
            for child, module in model.get_submodule(name.rpartition(".")[0]).named_children():
                for param in module.parameters() if child in ("gate", "router") else ():
                    if param.ndim == 2:
                        nn.init.normal_(param, std=1.2 / math.sqrt(param.size(1)))


def _spread_hashes(model: PreTrainedModel) -> None:
    """deepseek_v4's first layers choose experts by token id, from a table that is all zeros before it is loaded."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            num_experts = model.config.get_text_config().n_routed_experts
            table.copy_(torch.rand(table.size(0), num_experts).argsort(dim=-1)[:, : table.size(1)])


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
    loss = _backward_apart(model, documents)
    if loss is None:
        return None
    grads = {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}
    flat = torch.cat([grad.flatten().double() for grad in grads.values()])
    norms = {p: float(torch.linalg.vector_norm(flat, p)) for p in (1.0, 2.0, 3.0, float("inf"))}
    weights = {}
    for name, build_optimizer in OPTIMIZERS.items():
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(start[key])
                param.grad = grads[key].clone() if key in grads else None
        optimizer = build_optimizer(model.parameters())
        optimizer.step()
        for _ in range(NUM_STEPS - 1):
            optimizer.zero_grad()
            if _backward_apart(model, documents) is None:
                return None
            optimizer.step()
        optimizer.zero_grad()
        weights[name] = {key: param.detach().clone() for key, param in model.named_parameters()}
    return {"loss": loss, "grads": grads, "norms": norms, "weights": weights}


def _backward_apart(model: PreTrainedModel, documents: list[Sample]) -> float | None:
    """As ``backward_in_one_process``; None where a route came too close."""
    with _RouteGap() as gap:
        loss = backward_in_one_process(model, documents)
    return None if gap.smallest < MIN_ROUTE_GAP else loss


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


class _RouteGap(TorchDispatchMode):
    """Smallest distance between the k-th and the (k+1)-th score of any ``topk`` inside: of experts, or of groups.

    Scores that a mask has taken out don't compete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.smallest = float("inf")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            scores, top_k = args[0].float(), args[1]
            if top_k < scores.size(-1):
                ordered = scores.sort(descending=True).values
                chosen, next_one = ordered[..., top_k - 1], ordered[..., top_k]
                gaps = (chosen - next_one)[next_one.isfinite()]
                self.smallest = min([self.smallest, *gaps.flatten().tolist()])
        return out
