"""What a model's routers say in a forward pass: their logits, the experts they chose, and the bias that corrects it.

Model code stays as it is. transformers declares for each family which class is its router and which of its outputs are
the logits (``_can_record_outputs``); the router of an experts module lies beside it, in the same MoE block. Chosen
experts are what reaches transformers' experts seam, so that every way of choosing (groups, correction biases, sampling)
is seen as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from moesaic.model.seam import find_experts, num_experts

# Names of the term that is added to the scores by which experts are chosen, and to nothing else.
BIAS_NAMES = frozenset({"e_score_correction_bias", "expert_bias"})
# Families whose routers give out probabilities under the name of logits.
WITHOUT_LOGITS = frozenset({"gemma4", "gemma4_text", "gemma4_unified", "diffusion_gemma"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One MoE layer in one forward: ``logits`` [T, E] with their graph (None where nobody asked), ``ids`` [T, K]."""

    logits: Tensor | None
    ids: Tensor


class RoutingRecorder:
    """Keeps what the routers of ``model`` said in its last training forward, until ``take`` asks for it.

    Only what happens within a forward of ``model`` itself counts, so a block that is recomputed in backward is not
    heard a second time.

    Args:
        routers: by the experts modules' names, the router and the index of the logits in its output (``find_routers``);
            empty to hear only which experts were chosen.

    Attributes:
        num_experts: by the experts modules' names, in forward order.
    """

    def __init__(self, model: nn.Module, routers: dict[str, tuple[nn.Module, int]]) -> None:
        experts = find_experts(model)
        self.num_experts = {name: num_experts(module) for name, module in experts.items()}
        self._with_logits = frozenset(routers)
        self._is_open = False
        self._logits: dict[str, Tensor] = {}
        self._ids: dict[str, Tensor] = {}
        model.register_forward_pre_hook(self._open)
        model.register_forward_hook(self._close, always_call=True)
        for name, module in experts.items():
            module.register_forward_pre_hook(self._ids_hook(name))
        for name, (router, index) in routers.items():
            router.register_forward_hook(self._logits_hook(name, index))

    def take(self) -> dict[str, Routing]:
        """The last forward's routing by layer; the layers that weren't called are left out. Forgets it."""
        heard = {name: Routing(logits=self._logits.get(name), ids=ids) for name, ids in self._ids.items()}
        self._forget()
        return heard

    def _forget(self) -> None:
        self._logits, self._ids = {}, {}

    def _open(self, module: nn.Module, _args: Any) -> None:
        self._forget()
        self._is_open = module.training

    def _close(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._is_open = False

    def _ids_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._is_open:
                assert name not in self._ids, f"{name} was called twice in one forward"
                self._ids[name] = cast(Tensor, args[1]).detach()  # (hidden_states, top_k_index, top_k_weights)

        return hook

    def _logits_hook(self, name: str, index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
            if not self._is_open:
                return
            logits = output[index].flatten(0, -2)
            if logits.size(-1) != self.num_experts[name]:
                raise ValueError(
                    f"{name}: its router scores {logits.size(-1)} choices, and there are {self.num_experts[name]} "
                    "experts. Its losses (aux_loss_coef, z_loss_coef) aren't defined; remove them from router_config."
                )
            self._logits[name] = logits

        return hook


def find_routers(model: PreTrainedModel) -> dict[str, tuple[nn.Module, int]]:
    """By the experts modules' names: the router beside them, and the index of its logits among what it returns.

    A layer whose router has no logits (one that hashes tokens) is left out.

    Raises:
        ValueError: no router of the model gives out logits.
    """
    indices = _logits_indices(model)
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, int]] = {}
    for name in find_experts(model):
        block = modules[name.rpartition(".")[0]]
        beside = [(child, indices[kind]) for child in block.children() for kind in indices if isinstance(child, kind)]
        if beside:
            found[name] = beside[0]
    if not found or model.config.model_type in WITHOUT_LOGITS:
        raise ValueError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}): its routers give out no logits, so "
            "aux_loss_coef and z_loss_coef have nothing to act on. Remove them from router_config."
        )
    return found


def find_biases(model: nn.Module) -> dict[str, Tensor]:
    """By the experts modules' names: the correction bias of the layer's router, a buffer or a frozen parameter.

    A layer without one is left out.

    Raises:
        ValueError: no layer has one; or it can't be moved in small steps: not one number per expert, or not in fp32.
    """
    modules = dict(model.named_modules())
    found: dict[str, Tensor] = {}
    for name, module in find_experts(model).items():
        parent = name.rpartition(".")[0]
        for key, tensor in _tensors(modules[parent]):
            if key.rpartition(".")[2] not in BIAS_NAMES or key.startswith("experts."):
                continue
            if tensor.numel() != num_experts(module) or tensor.dtype != torch.float32 or tensor.requires_grad:
                raise ValueError(
                    f"{parent}.{key}: {tuple(tensor.shape)} of {tensor.dtype}, for {num_experts(module)} experts; "
                    "bias_update_rate needs one fp32 number per expert that no gradient trains. Remove it from "
                    "router_config, or store parameters in fp32 (master_dtype: fp32)."
                )
            found[name] = tensor
    if not found:
        raise ValueError(
            f"{type(model).__name__}: no router has a correction bias ({', '.join(sorted(BIAS_NAMES))}), so "
            "bias_update_rate has nothing to update. Remove it from router_config; aux_loss_coef balances any router."
        )
    return found


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_buffers()
    yield from module.named_parameters()


def _logits_indices(model: nn.Module) -> dict[type[nn.Module], int]:
    """Router classes, as the model and the models in it declare them, and where their logits are."""
    indices: dict[type[nn.Module], int] = {}
    for module in model.modules():
        declared = (module._can_record_outputs or {}) if isinstance(module, PreTrainedModel) else {}
        entry = declared.get("router_logits")
        if entry is None:
            continue
        for recorder in entry if isinstance(entry, list) else [entry]:
            if isinstance(recorder, OutputRecorder):
                indices[recorder.target_class] = recorder.index
    return indices
