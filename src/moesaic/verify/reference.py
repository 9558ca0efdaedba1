"""What one process computes: run by ``python -m moesaic.verify.reference FOLDER``, and kept in FOLDER as files.

``reference.safetensors`` has under the Hugging Face module's names ``start/`` (weights before), ``gradient/`` (of the
first step, before clipping) and ``weight/`` (after two steps). ``reference.json`` has the numbers, the documents, and
how far each of these moves when the embedding is scaled by 1 + 1e-7 * randn: the model's own rounding floor, below
which no comparison says anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from moesaic.config import Recipe, resolve_sizes
from moesaic.data.batch import Sample
from moesaic.meshes import Meshes
from moesaic.model.build import find_auto_class
from moesaic.parallel.freeze import freeze_modules
from moesaic.runtime import current_device, run_rank, shutdown, start_errors
from moesaic.train.setup import build_model, start
from moesaic.verify.documents import MIN_ROUTE_GAP, RouteGap, build_batches, build_documents, count_documents
from moesaic.verify.plan import MODEL, Plan, count_micro_batches, load_plan, on_one_rank
from moesaic.verify.trial import Numbers, run_ours, run_plain, tensors_of

TENSORS, NUMBERS = "reference.safetensors", "reference.json"
START, GRADIENT, WEIGHT = "start", "gradient", "weight"
PERTURBATION = 1e-7
# Margins over the smallest gap before the first step, one an attempt: the second step's routes are not drawn.
GAP_MARGINS = (1, 1, 2, 4, 8, 8, 16, 16)

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a rank needs to know of the reference besides its tensors. ``floors``: by the names of numbers and tensors
    (with their prefix) the relative distance that rounding alone causes."""

    numbers: Numbers
    floors: Mapping[str, float]
    documents: list[Sample]


def save_reference(folder: Path) -> None:
    """Compute and write the reference of the plan in ``folder``. In a process group of one rank, which it makes where
    there is none.

    Raises:
        ValueError: no documents keep the routes apart.
    """
    plan, recipe = load_plan(folder)
    meshes = start(on_one_rank(recipe))
    assert dist.get_world_size() == 1, "the reference is one process's"
    tensors, numbers, documents = _run_with_kept_routes(folder, plan, recipe, meshes)
    if plan.against == "single":
        tensors, numbers = _run(folder, plan, recipe, meshes, documents)
    moved, moved_numbers = _run(folder, plan, recipe, meshes, documents, perturbed=True)
    floors = {name: _distance(moved[name], tensor) for name, tensor in tensors.items() if not name.startswith(START)}
    floors |= {name: abs(moved_numbers[name] - number) / max(abs(number), 1e-30) for name, number in numbers.items()}
    save_file(tensors, folder / TENSORS)
    listed = [[list(document.input_ids), list(document.labels)] for document in documents]
    facts = {"numbers": numbers, "floors": floors, "documents": listed}
    (folder / NUMBERS).write_text(json.dumps(facts), encoding="utf-8")


def load_reference(folder: Path) -> Reference:
    """The numbers that ``save_reference`` wrote."""
    facts = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    documents = [Sample(input_ids=ids, labels=labels) for ids, labels in facts["documents"]]
    return Reference(facts["numbers"], facts["floors"], documents)


def _run_with_kept_routes(
    folder: Path, plan: Plan, recipe: Recipe, meshes: Meshes
) -> tuple[Tensors, Numbers, list[Sample]]:
    """Plain transformers on the first documents whose routes stay apart over both steps."""
    sizes = resolve_sizes(recipe, plan.world_size)
    count = count_documents(sizes, count_micro_batches(recipe, sizes), recipe.shares_rows)
    for attempt, margin in enumerate(GAP_MARGINS):
        model = _load_plain(folder, recipe)
        documents = build_documents(model, count, recipe.seed + attempt, margin * MIN_ROUTE_GAP)
        if documents is None:
            continue
        with RouteGap() as gap:
            tensors, numbers = _measure_plain(model.train(), documents, recipe, meshes)
        if gap.smallest >= MIN_ROUTE_GAP:
            return tensors, numbers, documents
    raise ValueError(
        f"no {count} documents were found in {len(GAP_MARGINS)} attempts whose tokens keep the gap between the last "
        f"expert that is chosen and the next one above {MIN_ROUTE_GAP:g} over two steps: rounding could flip a route, "
        "and nothing could be compared. Set another seed, or shrink the model (--shrink always)."
    )


def _run(
    folder: Path, plan: Plan, recipe: Recipe, meshes: Meshes, documents: list[Sample], *, perturbed: bool = False
) -> tuple[Tensors, Numbers]:
    """The reference on ``documents``; ``perturbed``: with rounding's noise in the embedding."""
    if plan.against == "hf":
        model = _load_plain(folder, recipe)
        if perturbed:
            _perturb(model)
        return _measure_plain(model.train(), documents, recipe, meshes)
    alone = on_one_rank(recipe)
    model = build_model(alone, meshes)
    if perturbed:
        _perturb(model)
    sizes = resolve_sizes(recipe, plan.world_size)
    per_index = build_batches(documents, sizes, count_micro_batches(recipe, sizes), recipe.shares_rows)
    batches = [batch.to(current_device()) for batches in per_index for batch in batches]
    tensors = _copy(START, dict(tensors_of(model)))

    def keep_gradients() -> None:
        tensors.update(_copy(GRADIENT, _gradients(model)))

    numbers, _ = run_ours(model, batches, alone, meshes, keep_gradients)
    return tensors | _copy(WEIGHT, dict(tensors_of(model))), numbers


def _measure_plain(
    model: PreTrainedModel, documents: list[Sample], recipe: Recipe, meshes: Meshes
) -> tuple[Tensors, Numbers]:
    tensors = _copy(START, dict(tensors_of(model)))

    def keep_gradients() -> None:
        tensors.update(_copy(GRADIENT, _gradients(model)))

    numbers = run_plain(model, documents, recipe, meshes, keep_gradients)
    return tensors | _copy(WEIGHT, dict(tensors_of(model))), numbers


def _load_plain(folder: Path, recipe: Recipe) -> PreTrainedModel:
    """As transformers loads it, on this process's device, with the attention and the frozen modules of the recipe."""
    chosen = {} if recipe.attn_implementation is None else {"attn_implementation": recipe.attn_implementation}
    config = AutoConfig.from_pretrained(str(folder / MODEL), local_files_only=True)
    model: PreTrainedModel = find_auto_class(config).from_pretrained(
        str(folder / MODEL), dtype=torch.float32, experts_implementation="eager", local_files_only=True, **chosen
    )
    freeze_modules(model, recipe.frozen_modules)
    return model.float().to(current_device())


def _gradients(model: PreTrainedModel) -> Tensors:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@torch.no_grad()
def _copy(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Whole tensors on the CPU. Of one rank, so a shard is the whole."""
    whole = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {f"{prefix}/{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in whole.items()}


@torch.no_grad()
def _perturb(model: PreTrainedModel) -> None:
    embeddings = model.get_input_embeddings().weight
    local = embeddings.to_local() if isinstance(embeddings, DTensor) else embeddings
    noise = torch.randn(local.shape, generator=torch.Generator().manual_seed(0)).to(local.device)
    local.mul_(1 + PERTURBATION * noise)


def _distance(ours: Tensor, reference: Tensor) -> float:
    """max|a-b| / max|b|."""
    if not reference.numel():
        return 0.0
    return ((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()


def _main(folder: Path) -> None:
    disable_progress_bar()
    with start_errors():
        save_reference(folder)
    shutdown()


if __name__ == "__main__":
    run_rank(_main, Path(sys.argv[1]))
