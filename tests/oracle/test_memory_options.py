"""Every memory and FSDP option computes what one process computes, alone and together with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from moesaic.meshes import build_meshes
from moesaic.parallel import activation_checkpointing
from moesaic.parallel.apply import ParallelOptions, from_pretrained
from moesaic.parallel.experts import find_expert_modules
from moesaic.parallel.units import UnitParam, list_units
from moesaic.train.losses import token_loss_sum
from moesaic.train.step import train_step
from tests.oracle.cells import Cell, assert_within_tolerance, build_batch, full, run_cell, share_documents
from tests.oracle.reference import Case, Reference, load_reference
from tests.pool import RunRanks

QWEN3, LONG = Case(), Case(num_documents=16)
QWEN2, SEVEN = Case(family="qwen2_moe"), Case(num_experts=7)
EP2, EP4, TP2 = {"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "tp_size": 2}
HSDP = {"ep_size": 2, "mp_replicate_size": 2}
IGNORED = ("model.layers.*.self_attn", "model.embed_tokens")
NOT_SPLIT = ("model.norm", "model.layers.*.mlp.gate", "model.layers.*.self_attn.q_norm")
MLP = ("model.layers.*.mlp",)


def options(**fields: Any) -> ParallelOptions:
    return ParallelOptions(**fields)


RESENT = {"activation_checkpointing": True, "exchanged_tokens": "recompute"}

CELLS: dict[str, tuple[Case, Cell]] = {
    # Shards on the host.
    "offload-ep2": (QWEN3, Cell(world_size=4, sizes=EP2, options=options(offload=True))),
    "offload-ep4-accumulation": (
        QWEN3,
        Cell(world_size=4, sizes=EP4, options=options(offload=True), num_micro_batches=2, accumulation="unsharded"),
    ),
    "offload-path-a": (QWEN3, Cell(world_size=2, options=options(expert_parallel=False, offload=True))),
    "offload-ignored": (
        QWEN3,
        Cell(world_size=4, sizes=HSDP, options=options(offload=True, fsdp_ignored_modules=IGNORED)),
    ),
    # Whole gradients, reduced once a step.
    "unsharded-1": (QWEN3, Cell(world_size=4, sizes=EP2, accumulation="unsharded")),
    "unsharded-4": (LONG, Cell(world_size=4, sizes=EP2, num_micro_batches=4, accumulation="unsharded")),
    "unsharded-4-ep4": (LONG, Cell(world_size=4, sizes=EP4, num_micro_batches=4, accumulation="unsharded")),
    "unsharded-2-hsdp": (QWEN3, Cell(world_size=4, sizes=HSDP, num_micro_batches=2, accumulation="unsharded")),
    "unsharded-2-path-a": (
        QWEN3,
        Cell(
            world_size=4,
            sizes={"mp_replicate_size": 2},
            options=options(expert_parallel=False),
            num_micro_batches=2,
            accumulation="unsharded",
        ),
    ),
    "unsharded-2-ignored": (
        QWEN3,
        Cell(
            world_size=4,
            sizes=EP2,
            options=options(fsdp_ignored_modules=IGNORED),
            num_micro_batches=2,
            accumulation="unsharded",
        ),
    ),
    # Tokens sent again in backward.
    "resent-ep2": (QWEN3, Cell(world_size=4, sizes=EP2, options=options(**RESENT))),
    "resent-ep4-packed-accumulation": (
        LONG,
        Cell(
            world_size=4,
            sizes=EP4,
            options=options(**RESENT),
            layout="packed",
            num_micro_batches=2,
            accumulation="unsharded",
        ),
    ),
    "resent-uneven": (LONG, Cell(world_size=4, sizes=EP4, options=options(**RESENT), shares=(1, 9, 2, 4))),
    "resent-empty": (Case(vocabulary=2), Cell(world_size=4, sizes=EP4, options=options(**RESENT))),
    # One unit a block, with a mesh for its experts.
    "custom-ep2-efsdp2": (QWEN3, Cell(world_size=4, sizes=EP2, options=options(fsdp_implementation="custom"))),
    "custom-ep4": (QWEN3, Cell(world_size=4, sizes=EP4, options=options(fsdp_implementation="custom"))),
    "custom-hsdp": (QWEN3, Cell(world_size=4, sizes=HSDP, options=options(fsdp_implementation="custom"))),
    "custom-hsdp-of-dense-alone": (
        QWEN3,
        Cell(
            world_size=4,
            sizes={**EP2, "mp_replicate_size": 2, "edp_size": 1},
            options=options(fsdp_implementation="custom"),
        ),
    ),
    "custom-edp": (
        QWEN3,
        Cell(world_size=4, sizes={**EP2, "edp_size": 2}, options=options(fsdp_implementation="custom")),
    ),
    "custom-7-experts": (SEVEN, Cell(world_size=4, sizes=EP4, options=options(fsdp_implementation="custom"))),
    "custom-shared-expert-resent": (
        QWEN2,
        Cell(world_size=4, sizes=EP2, options=options(fsdp_implementation="custom", **RESENT)),
    ),
    "custom-ignored-unsharded-offload": (
        QWEN3,
        Cell(
            world_size=4,
            sizes=EP2,
            options=options(fsdp_implementation="custom", fsdp_ignored_modules=IGNORED, offload=True),
            num_micro_batches=2,
            accumulation="unsharded",
        ),
    ),
    "custom-no-reshard": (
        QWEN3,
        Cell(world_size=4, sizes=EP2, options=options(fsdp_implementation="custom", reshard_after_forward=False)),
    ),
    # Experts gathered by a module around them.
    "hooks-ep2-efsdp2": (QWEN3, Cell(world_size=4, sizes=EP2, options=options(hook_modules=MLP))),
    "hooks-ep4-checkpointed": (
        QWEN3,
        Cell(world_size=4, sizes=EP4, options=options(hook_modules=MLP, activation_checkpointing=True)),
    ),
    "hooks-hsdp-shared-expert-unsharded": (
        QWEN2,
        Cell(
            world_size=4,
            sizes=HSDP,
            options=options(hook_modules=MLP),
            num_micro_batches=2,
            accumulation="unsharded",
        ),
    ),
    "hooks-offload-ignored": (
        QWEN3,
        Cell(world_size=4, sizes=EP2, options=options(hook_modules=MLP, offload=True, fsdp_ignored_modules=IGNORED)),
    ),
    # With tensor parallelism.
    "unsharded-2-tp2": (QWEN3, Cell(world_size=4, sizes=TP2, num_micro_batches=2, accumulation="unsharded")),
    "ignored-tp2": (QWEN3, Cell(world_size=4, sizes=TP2, options=options(fsdp_ignored_modules=NOT_SPLIT))),
    "hooks-tp2": (QWEN3, Cell(world_size=4, sizes=TP2, options=options(hook_modules=MLP))),
}


# Run by `make test-slow`: what each shows alone, another cell shows together with something else.
SLOW = {
    "offload-ep2",
    "offload-path-a",
    "unsharded-1",
    "unsharded-2-tp2",
    "unsharded-4-ep4",
    "unsharded-2-path-a",
    "resent-uneven",
    "resent-ep4-packed-accumulation",
    "custom-ep4",
    "custom-hsdp-of-dense-alone",
    "custom-edp",
    "custom-7-experts",
    "custom-no-reshard",
    "hooks-ep4-checkpointed",
    "hooks-hsdp-shared-expert-unsharded",
    "ignored-tp2",
    "hooks-tp2",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CELLS])
def test_parity_with_one_process(name: str, run_ranks: RunRanks, reference_root: Path) -> None:
    case, cell = CELLS[name]
    for errors in run_ranks(run_cell, cell.world_size, cell, load_reference(case, reference_root)):
        assert_within_tolerance(errors)


def grads_of(rank: int, fields: dict[str, Any], ep_size: int, reference: Reference) -> dict[str, Tensor]:
    """This rank's local gradients of one backward, in bf16: arithmetic that shows every difference."""
    meshes = build_meshes("cpu", ep_size=ep_size)
    model = from_pretrained(
        reference.folder,
        meshes,
        options=ParallelOptions(compute_dtype=torch.bfloat16, activation_checkpointing=True, **fields),
        attn_implementation="sdpa",
    )
    (documents,) = share_documents(reference.documents, Cell(world_size=4), rank)
    batch = build_batch(documents, "padded")
    token_loss_sum(model(**batch.model_inputs()).logits, batch.labels).backward()
    return {name: param.grad.to_local() for name, param in model.named_parameters() if isinstance(param.grad, DTensor)}


@pytest.mark.parametrize("ep_size", [2, 4])
def test_tokens_sent_again_are_the_same_bit_for_bit(run_ranks: RunRanks, reference_root: Path, ep_size: int) -> None:
    reference = load_reference(QWEN3, reference_root)
    kept = run_ranks(grads_of, 4, {}, ep_size, reference)
    resent = run_ranks(grads_of, 4, {"exchanged_tokens": "recompute"}, ep_size, reference)
    for ours, theirs in zip(resent, kept, strict=True):
        assert ours.keys() == theirs.keys() and len(ours) > 10
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def kept_floats(rank: int, exchanged_tokens: str, reference: Reference) -> int:
    """Numbers that checkpointing keeps of all blocks between forward and backward, but for the blocks' inputs."""
    kept: list[Any] = []
    build = activation_checkpointing._contexts

    def contexts(*args: Any) -> Any:
        keep, recompute = build(*args)
        kept.append(keep._kept)
        return keep, recompute

    options = ParallelOptions(activation_checkpointing=True, exchanged_tokens=cast(Any, exchanged_tokens))
    with mock.patch.object(activation_checkpointing, "_contexts", contexts):
        model = from_pretrained(reference.folder, build_meshes("cpu", ep_size=4), options=options)
        (documents,) = share_documents(reference.documents, Cell(world_size=4), rank)
        model(**build_batch(documents, "padded").model_inputs())
    tensors = [
        tensor for layer in kept for results in layer.values() for result in results for tensor in tree_leaves(result)
    ]
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def test_tokens_that_are_sent_again_are_not_kept(run_ranks: RunRanks, reference_root: Path) -> None:
    reference = load_reference(LONG, reference_root)
    num_layers, top_k, hidden = 2, 2, 64
    kept = run_ranks(kept_floats, 4, "keep", reference)
    resent = run_ranks(kept_floats, 4, "recompute", reference)
    num_tokens = [4 * max(len(d) for d in reference.documents[4 * rank : 4 * rank + 4]) for rank in range(4)]
    # Of each token its top-k scores alone; with its rows, what all ranks got is what all ranks sent, twice a layer.
    assert resent == [num_layers * top_k * number for number in num_tokens]
    assert sum(kept) - sum(resent) == num_layers * 2 * top_k * hidden * sum(num_tokens)


def prove_factors(rank: int, reference: Reference) -> dict[str, tuple[float | None, bool, int]]:
    """Divide factor, forced sum and number of shards of each group of the first block's unit."""
    meshes = build_meshes("cpu", ep_size=2, mp_replicate_size=2)
    model = from_pretrained(reference.folder, meshes, options=ParallelOptions(fsdp_implementation="custom"))
    assert not any(isinstance(module, FSDPModule) for module in find_expert_modules(model).values())
    block = model.model.layers[0]
    groups = block._get_fsdp_state()._fsdp_param_groups
    return {
        " ".join(group.mesh_info.mesh.mesh_dim_names): (
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
            len(group.fsdp_params),
        )
        for group in groups
    }


def test_custom_has_two_groups_of_sums_in_one_unit(run_ranks: RunRanks, reference_root: Path) -> None:
    for factors in run_ranks(prove_factors, 4, load_reference(QWEN3, reference_root)):
        assert factors == {"mp_replicate mp_shard": (1.0, True, 9), "edp efsdp": (1.0, True, 2)}


def refusals(rank: int, fields: dict[str, Any], ep_size: int, reference: Reference) -> str:
    try:
        from_pretrained(reference.folder, build_meshes("cpu", ep_size=ep_size), options=ParallelOptions(**fields))
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("fields", "ep_size", "part"),
    [
        ({"hook_modules": ("model.layers.*.self_attn",)}, 2, "holds no experts"),
        ({"hook_modules": ("model.layers.0.mlp",)}, 2, "the experts model.layers.1.mlp.experts are in 0 of"),
        ({"hook_modules": ("model.layers.*.mlp", "model.layers.*.mlp.experts")}, 2, "are in 2 of"),
        ({"hook_modules": ("model.layers.*",)}, 2, "is an FSDP unit already"),
        ({"hook_modules": ("model.nothing",)}, 2, "model.nothing"),
        ({"fsdp_implementation": "custom", "hook_modules": MLP}, 2, "no hook_modules"),
        ({"fsdp_implementation": "custom"}, 1, "at least 2"),
    ],
)
def test_what_cannot_be_hooked_is_refused(
    run_ranks: RunRanks, reference_root: Path, fields: dict[str, Any], ep_size: int, part: str
) -> None:
    for message in run_ranks(refusals, 2, fields, ep_size, load_reference(QWEN3, reference_root)):
        assert part in message, message


@pytest.mark.parametrize("implementation", ["native", "custom"])
@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("model.layers.*.mlp",), "model.layers.0.mlp: it is or holds experts"),
        (("model.layers.*.mlp.experts",), "model.layers.0.mlp.experts: it is or holds experts"),
        (("model.layers.*",), "it is or holds experts or blocks"),
        (("model.layers",), "model.layers: it is or holds experts or blocks"),
        (("model.layers.*.self_attn", "model.layers.*.self_attn.q_proj"), "q_proj: it is inside another"),
    ],
)
def test_what_cannot_be_left_whole_is_refused(
    run_ranks: RunRanks, reference_root: Path, implementation: str, patterns: tuple[str, ...], message: str
) -> None:
    """Experts in such a unit would be nobody's, and their gradients reduced over no rank."""
    fields = {"fsdp_ignored_modules": patterns, "fsdp_implementation": implementation}
    for said in run_ranks(refusals, 2, fields, 2, load_reference(QWEN3, reference_root)):
        assert said.startswith("fsdp_ignored_modules: ") and message in said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_parallel": False, "hook_modules": ("a",)}, "hook_modules: for expert_parallel=True"),
        ({"expert_parallel": False, "fsdp_implementation": "custom"}, "fsdp_implementation: for"),
        ({"exchanged_tokens": "recompute"}, "needs activation_checkpointing"),
    ],
)
def test_options_that_nothing_reads_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelOptions(**fields)


def accumulated(rank: int, num_micro_batches: int, reference: Reference) -> dict[str, Tensor]:
    """Gradients of the same documents, as often as there are micro-batches."""
    stored_in_bf16 = options(storage_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    meshes = build_meshes("cpu", ep_size=2)
    model = from_pretrained(reference.folder, meshes, options=stored_in_bf16, attn_implementation="sdpa")
    (documents,) = share_documents(reference.documents, Cell(world_size=2), rank)
    grads: dict[str, Tensor] = {}

    def keep() -> None:
        grads.update({name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None})

    batches = [build_batch(documents, "padded")] * num_micro_batches
    train_step(model, batches, torch.optim.SGD(model.parameters(), lr=0.0), None, meshes, None, keep)
    return grads


def test_many_micro_batches_of_bf16_gradients_are_summed_in_fp32(run_ranks: RunRanks, reference_root: Path) -> None:
    """64 equal micro-batches have the gradients of one; added up in bf16 they would be off by some percent."""
    reference = load_reference(QWEN3, reference_root)
    once, often = (run_ranks(accumulated, 2, num, reference)[0] for num in (1, 64))
    errors = [((often[name] - grad).float().norm() / grad.float().norm()).item() for name, grad in once.items()]
    assert max(errors) <= 2**-7, max(errors)  # each of the two is rounded to 8 bits


def list_rows(rank: int, fields: dict[str, Any], reference: Reference) -> list[UnitParam]:
    options = ParallelOptions(compute_dtype=torch.bfloat16, **fields)
    return list_units(from_pretrained(reference.folder, build_meshes("cpu", ep_size=2), options=options))


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ({}, "model.layers.0.mlp.experts"),
        ({"hook_modules": MLP}, "model.layers.0.mlp"),
        ({"fsdp_implementation": "custom"}, "model.layers.0"),
    ],
)
def test_units_are_listed_with_what_they_own(
    run_ranks: RunRanks, reference_root: Path, fields: dict[str, Any], unit: str
) -> None:
    for rows in run_ranks(list_rows, 4, fields, load_reference(QWEN3, reference_root)):
        by_name = {row.name: row for row in rows}
        assert len(by_name) == len(rows)
        experts, router = (by_name[f"model.layers.0.mlp.{name}"] for name in ("experts.gate_up_proj", "gate.weight"))
        assert (experts.unit, router.unit) == (unit, "model.layers.0")
        assert (experts.shape, experts.local_shape) == ((8, 64, 64), (4, 32, 64))
        assert (experts.axes, experts.placements) == ("efsdp=2 ep=2", "S(1), S(0)")
        assert (router.axes, router.placements) == ("mp_shard=4", "S(0)")
        assert experts.dtypes == router.dtypes == (torch.float32, torch.bfloat16, torch.float32)
        assert by_name["lm_head.weight"].unit == ""
