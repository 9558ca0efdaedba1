"""Router losses, correction biases and frozen modules: one process's computation of them, and a rank's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from moesaic.data.batch import IGNORE_INDEX, Sample
from moesaic.meshes import build_meshes
from moesaic.model.build import find_auto_class
from moesaic.parallel.apply import from_pretrained
from moesaic.train.router import RouterOptions, build_router_training
from moesaic.train.step import train_step
from tests.families.configs import FIRST_TOKEN
from tests.oracle.cells import Cell, ShardOptimizer, build_batch, grads_of, share_documents, worst
from tests.oracle.reference import MIN_ROUTE_GAP, NUM_STEPS, OPTIMIZERS, Reference, _RouteGap

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCase:
    """What is trained, beside a reference's model and documents."""

    options: RouterOptions = RouterOptions()
    frozen: tuple[str, ...] = ()


def compute_in_one_process(reference: Reference, case: RouterCase) -> Numbers:
    """Plain transformers, one document at a time; router losses from all documents' logits together.

    Of the ``documents`` that it returns: the reference's, with other tokens where a route came too close to a tie.
    """
    for shift in range(100):
        documents = [_shift(document, shift) for document in reference.documents]
        results = _compute(reference, documents, case)
        if results is not None:
            return results | {"documents": documents}
    raise AssertionError(f"{case}: no documents keep every route gap above {MIN_ROUTE_GAP}")


def _shift(document: Sample, shift: int) -> Sample:
    def moved(token: int) -> int:
        return token if token < FIRST_TOKEN else FIRST_TOKEN + (token - FIRST_TOKEN + shift) % (96 - FIRST_TOKEN)

    return Sample(input_ids=[*map(moved, document.input_ids)], labels=[*map(moved, document.labels)])


def _compute(reference: Reference, documents: list[Sample], case: RouterCase) -> Numbers | None:
    """None where a route came too close."""
    auto_class = find_auto_class(_config(reference))
    model = auto_class.from_pretrained(reference.folder, dtype=torch.float32, experts_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    model.train()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for key, module in model.named_modules():
        if any(_matches(pattern, key) for pattern in case.frozen):
            module.requires_grad_(False)
    first = _backward_apart(model, documents, case.options)
    if first is None:
        return None
    losses, first_counts = first
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten().double() for grad in grads.values()])).item()
    results: Numbers = losses | {"grads": grads, "norm": norm}
    for name, build_optimizer in OPTIMIZERS.items():
        model.load_state_dict(start)
        for key, param in model.named_parameters():
            param.grad = grads[key].clone() if key in grads else None
        counts = first_counts
        optimizer = build_optimizer(param for param in model.parameters() if param.requires_grad)
        for step in range(NUM_STEPS):
            if step > 0:
                later = _backward_apart(model, documents, case.options)
                if later is None:
                    return None
                counts = later[1]
            optimizer.step()
            optimizer.zero_grad()
            _move_biases(model, counts, case.options.bias_update_rate)
        results[name] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return results


def _backward_apart(
    model: PreTrainedModel, documents: list[Sample], options: RouterOptions
) -> tuple[Numbers, Numbers] | None:
    """Losses, and tokens per expert of each router; None where a route came too close."""
    with _RouteGap() as gap:
        found = _backward(model, documents, options)
    return None if gap.smallest < MIN_ROUTE_GAP else found


def _config(reference: Reference) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(reference.folder)


def _matches(pattern: str, name: str) -> bool:
    parts, segments = pattern.split("."), name.split(".")
    return len(parts) == len(segments) and all(p in ("*", s) for p, s in zip(parts, segments, strict=True))


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}


@contextmanager
def heard(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """(logits, chosen experts) of each call of each router inside."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in routers_of(model)}
    handles = [
        router.register_forward_hook(lambda _m, _a, output, name=name: calls[name].append((output[0], output[2])))
        for name, router in routers_of(model).items()
    ]
    yield calls
    for handle in handles:
        handle.remove()


def _backward(model: PreTrainedModel, documents: list[Sample], options: RouterOptions) -> tuple[Numbers, Numbers]:
    num_tokens = sum(document.num_loss_tokens for document in documents)
    loss = torch.zeros(())
    with heard(model) as calls:
        for document in documents:
            logits = model(input_ids=torch.tensor([document.input_ids]), use_cache=False).logits[0]
            labels = torch.tensor(document.labels)
            loss = loss + F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX) / num_tokens
    logits_LTE = torch.stack([torch.cat([logits for logits, _ in layer]) for layer in calls.values()])
    chosen_LTKE = torch.stack(
        [F.one_hot(torch.cat([ids for _, ids in layer]), logits_LTE.size(-1)) for layer in calls.values()]
    )
    share_E = chosen_LTKE.sum(2).flatten(0, 1).float().mean(0)
    aux = logits_LTE.size(-1) * (share_E * logits_LTE.softmax(-1).flatten(0, 1).mean(0)).sum()
    z = torch.logsumexp(logits_LTE, -1).square().mean()
    (loss + options.aux_loss_coef * aux + options.z_loss_coef * z).backward()
    counts = dict(zip(calls, chosen_LTKE.sum((1, 2)), strict=True))
    return {"loss": loss.item(), "aux_loss": aux.item(), "z_loss": z.item()}, counts


@torch.no_grad()
def _move_biases(model: PreTrainedModel, counts: Numbers, rate: float) -> None:
    for name, count in counts.items() if rate else ():
        router = routers_of(model)[name]
        (bias,) = [t for key, t in router.state_dict().items() if key.endswith("e_score_correction_bias")]
        bias += (rate * torch.sign(count.float().mean() - count.float())).view(bias.shape)


def run_router_cell(rank: int, cell: Cell, reference: Reference, case: RouterCase, expected: Numbers) -> Numbers:
    """Worst errors of this rank against one process, as ``cells.run_cell`` gives them."""
    meshes = build_meshes("cpu", **cell.sizes)
    batches = [build_batch(docs, cell.layout) for docs in share_documents(expected["documents"], cell, rank)]
    errors: Numbers = {}
    for name, build_optimizer in OPTIMIZERS.items():
        model = from_pretrained(reference.folder, meshes, options=cell.options, attn_implementation="sdpa")
        router = build_router_training(model, case.options, meshes)
        optimizer = cast(Optimizer, ShardOptimizer(build_optimizer, model.parameters()))

        def judge(model: PreTrainedModel = model) -> None:
            errors["grads"] = worst(grads_of(model), expected["grads"])

        for step in range(NUM_STEPS):
            hook = judge if step == 0 else None
            result = train_step(model, batches, optimizer, None, meshes, None, before_clip=hook, router=router)
            assert result.is_finite
            if step == 0:
                shares = {"loss": result.loss_share, **({} if router is None else router.shares())}
                for key, share in shares.items():
                    total = share.clone()
                    dist.all_reduce(total, group=meshes.tokens.get_group() if key == "loss" else None)
                    errors[key] = (abs(total.item() - expected[key]) / expected[key], key)
                errors["norms"] = (abs(result.grad_norm - expected["norm"]) / expected["norm"], "norm")
        errors[name] = worst(model.state_dict(), expected[name])
    return errors
