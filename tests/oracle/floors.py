"""How far rounding alone moves what is compared: a process beside itself, its embeddings scaled by 1 + 1e-7.

Some models sum large terms that cancel, and are then worth little more than their rounding. Where that floor is above a
tolerance, twice the floor is the bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel

from tests.oracle.cells import TOLERANCES, grads_of, worst
from tests.oracle.reference import NUM_STEPS, OPTIMIZERS, Reference, backward_in_one_process

NUDGE = 1e-7
# One draw may move a tensor by half of what another does.
NUM_DRAWS = 4


def measure_floor(
    model: PreTrainedModel, reference: Reference, optimizers: Collection[str] = tuple(OPTIMIZERS)
) -> dict[str, float]:
    """Of gradients (``grads``), and of weights after two steps of each optimizer, the largest error of any draw."""
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    floor: defaultdict[str, float] = defaultdict(float)
    for draw in range(NUM_DRAWS):
        noise = torch.randn(model.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(draw))
        for name in optimizers:
            with torch.no_grad():
                for key, param in model.named_parameters():
                    param.copy_(start[key])
                model.get_input_embeddings().weight.mul_(1 + NUDGE * noise)
            optimizer = OPTIMIZERS[name](model.parameters())
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                backward_in_one_process(model, reference.documents)
                if step == 0:
                    floor["grads"] = max(floor["grads"], worst(grads_of(model), reference.grads)[0])
                optimizer.step()
            floor[name] = max(floor[name], worst(dict(model.named_parameters()), reference.weights[name])[0])
    return dict(floor)


def bounds_above(floor: Mapping[str, float]) -> dict[str, float]:
    """Each tolerance, or twice the floor where that is above it. Norms may move as far as the gradients."""
    floor = {**floor, "norms": floor.get("grads", 0.0)}
    return {key: 2 * floor[key] if floor.get(key, 0.0) > bound else bound for key, bound in TOLERANCES.items()}
