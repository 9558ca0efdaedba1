"""An engine's rank in small, in the manner of vLLM: what loaders do to fused, stacked, padded and tied parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Pairs = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Pairs], object]

NUM_EXPERTS, HIDDEN, INNER, HEAD, NUM_HEADS, NUM_KV_HEADS, VOCAB = 6, 8, 12, 4, 8, 2, 37
LAST_ROW = 40  # the vocabulary, padded


class TinyEngine:
    """Parameters and loader of one rank: fused qkv with repeated kv heads, stacked w13 and w2, a padded vocabulary."""

    def __init__(
        self,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        tied: bool = False,
        num_layers: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tp_size, self.tp_rank = tp_size, tp_rank
        per_rank = NUM_EXPERTS // ep_size
        self.experts = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
        self.moe_size, self.moe_rank = (1, 0) if ep_size > 1 else (tp_size, tp_rank)
        self.num_heads = NUM_HEADS // tp_size
        self.num_kv_heads = max(1, NUM_KV_HEADS // tp_size)
        self.rows = LAST_ROW // tp_size
        inner = INNER // self.moe_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.rows, HIDDEN)}
        for layer in range(num_layers):
            name = f"layers.{layer}"
            shapes[f"{name}.norm.weight"] = (HIDDEN,)
            shapes[f"{name}.qkv.weight"] = ((self.num_heads + 2 * self.num_kv_heads) * HEAD, HIDDEN)
            shapes[f"{name}.qkv.bias"] = ((self.num_heads + 2 * self.num_kv_heads) * HEAD,)
            shapes[f"{name}.o.weight"] = (HIDDEN, self.num_heads * HEAD)
            shapes[f"{name}.w13"] = (per_rank, 2 * inner, HIDDEN)
            shapes[f"{name}.w2"] = (per_rank, HIDDEN, inner)
        shapes["head.weight"] = (self.rows, HIDDEN)
        self.params = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        if tied:
            self.params["head.weight"] = self.params["embed.weight"]
        self.tied = tied

    def load(self, weights: Pairs) -> None:
        for key, tensor in weights:
            self.load_one(key, tensor)

    def load_one(self, key: str, tensor: torch.Tensor) -> None:
        layer = key.rsplit(".", 2)[0] if ".experts." not in key else key.split(".experts.")[0]
        if key in self.params and (".norm." in key or ".o." in key):
            part = tensor.chunk(self.tp_size, dim=1)[self.tp_rank] if ".o." in key else tensor
            self.params[key].copy_(part)
        elif key in ("embed.weight", "head.weight"):
            if self.tied and key == "head.weight":
                return
            start = self.tp_rank * self.rows
            part = tensor[start : start + self.rows]
            self.params[key][: len(part)].copy_(part)
            self.params[key][len(part) :].zero_()
        elif ".experts." in key:
            self.load_expert(layer, key, tensor)
        else:
            self.load_qkv(layer, key, tensor)

    def load_qkv(self, layer: str, key: str, tensor: torch.Tensor) -> None:
        name, kind = key.split(".")[-2:]
        param = self.params[f"{layer}.qkv.{kind}"].data
        size = (self.num_heads if name == "q" else self.num_kv_heads) * HEAD
        start = {"q": 0, "k": self.num_heads, "v": self.num_heads + self.num_kv_heads}[name] * HEAD
        repeats = max(1, self.tp_size // NUM_KV_HEADS) if name != "q" else 1
        param.narrow(0, start, size).copy_(tensor.narrow(0, self.tp_rank // repeats * size, size))

    def load_expert(self, layer: str, key: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 3:  # stacked: gate_up [E, 2 I, H]
            for expert in range(NUM_EXPERTS):
                if "down" in key:
                    self.load_expert(layer, f"{layer}.experts.{expert}.down", tensor[expert])
                    continue
                for name, half in zip(("gate", "up"), tensor[expert].chunk(2), strict=True):
                    self.load_expert(layer, f"{layer}.experts.{expert}.{name}", half)
            return
        expert = int(key.split(".")[-2])
        if expert not in self.experts:
            return
        inner = INNER // self.moe_size
        if key.endswith("down"):
            param = self.params[f"{layer}.w2"][expert - self.experts.start]
            param.copy_(tensor.narrow(1, self.moe_rank * inner, inner))
        else:
            param = self.params[f"{layer}.w13"][expert - self.experts.start]
            part = tensor.chunk(self.moe_size, 0)[self.moe_rank]
            param[:inner].copy_(part) if key.endswith("gate") else param[inner:].copy_(part)


def make_files(*, stacked: bool = False, tied: bool = False, num_layers: int = 1) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN)}
    for layer in range(num_layers):
        name = f"layers.{layer}"
        shapes[f"{name}.norm.weight"] = (HIDDEN,)
        for part, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            shapes[f"{name}.{part}.weight"] = (heads * HEAD, HIDDEN)
            shapes[f"{name}.{part}.bias"] = (heads * HEAD,)
        shapes[f"{name}.o.weight"] = (HIDDEN, NUM_HEADS * HEAD)
        if stacked:
            shapes[f"{name}.experts.gate_up"] = (NUM_EXPERTS, 2 * INNER, HIDDEN)
            shapes[f"{name}.experts.down"] = (NUM_EXPERTS, HIDDEN, INNER)
        for expert in range(0 if stacked else NUM_EXPERTS):
            shapes[f"{name}.experts.{expert}.down"] = (HIDDEN, INNER)
            shapes[f"{name}.experts.{expert}.gate"] = (INNER, HIDDEN)
            shapes[f"{name}.experts.{expert}.up"] = (INNER, HIDDEN)
    if not tied:
        shapes["head.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(len(shapes))
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def describe(files: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in files.items()}


def encode(files: Mapping[str, torch.Tensor]) -> Tensors:
    """Each element a number of its own over all files, from 1: 0 is what a loader fills in."""
    encoded, start = {}, 1
    for key, tensor in files.items():
        encoded[key] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        start += tensor.numel()
    return encoded


RANKS: list[dict[str, Any]] = [
    *({"tp_size": size, "tp_rank": rank} for size in (1, 2, 4) for rank in range(size)),
    *({"ep_size": 2, "ep_rank": rank} for rank in range(2)),
    *({"tp_size": 2, "tp_rank": tp, "ep_size": 2, "ep_rank": ep} for tp in range(2) for ep in range(2)),
]


def random_view(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """A few random views, one after the other."""
    for _ in range(choose.randrange(4)):
        if not tensor.numel():
            return tensor
        kind = choose.randrange(6)
        dim = choose.randrange(tensor.dim()) if tensor.dim() else 0
        if kind == 0 and tensor.dim():
            size = choose.randint(1, tensor.shape[dim])
            tensor = tensor.narrow(dim, choose.randint(0, tensor.shape[dim] - size), size)
        elif kind == 1 and tensor.dim() > 1:
            tensor = tensor.transpose(dim, choose.randrange(tensor.dim()))
        elif kind == 2 and tensor.dim():
            tensor = tensor[(slice(None),) * dim + (slice(choose.randrange(2), None, choose.randint(1, 3)),)]
        elif kind == 3 and tensor.dim():
            halves = next((n for n in (2, 3, 5) if tensor.shape[dim] % n == 0), 1)
            tensor = tensor.unflatten(dim, (halves, -1))
        elif kind == 4 and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == 5 and tensor.dim() > 1:
            tensor = tensor.select(dim, choose.randrange(tensor.shape[dim]))
    return tensor
