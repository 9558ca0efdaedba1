"""The protocol of rollout engines: prompts in, tokens out, weights renewed, memory given back.

An adapter subclasses ``Engine`` and writes the hooks (the methods with an underscore); the public methods, which are
here, check the state first (``states.py``) and keep it. Log-probabilities are of one kind everywhere: of the sampled
token, in the model's own distribution, before temperature, top-k and top-p.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from moesaic.engines.states import TAGS, EngineState, EngineStateError, Tag
from moesaic.reshard.layout import Shape, TargetLayout

if TYPE_CHECKING:
    from moesaic.reshard.run import Sink
    from moesaic.reshard.transfers import ReshardPlan

FinishReason = Literal["stop", "length", "aborted"]
PauseMode = Literal["drain", "keep"]
# Keys of a model's files, with shapes and dtypes.
Sources = Mapping[str, tuple[Shape, torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_tokens: per completion, at most.
        temperature: the logits are divided by it; 0: the likeliest token always.
        top_p: of the tokens, likeliest first, only as many as it takes to reach this probability (after temperature
            and top_k).
        top_k: only so many of the likeliest; 0: all.
        stop_token_ids: each ends a completion, and is its last token. The model's own end of text counts only where
            it is listed.
        n: completions per prompt.
        seed: the same seed, prompts and weights give the same tokens (see the engine on batches); None: others on
            each call. Of several, one for each prompt: what comes of a prompt doesn't depend on its place in the call.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (all tokens)"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("n", self.n >= 1, "at least 1"),
            ("seed", all(0 <= seed < 2**63 for seed in _seeds_of(self.seed)), "None, or 0 to 2**63 - 1 each"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids, none negative"),
        )
        values = {name: getattr(self, name) for name, _, _ in rules}
        problems = [f"{name}={values[name]!r}: {rule}" for name, is_met, rule in rules if not is_met]
        if problems:
            raise ValueError(f"{'; '.join(problems)}.")

    def seed_of(self, prompt: int) -> int | None:
        """Of the call's prompt with this index; without a seed for each, the call's."""
        return self.seed[prompt] if isinstance(self.seed, tuple) else self.seed


def _seeds_of(seed: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return seed if isinstance(seed, tuple) else () if seed is None else (seed,)


def derive_seed(*key: int) -> int:
    """A seed that no other key of as many numbers (none negative) shares; 0 to 2**63 - 1."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def noise_keys(seed: int | tuple[int, ...], num_prompts: int) -> list[tuple[int, ...]]:
    """What the noise of each prompt's completions comes of, beside the completion's index. With one seed for all, the
    prompt's index is part of it: else equal prompts would have equal completions."""
    return [(each,) for each in seed] if isinstance(seed, tuple) else [(seed, index) for index in range(num_prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer to one prompt.

    Attributes:
        tokens: with the stop token, where one ended it.
        logprobs: natural logarithm, fp32, one per token: of this token in the model's own (raw) distribution.
        finish_reason: ``stop``: by a stop token; ``length``: by ``max_tokens`` or the engine's longest sequence;
            ``aborted``: by the engine.
        weight_version: of the weights that made it; of its first token, where ``pause("keep")`` let it go on after an
            update.
        routed_experts: int32 ``[P + T - 1, layers, K]``, P the prompt's tokens and T ``tokens``: for each position
            that went through the model (the last token didn't), each MoE layer in the model's order, the experts
            chosen. None where the engine doesn't give them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    routed_experts: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a process with engine ranks in it needs to know to take part in planned transfers; plain values.

    Attributes:
        plan: of all ranks of trainer and engines.
        processes: for each rank of this engine, which process of the plan it is.
        store: (host, port) of the TCPStore through which all ``num_processes`` processes connect, under ``prefix``,
            which no other connection uses.
        timeout_s: for the connection and for each transfer.
        verify_checksum: both sides compute and compare checksums.
    """

    plan: ReshardPlan
    processes: tuple[int, ...]
    num_processes: int
    store: tuple[str, int]
    prefix: str
    timeout_s: float
    verify_checksum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """What an engine is doing after ``start_receive``.

    Attributes:
        sink: where this process is to put what arrives, of the engine rank in it; None where the engine's ranks are
            processes of their own, which now run their part of the plan.
        wait: returns when those have everything; raises what went wrong there, or TimeoutError after the seconds given.
    """

    sink: Sink | None
    wait: Callable[[float], None]


class RanksApart(RuntimeError):
    """One rank of several that generate together failed in the midst of it, and the others wait for it there: nothing
    can be agreed with them any more. Only the end of this rank's process frees them."""


class Engine(ABC):
    """A rollout engine: in this process, or elsewhere with this object as its client.

    Thread-safe: ``generate`` may be called from several threads (and is refused, not delayed, while paused). Every
    method blocks until done.

    Args:
        version: of the weights that the engine starts with.
        drain_timeout_s: how long ``pause("drain")`` waits for calls of ``generate``.

    Attributes:
        names: whose names ``target_layouts`` has as sources: of the model's files (``files``), or of the trained
            model's tensors (``model``).
        in_process: the engine's rank lives in this object's own process.
    """

    names: Literal["files", "model"] = "files"
    in_process: bool = False

    def __init__(self, *, version: int = 0, drain_timeout_s: float = 600.0) -> None:
        self._state = EngineState(version=version)
        self._changed = threading.Condition(threading.RLock())
        self._drain_timeout_s = drain_timeout_s

    # ---------------------------------------------------------------------------------------------------- generation

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """``sampling.n`` completions for each prompt of token ids, in order.

        Raises:
            EngineStateError: the engine is paused, asleep, broken or closed.
            ValueError: no prompt, or an empty one; or several seeds, and not one for each prompt.
            RanksApart: see there.
        """
        require_tokens(prompts)
        if isinstance(sampling.seed, tuple) and len(sampling.seed) != len(prompts):
            raise ValueError(
                f"{len(sampling.seed)} seeds for {len(prompts)} prompts: give one for each, or one in all."
            )
        with self._changed:
            self._state = self._state.generate()
        try:
            return self._generate(prompts, sampling)
        finally:
            with self._changed:
                self._state = self._state.generated()
                self._changed.notify_all()

    def salvage(self) -> list[list[Completion]]:
        """What the last call of ``generate`` had made when it raised, as that would have returned it: what was not done
        is ``aborted``. Empty where the engine doesn't know, or nothing was begun."""
        return []

    def pause(self, mode: PauseMode = "drain") -> None:
        """Take nothing on any more; ``drain``: return when nothing is in flight, ``keep``: what is, stands still.

        Raises:
            TimeoutError: what is in flight didn't end in time; the engine runs on.
            ValueError: the engine can't keep what is in flight.
        """
        if mode not in ("drain", "keep"):
            raise ValueError(f"mode={mode!r}: drain or keep.")
        with self._changed:
            before, self._state = self._state, self._state.pause()
            try:
                # Before the hook: what this process has taken on, but not yet sent, must not meet a paused server.
                if mode == "drain" and not self._changed.wait_for(
                    lambda: not self._state.num_in_flight, self._drain_timeout_s
                ):
                    count = self._state.num_in_flight
                    raise TimeoutError(f"{count} calls of generate in flight after {self._drain_timeout_s:g} s")
                self._pause(mode)
            except BaseException:
                self._state = replace(before, num_in_flight=self._state.num_in_flight)
                raise

    def resume(self) -> None:
        """Go on after ``pause``. A broken engine still answers nothing, nor does a server any other client of its."""
        with self._step(EngineState.resume):
            if not self._state.broken:
                self._resume()

    # ------------------------------------------------------------------------------------------------------- weights

    @abstractmethod
    def target_layouts(self) -> tuple[TargetLayout, ...]:
        """Where new weights go: one layout for each engine rank that this object speaks for. Sources named as ``names``
        says. The same objects on each call."""

    def begin_update(self) -> None:
        """New weights are about to come; from here to ``set_version`` a failure leaves the engine broken."""
        with self._step(EngineState.begin_update, breaks=True):
            self._begin_update()

    def receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Streaming: take some whole tensors, under the keys of the model's files. Called for each bucket; the tensors
        may be reused by the caller once this returns."""
        with self._step(EngineState.receive, breaks=True):
            self._receive(bucket)

    def start_receive(self, offer: Offer) -> Receiving:
        """Planned transfers: get ready for them. Returns without waiting for any."""
        with self._step(EngineState.receive, breaks=True):
            return self._start_receive(offer)

    def end_update(self) -> None:
        """All new weights are there: check that none is missing, convert them to the engine's own formats."""
        with self._step(EngineState.end_update, breaks=True):
            self._end_update()

    def reset_caches(self) -> None:
        """Forget all keys and values (prefix caches too), so that nothing is made from those of other weights."""
        with self._step(EngineState.reset_caches, breaks=self._state.phase == "loaded"):
            self._reset_caches()

    def set_version(self, version: int) -> None:
        """The update is valid on all ranks: what is generated from now on is of ``version``."""
        with self._step(lambda state: state.set_version(version), breaks=True):
            self._set_version(version)

    def fail(self, reason: str) -> None:
        """An update failed, here or on another rank: the engine is broken until a whole one has succeeded. Raises
        nothing, so that all engines of a sync are told, and what went wrong first is what is heard of."""
        with self._changed:
            is_midway = self._state.phase in ("updating", "loaded", "cleared")
            self._state = self._state.fail(reason)
            if is_midway:
                try:
                    self._abort_update()
                except Exception as error:
                    text = f"{reason}; and it could not be aborted: {type(error).__name__}: {error}"
                    self._state = self._state.fail(text)

    # -------------------------------------------------------------------------------------------------------- memory

    def sleep(self, level: int = 1) -> None:
        """Give memory back: keys and values; the weights to the host (1), or altogether (2: an update must follow)."""
        with self._step(lambda state: state.sleep(level), breaks=True):
            self._sleep(level)

    def wake(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Take memory again, for what ``tags`` name; what is awake stays so."""
        with self._changed:
            missing = tuple(tag for tag in TAGS if tag in tags and tag in self._state.asleep)
            with self._step(lambda state: state.wake(tags), breaks=True):
                if missing:
                    self._wake(missing)

    # --------------------------------------------------------------------------------------------------------- state

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._state

    @property
    def version(self) -> int:
        """Of the weights; a broken engine still names the last that were whole."""
        return self._state.version

    @property
    def drain_timeout_s(self) -> float:
        """How long ``pause("drain")`` takes at most."""
        return self._drain_timeout_s

    def health(self) -> None:
        """Return where the engine can do its work once it is awake and running.

        Raises:
            RuntimeError: it is closed, broken, or doesn't answer; with why.
        """
        if self._state.is_closed or self._state.broken:
            raise EngineStateError(f"the engine is {self._state.text}")
        self._health()

    def close(self) -> None:
        """End it, and give everything back. A second call does nothing."""
        with self._changed:
            is_closed, self._state = self._state.is_closed, self._state.close()
        if not is_closed:
            self._close()

    @contextmanager
    def _step(self, after: Callable[[EngineState], EngineState], *, breaks: bool = False) -> Iterator[None]:
        """Refuse what the state doesn't allow; move on once the hook has returned. ``breaks``: its failure is grave."""
        with self._changed:
            after(self._state)
            try:
                yield
            except BaseException as error:
                if breaks:
                    self.fail(f"{type(error).__name__}: {error}")
                raise
            self._state = after(self._state)

    # --------------------------------------------------------------------------------------- hooks, for the adapters

    @abstractmethod
    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]: ...

    def _pause(self, mode: PauseMode) -> None:  # noqa: B027  (these have nothing to do in some engines)
        """In mode ``drain`` all calls of ``generate`` have returned. Where it raises, the engine must run on."""

    def _resume(self) -> None: ...  # noqa: B027

    @abstractmethod
    def _begin_update(self) -> None: ...

    @abstractmethod
    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _start_receive(self, offer: Offer) -> Receiving: ...

    @abstractmethod
    def _end_update(self) -> None: ...

    def _set_version(self, version: int) -> None: ...  # noqa: B027

    def _abort_update(self) -> None:  # noqa: B027
        """After a failure between ``begin_update`` and ``set_version``; ``begin_update`` must be possible again."""

    @abstractmethod
    def _reset_caches(self) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake(self, tags: tuple[Tag, ...]) -> None: ...

    def _health(self) -> None: ...  # noqa: B027

    def _close(self) -> None: ...  # noqa: B027


def require_tokens(prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError where there is no prompt, or an empty one."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts: {len(prompts)} of them, each at least one token; drop the empty ones.")
