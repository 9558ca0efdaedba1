"""What an engine may do when: one state machine for all of them. Pure: no torch, no engine.

    running --pause--> paused --begin_update--> updating --receive*, end_update--> loaded
    loaded --reset_caches--> cleared --set_version--> paused --resume--> running

Beside the phase: what is asleep, and whether the weights are those of ``version``. They aren't any more after a failure
between ``begin_update`` and ``set_version`` (it is paused then), nor after ``sleep(2)``: the engine is broken, and
generates nothing until a whole update has been through. Nothing sleeps or wakes while one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Phase = Literal["running", "paused", "updating", "loaded", "cleared"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)


class EngineStateError(RuntimeError):
    """A call that the engine's state doesn't allow; the message names the state and what would be allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Where an engine stands. Each method gives the state after a call, or refuses the call.

    Attributes:
        version: of the weights, as ``set_version`` was last told; counted by the trainer.
        asleep: what is not in memory.
        broken: why the weights are of no version; empty where they are whole.
        num_in_flight: calls of ``generate`` that have not returned.
    """

    version: int = 0
    phase: Phase = "running"
    asleep: frozenset[Tag] = frozenset()
    broken: str = ""
    num_in_flight: int = 0
    is_closed: bool = False

    def generate(self) -> EngineState:
        """A call of ``generate`` begins."""
        self._expect("generate", "running")
        if self.broken:
            raise self._refusal("generate", f"{self.broken}; only a whole update brings it back")
        if self.asleep:
            raise self._refusal("generate", f"{self._asleep_text} asleep: call wake first")
        return replace(self, num_in_flight=self.num_in_flight + 1)

    def generated(self) -> EngineState:
        """A call of ``generate`` returns, well or not."""
        return replace(self, num_in_flight=self.num_in_flight - 1)

    def pause(self) -> EngineState:
        """Nothing new is taken on."""
        self._expect("pause", "running")
        return replace(self, phase="paused")

    def resume(self) -> EngineState:
        """Requests are taken on again."""
        self._expect("resume", "paused")
        return replace(self, phase="running")

    def begin_update(self) -> EngineState:
        """New weights are about to come."""
        self._expect("begin_update", "paused")
        if "weights" in self.asleep:
            raise self._refusal("begin_update", 'the weights are asleep: call wake(("weights",)) first')
        return replace(self, phase="updating")

    def receive(self) -> EngineState:
        """Some of the new weights come."""
        self._expect("receive", "updating")
        return self

    def end_update(self) -> EngineState:
        """All of them are there."""
        self._expect("end_update", "updating")
        return replace(self, phase="loaded")

    def reset_caches(self) -> EngineState:
        """Keys and values of earlier weights are forgotten; with requests in flight only while paused by ``keep``."""
        self._expect("reset_caches", "running", "paused", "loaded")
        if self.phase == "running" and self.num_in_flight:
            raise self._refusal("reset_caches", f"{self.num_in_flight} requests are in flight: call pause first")
        return replace(self, phase="cleared") if self.phase == "loaded" else self

    def set_version(self, version: int) -> EngineState:
        """The update is valid: on every rank, everything before went well."""
        self._expect("set_version", "cleared")
        self.check_version(version)
        return replace(self, phase="paused", version=version, broken="")

    def check_version(self, version: int) -> None:
        """Refuse a version that could not be told from an earlier one: only a broken engine gets its own again."""
        if version < self.version or (version == self.version and not self.broken):
            raise ValueError(
                f"version={version}: the engine has weights of version {self.version}; versions only grow, so that a "
                "sample's version tells the weights that made it. Count the trainer's updates, never back."
            )

    def sleep(self, level: int) -> EngineState:
        """Memory is given back: keys and values, and weights (level 1: kept on the host; level 2: dropped)."""
        if level not in (1, 2):
            raise ValueError(f"level={level}: 1 (weights kept on the host) or 2 (weights dropped).")
        self._expect("sleep", "running", "paused")
        if self.num_in_flight:
            raise self._refusal("sleep", f"{self.num_in_flight} requests are in flight: call pause (drain) first")
        if "weights" in self.asleep:
            raise self._refusal("sleep", "it sleeps already: call wake first")
        broken = self.broken or ("its weights were dropped by sleep(2)" if level == 2 else "")
        return replace(self, asleep=frozenset(TAGS), broken=broken)

    def wake(self, tags: tuple[Tag, ...]) -> EngineState:
        """What ``tags`` name is in memory again."""
        if not tags or set(tags) - set(TAGS):
            raise ValueError(f"tags={tags!r}: one or both of {', '.join(TAGS)}.")
        self._expect("wake", "running", "paused")
        if "kv_cache" in tags and "weights" in self.asleep and "weights" not in tags:
            raise self._refusal('wake(("kv_cache",))', 'the weights are asleep: call wake(("weights",)) first')
        return replace(self, asleep=self.asleep - set(tags))

    def fail(self, reason: str) -> EngineState:
        """An update, a sleep or a wake failed, on this rank or on another."""
        phase: Phase = "running" if self.phase == "running" else "paused"
        return replace(self, phase=phase, broken=reason)

    def close(self) -> EngineState:
        """For good."""
        return replace(self, is_closed=True)

    @property
    def text(self) -> str:
        """For messages. Example: ``paused, version 3, kv_cache asleep``."""
        parts = ["closed" if self.is_closed else self.phase, f"version {self.version}"]
        parts += [f"{self._asleep_text} asleep"] if self.asleep else []
        parts += [f"broken: {self.broken}"] if self.broken else []
        return ", ".join(parts)

    @property
    def _asleep_text(self) -> str:
        return " and ".join(tag for tag in TAGS if tag in self.asleep)

    def _expect(self, call: str, *phases: Phase) -> None:
        if self.is_closed:
            raise self._refusal(call, "it is closed")
        if self.phase not in phases:
            raise self._refusal(call, f"it goes with {' or '.join(phases)}")

    def _refusal(self, call: str, why: str) -> EngineStateError:
        return EngineStateError(f"{call} refused; the engine is {self.text}: {why}.")
