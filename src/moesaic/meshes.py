"""Three views of the same ranks, each a root DeviceMesh of its own.

| view   | axes                             | lays out                                                                 |
|--------|----------------------------------|--------------------------------------------------------------------------|
| data   | ``(dp, cp, tp)``                 | dp: other samples; cp: other tokens of them; tp: the same tokens         |
| dense  | ``(mp_replicate, mp_shard, tp)`` | every parameter that is not a routed expert                              |
| expert | ``(edp, efsdp, ep)``             | routed experts; ep is innermost, so its all-to-all stays inside a node   |

Each view is row-major over ranks 0..W-1. FSDP needs its own axis and the axis that already shards a parameter (tp, ep)
to have one parent: that is why each view is a root.

Example, 8 ranks, mp_replicate 2, ep 2, edp 2 (cp = tp = 1):

    dense  (2, 4, 1)   replicas {0..3} {4..7}; rank 5 holds shard 1 of replica 1
    expert (2, 2, 2)   ep groups {0,1} {2,3} {4,5} {6,7}; efsdp groups {0,2} {1,3} {4,6} {5,7}; edp groups {0,4} ...
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moesaic.config.parallel import ParallelSizes
from moesaic.runtime import device_type as current_device_type

DATA_AXES = ("dp", "cp", "tp")
DENSE_AXES = ("mp_replicate", "mp_shard", "tp")
EXPERT_AXES = ("edp", "efsdp", "ep")


@dataclass(frozen=True, slots=True)
class Meshes:
    """The three views, and parts of them.

    Attributes:
        sizes: those that the views were built from.
        tokens: ``(dp, cp)`` of the data view flattened: the ranks whose losses are of different tokens, over which they
            and token counts are summed.
        sequence: ``(cp, tp)`` of the data view flattened: the ranks that share the tokens of a sequence.
        unsplit: ``(mp_replicate, mp_shard * tp)``: dense parameters that tp doesn't split. Its ranks compute with them
            on different tokens, so FSDP shards them over tp too, and sums their gradients there.
    """

    sizes: ParallelSizes
    data: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh
    tokens: DeviceMesh
    sequence: DeviceMesh
    unsplit: DeviceMesh

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard`` of what tp splits: ``(mp_replicate, mp_shard)``, or 1-D with one replica."""
        return self.dense["mp_shard"] if self.sizes.mp_replicate_size == 1 else self.dense["mp_replicate", "mp_shard"]

    @property
    def unsplit_fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard`` of dense parameters that tp doesn't split; without tp, of all of them."""
        if self.sizes.tp_size == 1:
            return self.dense_fsdp
        return self.unsplit["mp_shard"] if self.sizes.mp_replicate_size == 1 else self.unsplit

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Mesh for ``fully_shard`` of experts: ``(edp, efsdp)``, or 1-D with one replica."""
        return self.expert["efsdp"] if self.sizes.edp_size == 1 else self.expert["edp", "efsdp"]

    def table(self) -> str:
        """One line per axis: size, and the rank groups along it (at most 8 shown). For logs and the run's folder."""
        lines = [f"{'view':<8}{'axis':<14}{'size':>5}  rank groups"]
        for view, mesh in (("data", self.data), ("dense", self.dense), ("expert", self.expert)):
            for axis, name in enumerate(mesh.mesh_dim_names or ()):
                groups = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
                shown = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:8])
                lines.append(f"{view:<8}{name:<14}{mesh.size(axis):>5}  {shown}{' ...' if len(groups) > 8 else ''}")
        return "\n".join(lines)


def build_meshes(
    device_type: str | None = None,
    *,
    cp_size: int = 1,
    tp_size: int = 1,
    mp_replicate_size: int = 1,
    ep_size: int = 1,
    edp_size: int | None = None,
) -> Meshes:
    """Build the three views over all ranks of the default process group. Every rank must call it, in the same order.

    Every group of theirs gets the default group's timeout: torch by itself gives a new group 10 or 30 minutes.

    Args:
        device_type: ``cpu``, ``cuda``, ...; default: the accelerator's, or ``cpu`` without one.
        cp_size, tp_size, mp_replicate_size, ep_size: sizes of these axes; the others follow (``ParallelSizes``).
        edp_size: replicas of the experts; default ``mp_replicate_size``.

    Raises:
        ValueError: the sizes don't multiply to the world size.
    """
    sizes = ParallelSizes(
        world_size=dist.get_world_size(),
        cp_size=cp_size,
        tp_size=tp_size,
        mp_replicate_size=mp_replicate_size,
        ep_size=ep_size,
        edp_size=mp_replicate_size if edp_size is None else edp_size,
    )
    kind = device_type or current_device_type()
    dense_shape = (sizes.mp_replicate_size, sizes.mp_shard_size, sizes.tp_size)
    expert_shape = (sizes.edp_size, sizes.efsdp_size, sizes.ep_size)
    data = init_device_mesh(kind, (sizes.dp_size, sizes.cp_size, sizes.tp_size), mesh_dim_names=DATA_AXES)
    dense = init_device_mesh(kind, dense_shape, mesh_dim_names=DENSE_AXES)
    unsplit_shape = (sizes.mp_replicate_size, sizes.mp_shard_size * sizes.tp_size)
    meshes = Meshes(
        sizes=sizes,
        data=data,
        dense=dense,
        expert=init_device_mesh(kind, expert_shape, mesh_dim_names=EXPERT_AXES),
        tokens=data["dp", "cp"]._flatten("tokens"),
        sequence=data["cp", "tp"]._flatten("sequence"),
        unsplit=dense["mp_replicate", "mp_shard"]
        if sizes.tp_size == 1
        else init_device_mesh(kind, unsplit_shape, mesh_dim_names=DENSE_AXES[:2]),
    )
    assert dist.group.WORLD is not None
    timeout = group_timeouts(dist.group.WORLD).get(kind)
    if timeout is None:  # a group that nothing is sent through, for plans
        return meshes
    for mesh in (meshes.data, meshes.dense, meshes.expert, meshes.tokens, meshes.sequence, meshes.unsplit):
        for group in mesh.get_all_groups():
            if set(group_timeouts(group).values()) != {timeout}:
                group.set_timeout(timeout)
    return meshes


def group_timeouts(group: dist.ProcessGroup) -> dict[str, timedelta]:
    """Device type -> how long a collective of ``group`` on its tensors may take; none where nothing is really sent
    (torch's ``fake`` backend). torch has no public way to ask."""
    options = {device.type: group._get_backend(device).options for device in group._device_types}
    return {kind: its._timeout for kind, its in options.items() if its is not None}
