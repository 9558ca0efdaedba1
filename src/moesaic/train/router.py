"""What balances the experts: the routers' own losses, and the correction of the bias by which experts are chosen.

Sizes: E experts, L MoE layers, T tokens of the step. Only documents' own tokens count (with loss or without; no
padding), each once, over all micro-batches and all ranks with different tokens. With C_e the number of times that
expert e was chosen and p the softmax of a router's logits, in fp32:

    aux loss    E * sum_e f_e P_e,   f_e = C_e / (L T),   P_e = sum over layers and tokens of p_e / (L T)
    z loss      sum over layers and tokens of logsumexp(logits)^2 / (L T)
    bias_e     += rate * sign(mean of C - C_e), per layer, once after the optimizer's step

The aux loss is transformers' (and Mixtral's): layers are pooled before the product, and evenly loaded experts have a
loss of K. f is a count, through which no gradient flows; so given f, the loss is a sum over tokens, and what each
rank and micro-batch adds is that sum over its own. f itself must be known before the first backward. With one
micro-batch it is: one all-reduce between forward and backward. With several, a first pass without gradients counts
them all (``RouterTraining.begin``): a forward more per micro-batch is what it costs that the result doesn't depend on
how a step is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from moesaic.data.batch import Batch
from moesaic.meshes import Meshes
from moesaic.model.buffers import random_state_kept
from moesaic.model.routers import Routing, RoutingRecorder, find_biases, find_routers
from moesaic.ops import host
from moesaic.parallel.units import list_units

AUX_LOSS, Z_LOSS, MAX_BIAS = "aux_loss", "z_loss", "max_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How routers are trained beside the loss of their tokens; 0 is off.

    Attributes:
        aux_loss_coef: of the load-balancing loss, added to the step's loss.
        z_loss_coef: of the z loss, added to the step's loss.
        bias_update_rate: step of the correction bias.
    """

    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0

    @property
    def has_losses(self) -> bool:
        """Whether something is added to the loss."""
        return bool(self.aux_loss_coef or self.z_loss_coef)


def build_router_training(model: PreTrainedModel, options: RouterOptions, meshes: Meshes) -> RouterTraining | None:
    """None where nothing is on. Once per model, which is sharded and has its weights; not collective.

    Raises:
        ValueError: the model has no routers with logits, or no correction bias, and the options ask for them.
    """
    if not (options.has_losses or options.bias_update_rate):
        return None
    return RouterTraining(model, options, meshes)


class RouterTraining:
    """Over each step: ``begin``, then after each micro-batch's forward ``penalty``, then ``end``. Every rank alike."""

    def __init__(self, model: PreTrainedModel, options: RouterOptions, meshes: Meshes) -> None:
        self._model = model
        self._options = options
        # Routers see each token on one rank: tp peers have other runs of the same sequence.
        self._group = meshes.data._flatten().get_group()
        self._device = torch.device(meshes.data.device_type)
        routers = find_routers(model) if options.has_losses else {}
        self._biases = find_biases(model) if options.bias_update_rate else {}
        _require_fp32_in_forward(model, self._biases)
        self._recorder = RoutingRecorder(model, routers)
        self._with_logits = tuple(routers)
        self._counts = self._no_counts()
        self._are_global = False
        self._num_rows = torch.ones((), dtype=torch.float64)
        self._shares: dict[str, Tensor] = {}

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Count the step's tokens, and with an aux loss over several micro-batches the choices of their routers.

        Collective over all ranks: one all-reduce, and with the first pass a second, and a forward per
        micro-batch.
        """
        num_tokens = torch.stack([batch.real_tokens.sum() for batch in micro_batches]).sum()
        dist.all_reduce(num_tokens, group=self._group)
        self._num_rows = num_tokens.clamp(min=1).double() * max(1, len(self._with_logits))
        self._counts = self._no_counts()
        self._are_global = False
        self._shares = {}
        if self._options.aux_loss_coef and len(micro_batches) > 1:
            self._count_first(micro_batches)

    @torch.no_grad()
    def _count_first(self, micro_batches: Sequence[Batch]) -> None:
        # What this pass draws (dropout, jitter), the pass with gradients draws again.
        with random_state_kept(self._device):
            for batch in micro_batches:
                # Routers are all that counts: of the logits, one position is enough.
                self._model(**{**batch.model_inputs(), "logits_to_keep": 1})
                self._add_counts(self._recorder.take(), batch.real_tokens.flatten())
        self._sum_counts()

    def penalty(self, batch: Batch) -> Tensor:
        """0-D fp32: this rank's share of the weighted router losses for the micro-batch whose forward just ended.

        Summed over micro-batches and ranks the shares are ``coef * loss``; its gradients are to be summed likewise.
        With an aux loss and a single micro-batch collective over all ranks: one all-reduce.
        """
        heard = self._recorder.take()
        is_real = batch.real_tokens.flatten()
        if not self._are_global:
            self._add_counts(heard, is_real)
        total = torch.zeros((), device=self._device)
        if not self._options.has_losses:
            return total
        if self._options.aux_loss_coef:
            if not self._are_global:
                self._sum_counts()
            total = total + self._options.aux_loss_coef * self._keep(AUX_LOSS, self._aux_loss(heard, is_real))
        if self._options.z_loss_coef:
            total = total + self._options.z_loss_coef * self._keep(Z_LOSS, self._z_loss(heard, is_real))
        return total

    def end(self, *, is_finite: bool) -> None:
        """After the optimizer: move the correction biases, unless the step was skipped.

        With ``bias_update_rate`` collective over all ranks: one all-reduce, where the losses made none.
        """
        if not (self._biases and is_finite):
            return
        if not self._are_global:
            self._sum_counts()
        for name, bias in self._biases.items():
            counts = self._counts[name]
            # Integers: sign(mean - C_e), exactly, so that the buffers of all ranks stay equal bit for bit.
            direction = torch.sign(counts.sum() - counts * counts.numel())
            _add(bias, self._options.bias_update_rate * direction.float())

    def shares(self) -> Mapping[str, Tensor]:
        """This rank's part of each unweighted router loss of the last step, 0-D fp32; see ``StepResult``."""
        return self._shares

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """What is on: ``aux_loss`` and ``z_loss`` of the last step, global; ``max_bias``, the largest bias by size.

        Collective over all ranks.
        """
        numbers: dict[str, float] = {}
        if self._shares:
            total = torch.stack(list(self._shares.values()))
            dist.all_reduce(total, group=self._group)
            numbers |= {name: host.read_float(value) for name, value in zip(self._shares, total, strict=True)}
        if self._biases:
            own = [bias.to_local() if isinstance(bias, DTensor) else bias for bias in self._biases.values()]
            largest = torch.cat([torch.zeros(1), *(bias.flatten().cpu() for bias in own)]).abs().max().to(self._device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            numbers[MAX_BIAS] = host.read_float(largest)
        return numbers

    def _no_counts(self) -> dict[str, Tensor]:
        sizes = self._recorder.num_experts
        return {name: torch.zeros(size, dtype=torch.int64, device=self._device) for name, size in sizes.items()}

    def _add_counts(self, heard: Mapping[str, Routing], is_real: Tensor) -> None:
        for name, routing in heard.items():
            ids = routing.ids
            assert ids.size(0) == is_real.numel(), f"{name}: {ids.size(0)} rows routed, {is_real.numel()} in the batch"
            chosen = is_real.to(torch.int64)[:, None].expand_as(ids)
            self._counts[name].scatter_add_(0, ids.flatten(), chosen.flatten())

    def _sum_counts(self) -> None:
        """One all-reduce of all layers' counts."""
        flat = torch.cat(list(self._counts.values()))
        dist.all_reduce(flat, group=self._group)
        sizes = list(self._recorder.num_experts.values())
        self._counts = dict(zip(self._counts, flat.split(sizes), strict=True))
        self._are_global = True

    def _aux_loss(self, heard: Mapping[str, Routing], is_real: Tensor) -> Tensor:
        chosen = torch.stack([self._counts[name] for name in self._with_logits]).sum(0)
        factors = (chosen.numel() * chosen.double() / self._num_rows.square()).float()
        return torch.stack([(p.sum(0) * factors).sum() for p in self._probabilities(heard, is_real)]).sum()

    def _probabilities(self, heard: Mapping[str, Routing], is_real: Tensor) -> list[Tensor]:
        return [logits.softmax(-1) * is_real[:, None] for logits in self._logits(heard)]

    def _z_loss(self, heard: Mapping[str, Routing], is_real: Tensor) -> Tensor:
        squares = [(logits.logsumexp(-1).square() * is_real).sum() for logits in self._logits(heard)]
        return torch.stack(squares).sum() / self._num_rows.float()

    def _logits(self, heard: Mapping[str, Routing]) -> list[Tensor]:
        logits = [heard[name].logits for name in self._with_logits]
        assert all(one is not None for one in logits), "a router that gives logits gave none"
        return [one.float() for one in logits if one is not None]

    def _keep(self, name: str, share: Tensor) -> Tensor:
        self._shares[name] = self._shares.get(name, torch.zeros_like(share)) + share.detach()
        return share


def _require_fp32_in_forward(model: PreTrainedModel, biases: Mapping[str, Tensor]) -> None:
    """Some families have the bias as a parameter, which FSDP gathers in the computing type like any other."""
    names = {id(param): name for name, param in model.named_parameters()}
    mine = {names[id(bias)] for bias in biases.values() if id(bias) in names}
    rounded = [row.name for row in list_units(model) if row.name in mine and row.dtypes[1] != torch.float32]
    if rounded:
        raise ValueError(
            f"bias_update_rate: {rounded[0]} is a parameter, which is gathered in the computing type; in bf16 most of "
            "its small steps would be rounded away. Set bf16: false, or remove bias_update_rate."
        )


@torch.no_grad()
def _add(bias: Tensor, change: Tensor) -> None:
    """Add ``change`` [E], equal on every rank, to a bias [E] or [1, E], whole or sharded. In place, nothing is sent."""
    change = change.view(bias.shape)
    if isinstance(bias, DTensor):
        local = distribute_tensor(change, bias.device_mesh, bias.placements, src_data_rank=None)
        bias.to_local().add_(local.to_local().to(bias.device))  # offloaded, it lies on the host
    else:
        bias.add_(change)
