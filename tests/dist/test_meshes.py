"""Groups of the three views end a collective that hangs when the default group would."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from moesaic.meshes import build_meshes, group_timeouts
from tests.pool import RunRanks


def timeouts_on_rank(rank: int) -> tuple[list[float], float, int]:
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=77))  # what init_process_group(timeout_s=77) does
    own = group_timeouts(dist.new_group())["cpu"].total_seconds()  # torch's own default
    before = set(dist.distributed_c10d._world.pg_map)
    meshes = build_meshes("cpu", mp_replicate_size=2, ep_size=2, edp_size=1)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
    views = (meshes.data, meshes.dense, meshes.expert, meshes.tokens, meshes.dense_fsdp, meshes.expert_fsdp)
    groups += [group for mesh in views for group in mesh.get_all_groups()]
    return [group_timeouts(group)["cpu"].total_seconds() for group in groups], own, len(set(groups))


def test_every_group_has_the_default_groups_timeout(run_ranks: RunRanks) -> None:
    for found, own, num_groups in run_ranks(timeouts_on_rank, 4):
        assert own != 77, "torch has changed: build_meshes needn't set it any more"
        assert set(found) == {77.0} and num_groups >= 7
