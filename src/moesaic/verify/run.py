"""A verification on its ranks: load, two steps, save and reload, each compared with the reference's files.

``prepare`` makes the folder with the plan and the reference, in one process and before the ranks need memory; then
``verify_on_rank`` runs on each.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from moesaic.checkpoint import TrainState, load_checkpoint, save_checkpoint
from moesaic.config import Recipe, resolve_sizes
from moesaic.meshes import Meshes
from moesaic.model.seam import find_experts
from moesaic.runtime import current_device, is_child_of_launch, run_alone, shutdown, start_errors, under_launcher
from moesaic.train.setup import build_model, start
from moesaic.verify import explain
from moesaic.verify.compare import Comparison, Measured
from moesaic.verify.documents import build_batches
from moesaic.verify.plan import FOLDER, MODEL, Against, Plan, Shrink, count_micro_batches, load_plan, save_plan
from moesaic.verify.reference import GRADIENT, START, TENSORS, WEIGHT, Reference, load_reference
from moesaic.verify.report import (
    REPORT,
    TOLERANCES,
    Check,
    Report,
    build_check,
    build_table,
    save_report,
    to_json,
)
from moesaic.verify.trial import LOSS, NORM, NUM_STEPS, Numbers, run_ours, tensors_of

CHECKPOINTS = "checkpoints"
# Parameters in the table; report.json has all.
NUM_ROWS = 30


def folder_of(recipe: Recipe) -> Path:
    """Where a recipe's verification keeps its files."""
    return Path(recipe.output_dir) / FOLDER


def prepare(recipe: Recipe, *, against: Against, shrink: Shrink, world_size: int) -> None:
    """Plan and reference, the latter in a process of its own: its memory is free again before ranks start.

    Raises:
        ValueError: see ``save_plan`` and ``save_reference``.
    """
    save_plan(recipe, folder_of(recipe), against=against, shrink=shrink, world_size=world_size)
    run_alone(("-m", "moesaic.verify.reference", str(folder_of(recipe))))


def run_on_rank(recipe: Recipe, against: Against, shrink: Shrink, as_json: bool) -> None:
    """The command on one rank: under the user's own launcher rank 0 prepares. Ends with code 1 where not proven.

    Large files are deleted at the end; ``report.json`` stays. Under ``moesaic verify``'s own launch the exit code is
    the launching process's to give.
    """
    folder = folder_of(recipe)
    with start_errors():
        meshes = start(recipe)
        if under_launcher() and not is_child_of_launch() and dist.get_rank() == 0:
            prepare(recipe, against=against, shrink=shrink, world_size=dist.get_world_size())
        dist.barrier()
        report = verify_on_rank(folder, meshes)
    if dist.get_rank() == 0:
        save_report(report, folder / REPORT)
        print_report(report, as_json)
        for name in (MODEL, CHECKPOINTS):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / TENSORS).unlink()
    shutdown()
    if not report.is_proven and not is_child_of_launch():
        raise SystemExit(1)


def verify_on_rank(folder: Path, meshes: Meshes) -> Report:
    """Compare this topology with the reference in ``folder``. Every rank must call it; all return the same.

    Args:
        meshes: of the recipe's sizes.
    """
    plan, recipe = load_plan(folder)
    reference = load_reference(folder)
    sizes = resolve_sizes(recipe, plan.world_size)
    assert sizes == meshes.sizes, f"{sizes} were planned, and these are {meshes.sizes}"
    per_index = build_batches(reference.documents, sizes, count_micro_batches(recipe, sizes), recipe.shares_rows)
    batches = [batch.to(current_device()) for batch in per_index[meshes.data.get_local_rank("dp")]]
    model = build_model(recipe, meshes)
    started = _measure(folder, START, dict(tensors_of(model)), model)
    gradients: list[Measured] = []

    def compare_gradients() -> None:
        found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        gradients.extend(_measure(folder, GRADIENT, found, model))

    numbers, optimizer = run_ours(model, batches, recipe, meshes, compare_gradients)
    numbers = _worst_of_ranks(numbers, reference.numbers)
    weights = _measure(folder, WEIGHT, dict(tensors_of(model)), model)
    changed = _reload(folder / CHECKPOINTS, model, optimizer)
    experts = frozenset(
        f"{name}.{param}" for name, module in find_experts(model).items() for param, _ in module.named_parameters()
    )
    checks = [
        *_number_checks(numbers, reference),
        *(build_check("start", one.name, one.error) for one in started),
        *_tensor_checks("gradient", gradients, reference.floors),
        *_tensor_checks("weight", weights, reference.floors),
        *(build_check("reload", name, float(number)) for name, number in changed.items()),
    ]
    findings = _explain(checks, started, gradients, weights, numbers, reference.numbers, experts, meshes)
    return Report(
        facts=_facts(plan, recipe, meshes, reference), notes=plan.notes, checks=tuple(checks), findings=findings
    )


def _measure(folder: Path, prefix: str, ours: Mapping[str, Tensor], model: nn.Module) -> list[Measured]:
    return Comparison(folder / TENSORS, prefix).measure(ours, dict(tensors_of(model)))


def _worst_of_ranks(numbers: Numbers, expected: Numbers) -> Numbers:
    """Of each number, that of the rank whose is furthest off. All ranks must call it, and return the same."""
    everyones: list[Numbers] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, numbers)

    def distance(number: float, value: float) -> float:
        return math.inf if math.isnan(number) else abs(number - value)

    return {
        name: max((own[name] for own in everyones), key=partial(distance, value=value))
        for name, value in expected.items()
    }


def _number_checks(numbers: Numbers, reference: Reference) -> list[Check]:
    checks = []
    for name, expected in reference.numbers.items():
        number = numbers[name]
        error = abs(number - expected) / max(abs(expected), 1e-30) if number != expected else 0.0
        what = "norm" if name == NORM else "loss"
        ratio = number / expected if expected else None
        checks.append(build_check(what, name, error, reference.floors[name], ratio))
    return checks


def _tensor_checks(what: str, measured: list[Measured], floors: Mapping[str, float]) -> list[Check]:
    return [
        build_check(what, one.name, one.error, floors.get(f"{what}/{one.name}", 0.0), one.ratio) for one in measured
    ]


def _explain(
    checks: list[Check],
    started: list[Measured],
    gradients: list[Measured],
    weights: list[Measured],
    numbers: Numbers,
    expected: Numbers,
    experts: frozenset[str],
    meshes: Meshes,
) -> tuple[explain.Finding, ...]:
    failed = {(check.what, check.name) for check in checks if not check.is_passed}
    findings: list[explain.Finding] = []
    unloaded = [one for one in started if ("start", one.name) in failed]
    if unloaded:
        lying = " | ".join(dict.fromkeys(one.placements for one in unloaded))
        findings.append(explain.group_finding(explain.LOAD, unloaded, f"other values than the files' ({lying})"))
    wrong = [one for one in gradients if ("gradient", one.name) in failed]
    findings += explain.explain_gradients(wrong, experts, meshes.sizes)
    for name in expected:
        if ("loss", name) in failed and name == LOSS:
            findings.append(_loss_finding(_ratio(numbers[name], expected[name]), meshes))
        elif ("loss", name) in failed:
            text = f"{name} is {numbers[name]:.6g} and not {expected[name]:.6g}"
            text += "" if ("loss", LOSS) in failed else ", while the tokens' loss is right"
            findings.append(explain.finding(explain.ROUTER, name, text, _ratio(numbers[name], expected[name])))
    if ("norm", NORM) in failed:
        findings.append(explain.explain_norm(numbers[NORM], expected[NORM], gradients, experts, meshes.sizes))
    moved = [one for one in weights if ("weight", one.name) in failed]
    if moved:
        follows = ", as what is above makes them" if findings else ", while loading, gradients and norm are right"
        findings.append(explain.group_finding(explain.UPDATE, moved, f"other weights after {NUM_STEPS} steps{follows}"))
    reloaded = [one for one in started if ("reload", one.name) in failed]
    if reloaded:
        follows = ", for copies had parted before" if moved else ""
        text = f"other bits after save and reload{follows}"
        findings.append(explain.group_finding(explain.CHECKPOINT, reloaded, text))
    return explain.in_order(findings)


def _ratio(number: float, expected: float) -> float:
    return number / expected if expected else math.inf


def _loss_finding(ratio: float, meshes: Meshes) -> explain.Finding:
    larger = explain.matching_axes(ratio, False, meshes.sizes)
    smaller = explain.matching_axes(1 / ratio, False, meshes.sizes) if ratio else ()
    axes = larger or smaller
    where = f": {' or '.join(axes)}" if axes else ""
    return explain.finding(explain.LOSS, LOSS, f"the loss is {ratio:.6g} of the reference's{where}", ratio, axes)


class _Position:
    """Of data that there is none of."""

    def __init__(self) -> None:
        self.step = NUM_STEPS

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int], /) -> None:
        self.step = state["step"]


def _reload(folder: Path, model: PreTrainedModel, optimizer: Optimizer) -> dict[str, int]:
    """Save, forget, load: by parameter, in how many of the ranks' shards of it and its moments some bit differs. All
    ranks must call it."""
    scheduler = LambdaLR(optimizer, _constant)
    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=_Position())
    before = {key: value.clone() for key, value in _local_state(model, optimizer).items()}
    saved = save_checkpoint(folder, state, NUM_STEPS)
    with torch.no_grad():
        for value in _local_state(model, optimizer).values():
            value.fill_(math.nan if value.is_floating_point() else 0)  # what isn't loaded again can't pass for loaded
    load_checkpoint(saved, state)
    after = _local_state(model, optimizer)
    # Where nothing had a gradient, saving has made the moments, so ``after`` may have more.
    differs = torch.tensor([not torch.equal(value, after[key]) for key, value in before.items()], dtype=torch.int64)
    dist.all_reduce(differs)
    by_name: dict[str, int] = {}
    for (name, _), number in zip(before, differs.tolist(), strict=True):
        by_name[name] = by_name.get(name, 0) + number
    return by_name


def _constant(_step: int) -> float:
    return 1.0


def _local_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[tuple[str, str], Tensor]:
    """This rank's weights and the optimizer's moments, by the parameter's name and the moment's."""
    found = {(name, ""): tensor for name, tensor in tensors_of(model)}
    names = {id(param): name for name, param in model.named_parameters()}
    for param, moments in optimizer.state.items():
        for moment, value in moments.items():
            found[names[id(param)], moment] = value
    return {key: (value.to_local() if isinstance(value, DTensor) else value).detach() for key, value in found.items()}


def _facts(plan: Plan, recipe: Recipe, meshes: Meshes, reference: Reference) -> dict[str, str]:
    axes = explain.axis_sizes(meshes.sizes)
    tokens = sum(map(len, reference.documents))
    return {
        "model": f"{plan.num_parameters / 1e6:.1f}M parameters",
        "topology": f"{plan.world_size} ranks: " + " ".join(f"{axis}={size}" for axis, size in axes.items()),
        "against": "plain transformers in one process" if plan.against == "hf" else "moesaic on one rank",
        "batch": f"{len(reference.documents)} documents, {tokens} tokens, "
        f"{'packed' if recipe.shares_rows else 'padded'}, {count_micro_batches(recipe, meshes.sizes)} micro-batches",
        "tolerances": " ".join(f"{name} {bound:g}" for name, bound in TOLERANCES.items()),
    }


def print_report(report: Report, as_json: bool) -> None:
    """On stdout."""
    if as_json:
        print(to_json(report))
        return
    console = Console(soft_wrap=True, highlight=False)
    for name, text in report.facts.items():
        console.print(f"{name:<11}{text}", markup=False)
    for note in report.notes:
        console.print(f"{'note':<11}{note}", markup=False)
    console.print(build_table(report, NUM_ROWS))
    for number, one in enumerate(report.findings, 1):
        console.print(f"{number}. {one.text}", markup=False)
        console.print(f"   look at {one.look_at}", markup=False)
    failed = sum(not one.is_passed for one in report.checks)
    verdict = "proven" if report.is_proven else f"NOT PROVEN: {failed} beyond their bounds"
    console.print(f"{len(report.checks)} checks: {verdict}", markup=False)
