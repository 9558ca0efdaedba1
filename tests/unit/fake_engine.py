"""An engine without a model: it notes which hooks were called, and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moesaic.engines.base import Completion, Engine, Offer, PauseMode, Receiving, Sampling
from moesaic.engines.states import Tag
from moesaic.reshard.layout import TargetLayout


class FakeEngine(Engine):
    """``fails``: names of hooks that raise. ``during``: called within ``generate``."""

    def __init__(self, *, version: int = 0, drain_timeout_s: float = 5.0) -> None:
        super().__init__(version=version, drain_timeout_s=drain_timeout_s)
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.during: Callable[[], None] = lambda: None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.split(" ")[0] in self.fails:
            raise RuntimeError(f"no {call} today")

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        return ()

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        self._note("generate")
        self.during()
        one = Completion(tokens=(7,), logprobs=(-0.5,), finish_reason="length", weight_version=self.version)
        return [[one] * sampling.n for _ in prompts]

    def _pause(self, mode: PauseMode) -> None:
        self._note(f"pause {mode}")

    def _resume(self) -> None:
        self._note("resume")

    def _begin_update(self) -> None:
        self._note("begin_update")

    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._note("receive")

    def _start_receive(self, offer: Offer) -> Receiving:
        self._note("start_receive")
        return Receiving(sink=None, wait=lambda timeout_s: None)

    def _end_update(self) -> None:
        self._note("end_update")

    def _set_version(self, version: int) -> None:
        self._note(f"set_version {version}")

    def _abort_update(self) -> None:
        self._note("abort_update")

    def _reset_caches(self) -> None:
        self._note("reset_caches")

    def _sleep(self, level: int) -> None:
        self._note(f"sleep {level}")

    def _wake(self, tags: tuple[Tag, ...]) -> None:
        self._note(f"wake {'+'.join(tags)}")

    def _close(self) -> None:
        self._note("close")
