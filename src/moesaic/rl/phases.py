"""Where a step's time goes, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moesaic.runtime import device_type


class PhaseTimer:
    """Adds up the wall-clock seconds of a step's phases on this rank; the device's work is waited for at each end.

    A phase within another counts for itself alone. Example, a rollout of 5 s that scores for 2 s in its midst::

        gen       . . .     . .         3 s, less than it took
        reward          . .             2 s
    """

    def __init__(self) -> None:
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._within_s: list[float] = []  # of each open phase, what phases within it took
        self._began = time.perf_counter()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """The time within counts for ``phase``."""
        began = time.perf_counter()
        self._within_s.append(0.0)
        try:
            yield
        finally:
            if device_type() != "cpu":
                torch.accelerator.synchronize()
            took = time.perf_counter() - began
            self._spent_s[phase] += took - self._within_s.pop()
            if self._within_s:
                self._within_s[-1] += took

    def take(self) -> dict[str, float]:
        """``timing_s/<phase>`` since the last call, and ``timing_s/step``: all of the time since then."""
        now = time.perf_counter()
        spent = {f"timing_s/{phase}": seconds for phase, seconds in self._spent_s.items()}
        spent["timing_s/step"] = now - self._began
        self._began = now
        self._spent_s.clear()
        return spent
