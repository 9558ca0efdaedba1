"""Shard rules: any parameter along any dim over any named mesh, then FSDP along a dim that the rules left free.

Who does what:

- ``apply_plan`` cuts parameters; nothing is sent, no module's forward changes.
- ``fully_shard_planned`` shards what is left over an FSDP axis, gathers it before a unit's forward, and sums gradients
  over that axis and all others on which ranks have tokens of their own, but the parameter's own named meshes.
- The module's own forward does what sharding over a named mesh means. There FSDP has gathered the parameter, which is a
  DTensor on its named meshes alone; ``param.to_local(grad_placements=param.placements)`` is this rank's shard. Its
  gradient must be the shard's of the loss of all tokens on the ranks of these meshes, whose exchange is the forward's.

Example: root mesh (r 2, f 2, mp 2, ep 2), plan ``{"EP": {"*.gate_up_proj": 0}, "MP": {"*.gate_up_proj": 2}}``, FSDP
with ``shard="f", replicate=("r", "mp", "ep")``. ``gate_up_proj`` [E, 2I, H] passes through

    plain                                                     [E, 2I, H]
    (mp: Shard(2), ep: Shard(0))                              [E/2, 2I, H/2]   what the forward sees
    (r: Replicate, f: Shard(1), mp: Shard(2), ep: Shard(0))   [E/2, I, H/2]    what the rank keeps and optimizes
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moesaic.ops import host
from moesaic.ops.placements import blocks_at
from moesaic.parallel.efsdp import FSDPPlan, set_gradient_sum, set_mixed_gradient_sum
from moesaic.parallel.outer import find_blocks
from moesaic.parallel.shard_rules import build_planned_placement_fn

MAX_MESHES = 2  # of one parameter beside FSDP's own: what FSDP2 can lie on


@dataclass(frozen=True, slots=True)
class _Cut:
    """One parameter, all its names, and the meshes that shard it: name of the mesh -> dim."""

    param: nn.Parameter
    names: tuple[str, ...]
    dims: dict[str, int]


def apply_plan(
    model: nn.Module, plan: Mapping[str, Mapping[str, int]], named_meshes: Mapping[str, DeviceMesh]
) -> nn.Module:
    """Shard the parameters that ``plan`` names over ``named_meshes``. In place; nothing is sent between ranks.

    Each becomes a DTensor over the meshes that name it, their axes in the order of the root mesh, in chunks as
    ``torch.chunk`` cuts them. Call it before FSDP, and see the module's docstring for what is left to the forward.

    Args:
        model: parameters on meta, or whole and equal on every rank. A tied parameter is cut once, under all its names.
        plan: name of a mesh -> glob of parameter names -> the dim to shard, e.g.
            ``{"EP": {"*.experts.gate_up_proj": 0}, "OE": {"*.over_encoded.weight": 0}}``. ``*`` spans dots.
        named_meshes: 1-D, of one root mesh where they shard the same parameter. A flattened axis is one, too.

    Raises:
        ValueError: all of these in one message, before anything is changed: a mesh that isn't there or isn't 1-D with a
            named axis; a glob that matches nothing; a parameter that is sharded already, lacks the dim, is given two
            dims by one mesh, has so few rows that a rank would be left with none, or is sharded by more than
            two meshes, or by meshes of different roots, or by meshes that share ranks.
    """
    cuts, problems = _resolve(model, plan, named_meshes)
    problems += [f"{cut.names[0]}: {problem}" for cut in cuts if (problem := _problem(cut, named_meshes))]
    if problems:
        raise ValueError("plan:\n" + "\n".join(problems))
    for cut in cuts:
        mesh, placements = _layout(cut, named_meshes)
        # src_data_rank=None: each rank cuts its own piece, nothing is sent.
        local = distribute_tensor(cut.param.detach(), mesh, placements, src_data_rank=None)
        sharded = nn.Parameter(local, requires_grad=cut.param.requires_grad)
        for name in cut.names:
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner).register_parameter(own_name, sharded)
    return model


def fully_shard_planned(
    model: nn.Module,
    root: DeviceMesh,
    plan: FSDPPlan,
    *,
    shard: str,
    replicate: Sequence[str] = (),
    dense_mesh: DeviceMesh | None = None,
    blocks: Sequence[nn.Module] | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> nn.Module:
    """``fully_shard`` each block, then the root, of a model cut by ``apply_plan``. In place; every rank must call it.

    Each parameter is sharded over the axis ``shard`` along the first dim that the plan left free and that the axis
    divides; where none divides, along dim 0 (a ``_StridedShard`` where the plan took it). A parameter of which the plan
    left no dim isn't sharded: every rank holds what the plan gave it, and its gradient is all-reduced. Gradients are
    summed, never averaged.

    Args:
        root: the root mesh of the plan's meshes.
        plan: its ``gradient_reduction`` must be ``sum``.
        shard: axis of ``root``; no parameter's own.
        replicate: every other axis on which ranks have tokens of their own. A parameter is summed over those of them
            that aren't its own: of a plan with ep and mp, a parameter cut along ep alone is summed over mp.
        dense_mesh: for the parameters that the plan didn't name, e.g. all ranks; default: ``(replicate, shard)``.
        blocks: the units; default: the transformer blocks of a Hugging Face model.
        ignored_params: parameters that another FSDP owns.

    Raises:
        ValueError: another ``gradient_reduction``; axes that ``root`` hasn't; parameters on meshes of another root, on
            the axis ``shard``, or on more than two axes; no blocks.
    """
    if plan.gradient_reduction != "sum":
        raise ValueError(
            f"gradient_reduction={plan.gradient_reduction!r}: parameters on different meshes have no mean in common. "
            "Divide the loss by the global token count, and choose 'sum'."
        )
    whole = build_fsdp_mesh(root, shard, replicate)
    ignored = set(ignored_params)
    meshes = _fsdp_meshes(model, root, shard, replicate, ignored)
    dense_mesh = whole if dense_mesh is None else dense_mesh
    inner = find_blocks(model) if blocks is None else blocks
    placement_fn = build_planned_placement_fn(meshes, dense_mesh)
    # A block within a block first; what the root owns is needed again at once in backward: it keeps that.
    for module, reshards in [*((block, plan.reshard_after_forward) for block in reversed(inner)), (model, False)]:
        unit = fully_shard(
            module,
            mesh=dense_mesh,
            shard_placement_fn=placement_fn,
            reshard_after_forward=reshards,
            mp_policy=plan.mp_policy,
            offload_policy=plan.offload_policy,
            ignored_params=ignored,
        )
        _set_sum(unit)
    return model


def build_fsdp_mesh(root: DeviceMesh, shard: str, replicate: Sequence[str] = ()) -> DeviceMesh:
    """An FSDP mesh from axes of ``root``: shards along one, replicas along any others, in whatever order they lie.

    Every rank of ``root`` must call it. Example: experts on ``(edp, efsdp, ep, expert_cp)`` that are split over ep and
    equal over expert_cp, where each rank has tokens of its own. Over ``build_fsdp_mesh(root, "efsdp", ("edp",
    "expert_cp"))`` their gradients are summed on all three axes, and their norm counts the replicas once.

    Returns:
        1-D, or (replicas, shards).

    Raises:
        ValueError: an axis that ``root`` hasn't, or one that is named twice.
    """
    names = root.mesh_dim_names or ()
    axes = (*replicate, shard)
    wrong = [axis for axis in axes if axis not in names or axes.count(axis) > 1]
    if wrong:
        raise ValueError(f"FSDP axes {axes}: {wrong[0]!r} is named twice, or not an axis of the root mesh {names}.")
    if not replicate:
        return root[shard]
    replicas = root[tuple(sorted(replicate, key=names.index))]
    return DeviceMesh._concatenate([replicas if replicas.ndim == 1 else replicas._flatten(), root[shard]])


def _resolve(
    model: nn.Module, plan: Mapping[str, Mapping[str, int]], named_meshes: Mapping[str, DeviceMesh]
) -> tuple[list[_Cut], list[str]]:
    """What the globs name, in the model's order, and what is wrong with them."""
    all_names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(param), []).append(name)
    every = [_Cut(p, tuple(all_names[id(p)]), {}) for p in model.parameters()]
    problems = []
    for mesh_name, patterns in plan.items():
        if mesh_name not in named_meshes:
            problems.append(f"{mesh_name}: no mesh of this name; named_meshes has {sorted(named_meshes)}.")
        elif named_meshes[mesh_name].ndim != 1 or named_meshes[mesh_name].mesh_dim_names is None:
            problems.append(
                f"{mesh_name}: {named_meshes[mesh_name]} isn't 1-D with a named axis; flatten it or slice it."
            )
        for pattern, dim in patterns.items():
            matched = [cut for cut in every if any(fnmatchcase(name, pattern) for name in cut.names)]
            if not matched:
                problems.append(
                    f"{mesh_name}: {pattern!r} matches no parameter; write names as named_parameters() does."
                )
            for cut in matched:
                if cut.dims.setdefault(mesh_name, dim) != dim:
                    problems.append(
                        f"{cut.names[0]}: {mesh_name} shards dim {cut.dims[mesh_name]} and, by {pattern!r}, {dim}."
                    )
    return [cut for cut in every if cut.dims], problems


def _problem(cut: _Cut, named_meshes: Mapping[str, DeviceMesh]) -> str | None:
    """What keeps a parameter from being cut, if its meshes are there at all."""
    shape, meshes = tuple(cut.param.shape), [named_meshes[name] for name in cut.dims if name in named_meshes]
    if isinstance(cut.param, DTensor):
        return f"already sharded, {cut.param.placements}. Build the model anew: a model is cut once."
    outside = [dim for dim in cut.dims.values() if not 0 <= dim < len(shape)]
    if outside:
        return f"no dim {outside[0]} in {shape}; dims count from 0."
    if len(meshes) < len(cut.dims) or any(mesh.ndim != 1 or mesh.mesh_dim_names is None for mesh in meshes):
        return None  # reported with the mesh
    if len(meshes) > MAX_MESHES:
        return (
            f"sharded by {list(cut.dims)}; FSDP2 takes {MAX_MESHES} meshes beside its own. Flatten axes into one mesh."
        )
    problem = _mesh_problem(meshes)
    if problem is not None:
        return f"{list(cut.dims)} {problem}"
    mesh, placements = _layout(cut, named_meshes)
    last = [size - 1 for size in mesh.shape]
    if not blocks_at(shape, tuple(mesh.shape), last, placements):
        return f"{shape} in chunks over {cut.dims} (mesh: dim) leaves ranks with nothing; use smaller meshes: {mesh}."
    return None


def _mesh_problem(meshes: Sequence[DeviceMesh]) -> str | None:
    """Why one tensor can't lie on these meshes together."""
    roots = {id(mesh._get_root_mesh()) for mesh in meshes}
    if len(roots) > 1:
        return "are axes of different root meshes. Slice them from one init_device_mesh."
    ranks = [set(host.read_ints(mesh.mesh.reshape(1, -1))[0]) for mesh in meshes]
    if any(len(one & other) > 1 for number, one in enumerate(ranks) for other in ranks[:number]):
        return "share ranks beside this one: axes that overlap. Use axes of the root mesh that don't."
    return None


def _layout(cut: _Cut, named_meshes: Mapping[str, DeviceMesh]) -> tuple[DeviceMesh, list[Shard]]:
    """The mesh of a parameter and its placements: axes in the root's order, flattened ones last."""

    def position(name: str) -> int:
        mesh = named_meshes[name]
        axes, (axis,) = mesh._get_root_mesh().mesh_dim_names or (), mesh.mesh_dim_names or ()
        return axes.index(axis) if axis in axes else len(axes)

    ordered = sorted(cut.dims, key=position)
    meshes = [named_meshes[name] for name in ordered]
    mesh = meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)
    return mesh, [Shard(cut.dims[name]) for name in ordered]


def _fsdp_meshes(
    model: nn.Module, root: DeviceMesh, shard: str, replicate: Sequence[str], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, DeviceMesh]:
    """The FSDP mesh of each parameter that is a DTensor: one for all that have the same axes."""
    meshes: dict[nn.Parameter, DeviceMesh] = {}
    built: dict[tuple[str, ...], DeviceMesh] = {}
    problems = []
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor) or param in ignored:
            continue
        own = param.device_mesh
        if own.ndim > MAX_MESHES:
            problems.append(f"{name}: on {own.ndim} axes; FSDP2 takes {MAX_MESHES} beside its own.")
        elif (problem := _mesh_problem([root[shard], own])) is not None:
            problems.append(f"{name}: FSDP's {shard!r} of {root} and the plan's {own} {problem}")
        else:
            others = tuple(axis for axis in replicate if not _has_axis(own, root[axis]))
            if others not in built:
                built[others] = build_fsdp_mesh(root, shard, others)
            meshes[param] = built[others]
    if problems:
        raise ValueError("\n".join(problems))
    return meshes


def _has_axis(mesh: DeviceMesh, axis: DeviceMesh) -> bool:
    """Whether ``axis`` is one of ``mesh``'s, or part of a flattened one."""
    (name,) = axis.mesh_dim_names or ("",)
    return name in (mesh.mesh_dim_names or ()) or _mesh_problem([mesh, axis]) is not None


def _set_sum(unit: FSDPModule) -> None:
    groups = unit._get_fsdp_state()._fsdp_param_groups
    if len(groups) == 1:
        set_gradient_sum(unit, groups[0].mesh_info.mesh)
    elif groups:
        set_mixed_gradient_sum(unit)
