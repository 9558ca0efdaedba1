"""The engines of a recipe's rollout, on the ranks that train: made, given the actor's weights, put to sleep.

| ``rollout:``  | engine ``hf``                                                                                      |
|---------------|----------------------------------------------------------------------------------------------------|
| sizes of 1    | a whole copy on every rank; each answers requests of its own                                       |
| ``tp_size`` T | a copy for every T ranks, its matrices split over them (``engines/hf_split.py``); they answer the  |
|               | same requests together                                                                             |
| ``ep_size`` P | the experts split over every P ranks, the rest whole on each; each rank answers requests of its    |
|               | own, and all ranks generate together                                                               |

Weights come by planned transfers, shard to shard, in the recipe's compute type. Until the first have come, an engine
refuses to generate.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from moesaic.config import Recipe
from moesaic.engines.base import Engine
from moesaic.engines.hf import HfEngine
from moesaic.engines.hf_split import build_engine_model
from moesaic.engines.states import TAGS, Tag
from moesaic.engines.sync import Agreement, WeightSync
from moesaic.engines.transfer import PlannedTransfer
from moesaic.meshes import build_meshes
from moesaic.rl.roles import Role
from moesaic.runtime import current_device
from moesaic.train.setup import DTYPES

# For a message, of 16 MiB at most: seconds on a slow net. A lost rank isn't waited for longer.
TRANSFER_TIMEOUT_S = 300.0
LOCAL_HOST = "127.0.0.1"
PARKED = "parked"
"""Folder of a run in which roles and engines park what isn't in memory, where that is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This rank's part in a rollout.

    Attributes:
        replica: whose requests its engine answers.
        num_replicas: among which a step's requests are shared.
        is_first: the replica's answers are taken from this rank.
        group: ranks that must call the engine together, as often as each other; None: each may alone.
        is_shared: the ranks of ``group`` answer the same requests, and not each its own.
    """

    replica: int
    num_replicas: int
    is_first: bool = True
    group: dist.ProcessGroup | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngines:
    """What generates, on this rank. Every rank must call ``sync``, ``sleep`` and ``wake``, in one order.

    Attributes:
        engine: of this rank.
        seat: its part.
        weight_sync: from the actor into all ranks' engines.
        is_freed: an engine that doesn't generate gives its memory back (``rollout.free_cache_engine``).
    """

    engine: Engine
    seat: Seat
    weight_sync: WeightSync
    is_freed: bool

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those with objects in this process."""
        return (self.engine,)

    def sync(self, version: int) -> None:
        """Bring the actor's weights, as ``version``, into the engines, which are awake afterwards.

        Raises:
            SyncFailed: on all ranks; see ``WeightSync``.
        """
        self.weight_sync.sync(version)

    def sleep(self) -> None:
        """Give back weights, keys and values, until the next ``sync``: the trained weights will be others by then."""
        if self.is_freed and not self.engine.state.asleep:
            self.engine.sleep(level=2)

    def wake(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Take memory for what ``tags`` name; ``sync`` does so by itself."""
        if self.engine.state.asleep:
            self.engine.wake(tags)

    def close(self) -> None:
        """End the engines of this process."""
        self.engine.close()


def build_rollout(recipe: Recipe, actor: Role) -> RolloutEngines:
    """The engines of ``recipe.rollout``, asleep where ``free_cache_engine`` says so; ``sync`` must come first. Every
    rank must call it.

    Raises:
        ValueError: an engine that isn't there yet; sizes that don't fit the ranks or the model.
    """
    name = recipe.rollout.engine
    if name not in BUILDERS:
        raise ValueError(f"rollout.engine={name!r}: not yet; {', '.join(BUILDERS)} can be used here.")
    engine, seat = BUILDERS[name](recipe, actor)
    transfer = PlannedTransfer(
        actor.model,
        dtype=DTYPES[recipe.compute_dtype],
        store_host=_find_store_host(),
        timeout_s=min(float(recipe.dist_timeout), TRANSFER_TIMEOUT_S),
    )
    engines = RolloutEngines(
        engine=engine,
        seat=seat,
        weight_sync=WeightSync([engine], transfer, _build_agreement(recipe)),
        is_freed=recipe.rollout.free_cache_engine,
    )
    engine.fail("no weights have come to it yet")
    engines.sleep()
    return engines


def _build_hf(recipe: Recipe, actor: Role) -> tuple[Engine, Seat]:
    rollout, rank, world_size = recipe.rollout, dist.get_rank(), dist.get_world_size()
    _require_sizes(recipe, world_size)
    tp_mesh = build_meshes(tp_size=rollout.tp_size).dense["tp"] if rollout.tp_size > 1 else None
    meshes = build_meshes(ep_size=rollout.ep_size) if rollout.ep_size > 1 else None
    model = build_engine_model(
        actor.recipe.model,
        dtype=DTYPES[recipe.compute_dtype],
        device=current_device(),
        tp_mesh=tp_mesh,
        ep_mesh=None if meshes is None else meshes.expert["ep"],
        attn_implementation=recipe.attn_implementation,
    )
    engine = HfEngine(
        model,
        meshes=meshes,
        tp_mesh=tp_mesh,
        max_batch_tokens=rollout.max_batch_tokens,
        parking_folder=Path(recipe.output_dir) / PARKED,
    )
    if tp_mesh is None:
        group = None if meshes is None else dist.group.WORLD
        return engine, Seat(replica=rank, num_replicas=world_size, group=group)
    replica, place = divmod(rank, rollout.tp_size)
    return engine, Seat(
        replica=replica,
        num_replicas=world_size // rollout.tp_size,
        is_first=place == 0,
        group=tp_mesh.get_group(),
        is_shared=True,
    )


def _require_sizes(recipe: Recipe, world_size: int) -> None:
    """What ``check`` says before a run starts, for those who build without it."""
    rollout = recipe.rollout
    problems = []
    if rollout.pp_size > 1:
        problems.append(f"rollout.pp_size={rollout.pp_size}: hf doesn't split layers; set 1")
    if rollout.ep_size > 1 and rollout.tp_size > 1:
        problems.append(f"rollout.tp_size={rollout.tp_size}: hf splits matrices or experts; set 1, or ep_size: 1")
    if world_size % rollout.tp_size:
        problems.append(f"rollout.tp_size={rollout.tp_size}: must divide the {world_size} ranks")
    num_replicas = 1 if rollout.ep_size > 1 else world_size // rollout.tp_size
    if rollout.dp_size not in (None, num_replicas):
        problems.append(f"rollout.dp_size={rollout.dp_size}: {num_replicas} on {world_size} ranks; leave it out")
    if problems:
        raise ValueError(f"{'; '.join(problems)}.")


def _find_store_host() -> str:
    """Rank 0's machine, as the other ranks reach it."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.getfqdn())
    return LOCAL_HOST if len(set(hosts)) == 1 else hosts[0]


def _build_agreement(recipe: Recipe) -> Agreement:
    """Under a name that no other build of this process group has used."""
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    store = dist.distributed_c10d._get_default_store()
    return Agreement(
        store,
        dist.get_rank(),
        dist.get_world_size(),
        timeout_s=float(recipe.dist_timeout),
        prefix=f"rollout-{name[0]}",
    )


Builder = Callable[[Recipe, Role], tuple[Engine, Seat]]
BUILDERS: Mapping[str, Builder] = MappingProxyType({"hf": _build_hf})
