"""Ranks that take turns: which role or engine has the device's memory, and how it is handed over.

The only file that moves parameters, gradients and optimizer state on and off the device. A run is in one of four states
(``budget.py`` has what each of them holds)::

    ASLEEP ──> TRAIN actor, TRAIN critic, ... ──> SYNC ──> ROLLOUT ──> TRAIN ...        and from each back to ASLEEP

After the actor's turn the engines' weights are old ones: there is no way to ROLLOUT but through SYNC.

Each hand-over goes in three parts, after each of which all ranks agree: is it allowed; make room; fill it. So no rank
takes memory that another one's engine or gathered parameters still have, and what fails on one rank fails on all.
Nothing is made anew: a role that comes back has the same tensors, bit for bit, and FSDP and the optimizer never know.

On a CPU, parked bytes are in files of the run's scratch folder, one for each role and kind of memory, without names.
On an accelerator they are in pinned host memory; that way has not been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from moesaic.engines.base import Engine
from moesaic.engines.hf import HfEngine
from moesaic.ops.parking import Parking, Tier, local_tensor
from moesaic.rl.budget import Row, State, What, budget_table, needs, tensors_of
from moesaic.rl.roles import Role
from moesaic.weights.agree import raise_together

KINDS: tuple[What, ...] = ("weights", "optimizer", "gradients")


class HandOverError(RuntimeError):
    """A hand-over that isn't allowed, or that failed before."""


class HandOver:
    """Which state the run is in, and what its roles and engines have of the device's memory. Every rank has one.

    Begins ASLEEP, and parks what it is given: roles may be added one by one as they are built, so that all of them
    together never have to fit. Use it as a context, or ``close`` it: parked values are gone then.

    Args:
        roles, engines: as by ``add`` and ``add_engines``.
        tier: where parked bytes go (``build_tier``).
        parks: roles that aren't at work are parked; else they stay (``park_idle_roles``).
        sleeps: engines sleep while they don't generate (``free_cache_engine``).
        is_synced: the engines' weights are the actor's; else SYNC comes before the first ROLLOUT.
    """

    def __init__(
        self,
        roles: Iterable[Role] = (),
        engines: Iterable[Engine] = (),
        *,
        tier: Tier,
        parks: bool = True,
        sleeps: bool = True,
        is_synced: bool = False,
    ) -> None:
        self._tier = tier
        self._parks = parks
        self._sleeps = sleeps
        self._is_synced = is_synced
        self._state = State.ASLEEP
        self._at_work: str | None = None
        self._broken = ""
        self._number = 0
        self._roles: dict[str, Role] = {}
        self._parkings: dict[tuple[str, What], Parking] = {}
        self._engines: list[Engine] = []
        for role in roles:
            self.add(role)
        self.add_engines(engines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> State:
        """What the ranks are doing."""
        return self._state

    @property
    def at_work(self) -> str | None:
        """The role whose turn it is, in TRAIN."""
        return self._at_work

    @property
    def num_parked(self) -> int:
        """Bytes of roles that are off the device on this rank."""
        return sum(parking.num_bytes for parking in self._parkings.values())

    def add(self, role: Role) -> None:
        """Take ``role`` in, and park it: its model refuses a forward then. While ASLEEP; every rank must call it.

        Raises:
            HandOverError: it isn't ASLEEP, or has a role of that name.
            OSError, or RuntimeError on the other ranks: the tier has no room.
        """
        if self._state is not State.ASLEEP or role.name in self._roles:
            raise HandOverError(
                f"{role.name} can't be added in {self._text}: add each role once, before the first turn."
            )
        self._roles[role.name] = role
        for what in KINDS:
            self._parkings[role.name, what] = Parking(self._tier)
        # Before FSDP's own: what reads memory that isn't there ends the process without a word.
        role.model.register_forward_pre_hook(partial(_require_weights, role.name), prepend=True)
        self._agree(lambda: self._make_room(role, ()), f"parking {role.name}", 0)

    def add_engines(self, engines: Iterable[Engine]) -> None:
        """Those with objects in this process; asleep from here on."""
        for engine in engines:
            self._engines.append(engine)
            self._put_to_sleep(engine)

    def budget(self) -> tuple[Row, ...]:
        """``budget_table`` of what this hands over."""
        return budget_table(tuple(self._roles.values()), self._engines, parks=self._parks, sleeps=self._sleeps)

    def enter(self, state: State, role: str | None = None, *, changes: bool = True) -> None:
        """Go over to ``state``; with ``role`` at work, in TRAIN. Every rank must call it, with the same.

        Args:
            changes: what the turn is for may change the role's weights: after the actor's, the engines' are old ones.

        Raises:
            HandOverError: a state that can't follow; all ranks stay where they are.
            RuntimeError: the ranks don't all go over to the same.
            OSError, or RuntimeError on the other ranks: memory could not be parked; nothing can be entered any more.
        """
        self._number += 1
        # A rank that asks for another state has another number, and then all of them raise.
        code = self._number * 64 + list(State).index(state) * 8 + self._index_of(role)
        self._agree(lambda: self._require(state, role), f"going over to {_text(state, role)}", code)
        self._broken = f"going over to {_text(state, role)} failed"
        drops = role == "actor" and changes
        self._agree(lambda: self._make_room_for(state, role, drops), f"making room for {_text(state, role)}", code)
        self._agree(lambda: self._fill(state, role), f"bringing back what {_text(state, role)} needs", code)
        self._broken = ""
        self._state, self._at_work = state, role
        if state is State.SYNC:
            self._is_synced = True
        elif drops:
            self._is_synced = False

    def close(self) -> None:
        """Drop what is parked, with its files; roles that are parked have no values any more."""
        for parking in self._parkings.values():
            parking.close()
        self._broken = "it is closed"

    # ------------------------------------------------------------------------------------------------------------ rules

    def _require(self, state: State, role: str | None) -> None:
        if self._broken:
            raise self._refusal(state, role, self._broken)
        if not self._roles:
            raise self._refusal(state, role, "it has no roles: add them first")
        if state is State.TRAIN and role not in self._roles:
            raise self._refusal(state, role, f"TRAIN is one role's turn: one of {', '.join(self._roles)}")
        if state is not State.TRAIN and role is not None:
            raise self._refusal(state, role, "only TRAIN is a role's turn")
        if state is State.SYNC and "actor" not in self._roles:
            raise self._refusal(state, role, "there is no actor, whose weights a sync sends")
        if state is State.ROLLOUT and not self._is_synced:
            raise self._refusal(state, role, "the engines don't have the actor's weights: enter SYNC first")
        in_flight = sum(engine.state.num_in_flight for engine in self._engines)
        if state is not State.ROLLOUT and in_flight:
            raise self._refusal(state, role, f"{in_flight} calls of generate are in flight: let them end, or pause")

    def _refusal(self, state: State, role: str | None, why: str) -> HandOverError:
        return HandOverError(f"{_text(state, role)} can't follow {self._text}: {why}.")

    @property
    def _text(self) -> str:
        return _text(self._state, self._at_work)

    def _index_of(self, role: str | None) -> int:
        names = list(self._roles)
        return names.index(role) + 1 if role in names else 0

    # ----------------------------------------------------------------------------------------------------------- moving

    def _make_room_for(self, state: State, at_work: str | None, drops: bool) -> None:
        if state in (State.TRAIN, State.ASLEEP):
            for engine in self._engines:
                self._put_to_sleep(engine, drops=drops)
        for role in self._roles.values():
            self._make_room(role, needs(state, at_work, role, self._engines))

    def _make_room(self, role: Role, needed: Sequence[What]) -> None:
        if len(needed) < len(KINDS):
            # Whatever FSDP has gathered: it keeps the root's after a forward without a backward.
            for unit in role.model.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
        if not self._parks:
            return
        leaving = {what: self._parkings[role.name, what] for what in KINDS if what not in needed}
        tensors = tensors_of(role) if any(not parking.is_parked for parking in leaving.values()) else {}
        for what, parking in leaving.items():
            if not parking.is_parked:
                parking.park(tensors[what])

    def _fill(self, state: State, at_work: str | None) -> None:
        for role in self._roles.values():
            for what in needs(state, at_work, role, self._engines):
                self._parkings[role.name, what].bring_back()
        if state is State.ROLLOUT:
            for engine in self._engines:
                if engine.state.asleep:
                    engine.wake()

    def _put_to_sleep(self, engine: Engine, *, drops: bool = False) -> None:
        if not self._sleeps or "weights" in engine.state.asleep:
            return
        owns = not isinstance(engine, HfEngine) or engine.owns_weights
        engine.sleep(2 if drops and owns else 1)

    # -------------------------------------------------------------------------------------------------------- all ranks

    def _agree(self, action: Callable[[], None], what: str, step: int) -> None:
        """Do ``action``, and return when every rank has: the barrier of a hand-over."""
        error: Exception | None = None
        try:
            action()
        except Exception as problem:  # raised below, when the other ranks know of it
            error = problem
        raise_together(error, self._mesh, what, step=step)

    @property
    def _mesh(self) -> DeviceMesh | None:
        """All ranks."""
        return next((role.meshes.data for role in self._roles.values()), None)


def _require_weights(name: str, model: nn.Module, _inputs: object) -> None:
    parts = map(local_tensor, model.parameters())
    if any(part.numel() and not part.untyped_storage().nbytes() for part in parts):
        raise HandOverError(f"{name}: its weights are parked; enter TRAIN {name} first.")


def _text(state: State, role: str | None) -> str:
    return state.value if role is None else f"{state.value} {role}"
