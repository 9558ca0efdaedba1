"""SGLang as a rollout engine: a server, started here or running somewhere already.

    engine = SglangServer.start(SglangOptions(model="ckpt", tp_size=2), sources, log=Path("sglang.log"))
    engine.generate([[1, 2, 3]], Sampling(max_tokens=16))

Weights come as a stream of whole tensors (``engines.transfer.StreamedTransfer``), experts one by one, in one of three
ways (``sglang_weights.py``). Planned transfers need code of ours in its workers, which SGLang has no place for.

What its version 0.5.23 was found to do: stacked experts are dropped by most of its models, with success as the answer,
so they are refused here; tensors outside of an update, or a failed load, are an answer and no exception, which here is
one. Where stop tokens are given it also stops at the model's own end of text: a completion that did goes on from there.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from moesaic.engines.base import (
    Completion,
    Engine,
    Offer,
    PauseMode,
    Receiving,
    Sampling,
    Sources,
    derive_seed,
    noise_keys,
)
from moesaic.engines.server import INCOMPLETE, Routes, ServerError, ServerProcess, require_ok
from moesaic.engines.sglang_requests import Draft, RoutedLayers, decode_experts, sampling_values
from moesaic.engines.sglang_server import ServerFacts, SglangOptions, read_facts
from moesaic.engines.sglang_weights import BodyCarrier, Carrier, FolderCarrier, GroupCarrier
from moesaic.engines.states import Tag
from moesaic.reshard.layout import TargetLayout

Way = Literal["group", "body", "folder"]
HEALTH_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 10.0
# Log-probabilities of one token at these temperatures differ by far more than rounding, unless they are raw.
PROBE_TEMPERATURES = (1.0, 0.05)
PROBE_TOLERANCE = 1e-3
STACKED = re.compile(r"(^|\.)experts\.(?!\d+\.)")
# Of the models of SGLang 0.5.23, those whose loader takes stacked experts.
TAKE_STACKED = ("gpt_oss", "gemma4", "llama4", "qwen3_5_moe", "qwen3_vl_moe")


class SglangServer(Engine):
    """An SGLang server, over HTTP. This object speaks for all of its workers; it lives in one process of the trainer.

    Args:
        routes: where it listens.
        sources: keys of the model's files, with shapes and dtypes, experts one by one (``weights.export.find_layout``
            and, where they are stacked there, ``weights.expert_names.name_experts``).
        process: the server itself, where it is this object's to end.
        way: in which weights come: ``group``, ``body`` or ``folder``.
        folder: for the way of that name: one that this process and the server see under the same name.
        routed: for ``Completion.routed_experts``; the server must have been started with them.
        store_host: name or address of this machine, as the workers reach it.
        timeout_s: for the workers to connect, and for each bucket sent to them.
        version: of its weights; None: what the server says, 0 where nobody told it.

    Raises:
        ServerError: the server doesn't answer, or its log-probabilities aren't raw.
        ValueError: stacked experts; parallelism that SGLang can't update; routed experts from a server without them.
    """

    def __init__(
        self,
        routes: Routes,
        sources: Sources,
        *,
        process: ServerProcess | None = None,
        way: Way = "group",
        folder: Path | None = None,
        routed: RoutedLayers | None = None,
        store_host: str = "127.0.0.1",
        timeout_s: float = 120.0,
        version: int | None = None,
    ) -> None:
        self._routes, self._health_routes = routes, routes.within(HEALTH_TIMEOUT_S)
        self._facts = read_facts(self._health_routes.get("server_info"), self._health_routes.get("model_info"))
        label = self._facts.weight_version
        known = int(label) if label.isdecimal() else 0
        super().__init__(version=known if version is None else version)
        self._process = process
        self._sources = dict(sources)
        self._routed = routed
        self._received: set[str] = set()
        if self._facts.model_type not in TAKE_STACKED:
            require_single_experts(self._sources)
        if routed is not None and not self._facts.has_routed_experts:
            raise ValueError("routed: the server was started without --enable-return-routed-experts; start it so.")
        self._carrier = self._choose_carrier(way, folder, store_host, timeout_s)
        self._is_probed = False
        if label == INCOMPLETE:
            self.fail("its weights are those of an update that was never finished")
            self._abort_update()  # of an earlier client
        else:
            self._require_raw_logprobs()
            if not label.isdecimal() or version is not None:
                self._set_version(self.version)

    @classmethod
    def start(
        cls, options: SglangOptions, sources: Sources, *, log: Path, start_timeout_s: float = 600.0, **others: Any
    ) -> SglangServer:
        """Start a server, wait until it answers, and end it on ``close``.

        Raises:
            ServerError: it ended, or doesn't answer in time; with the end of ``log``.
        """
        process = ServerProcess(options, log, start_timeout_s=start_timeout_s, name="SGLang")
        try:
            routes = Routes(process.url)
            if not options.load_weights:
                routes.post("update_weight_version", {"new_version": INCOMPLETE, "abort_all_requests": False})
            return cls(routes, sources, process=process, **others)
        except BaseException:
            process.close()
            raise

    @classmethod
    def attach(cls, url: str, sources: Sources, **others: Any) -> SglangServer:
        """A server that runs already, with the options of ``SglangOptions.command`` and ``variables``. ``close`` leaves
        it running. Where an update of it wasn't finished, the engine is broken until one has been."""
        return cls(Routes(url), sources, **others)

    @property
    def process(self) -> ServerProcess | None:
        """The server, where this object started it."""
        return self._process

    @property
    def facts(self) -> ServerFacts:
        """What the server was started with."""
        return self._facts

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        """Refused: see the module's docstring."""
        raise ValueError("SGLang takes weights as a stream only; use engines.transfer.StreamedTransfer.")

    def sleep(self, level: int = 1) -> None:
        """See ``Engine``.

        Raises:
            ValueError: the server wasn't started so that it can; the engine goes on.
        """
        if not self._facts.has_sleep:
            raise ValueError("sleep: the server would keep its memory; start it with --enable-memory-saver.")
        if level == 1 and not self._facts.has_host_weights:
            raise ValueError(
                "level=1: the server keeps no weights on the host; start it with --enable-weights-cpu-backup, or use "
                "level 2 and update the weights after it."
            )
        super().sleep(level)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        drafts = self._draft(prompts, sampling)
        pending = drafts
        while pending:
            answers = self._post("generate", self._request(pending, sampling))
            for draft, answer in zip(pending, answers, strict=True):
                draft.take(answer, sampling, self._facts.max_prompt)
            pending = [draft for draft in pending if draft.finish_reason is None]
        done = [self._complete(draft) for draft in drafts]
        return [done[start : start + sampling.n] for start in range(0, len(done), sampling.n)]

    def _draft(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Draft]:
        """Every completion is a request of its own: with one seed, all ``n`` of a request would be the same."""
        is_random = sampling.temperature > 0
        if is_random and sampling.seed is not None and not self._facts.has_seeds:
            raise ValueError(
                f"seed={sampling.seed}: the server ignores seeds; start it with --enable-deterministic-inference."
            )
        # Without a seed of its own, a server that heeds them would take the same for every request.
        base = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        return [
            Draft(
                prompt=list(map(int, prompt)),
                seed=derive_seed(*key, sample) if is_random and self._facts.has_seeds else None,
            )
            for key, prompt in zip(noise_keys(base, len(prompts)), prompts, strict=True)
            for sample in range(sampling.n)
        ]

    def _request(self, drafts: Sequence[Draft], sampling: Sampling) -> dict[str, Any]:
        return {
            "input_ids": [draft.prompt + draft.tokens for draft in drafts],
            "sampling_params": [sampling_values(sampling, len(draft.tokens), draft.seed) for draft in drafts],
            "return_logprob": True,
            "return_routed_experts": self._routed is not None,
        }

    def _complete(self, draft: Draft) -> Completion:
        assert draft.finish_reason is not None
        if draft.version == INCOMPLETE:
            raise ServerError("the server answered from weights of an update that isn't finished: who resumed it?")
        experts = None
        if self._routed is not None and draft.finish_reason != "aborted":
            experts = decode_experts(draft.experts, self._routed, len(draft.prompt) + len(draft.tokens) - 1)
        return Completion(
            tokens=tuple(draft.tokens),
            logprobs=tuple(draft.logprobs),
            finish_reason=draft.finish_reason,
            weight_version=int(draft.version),
            routed_experts=experts,
        )

    def _pause(self, mode: PauseMode) -> None:
        self._stand_still()

    def _stand_still(self) -> None:
        # Requests go back to the queue and are computed again when they go on; "in_place" would keep their keys and
        # values, and the caches couldn't be cleared.
        self._post("pause_generation", {"mode": "retract"})

    def _resume(self) -> None:
        if not self._state.asleep:  # else once it is awake
            self._continue()

    def _continue(self) -> None:
        self._post("continue_generation")
        if not self._is_probed:  # it was paused, or without weights
            self._require_raw_logprobs()

    def _begin_update(self) -> None:
        self._received = set()
        self._label(INCOMPLETE)
        self._carrier.begin()

    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        tensors = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
        for name, tensor in tensors:
            if name not in self._sources:
                hint = "; experts must come one by one" if STACKED.search(name) else ""
                raise ValueError(f"{name}: not one of the sources that this engine was made with{hint}.")
            shape = tuple(self._sources[name][0])
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)} came, the model's is {shape}.")
            if name in self._received:
                raise ValueError(f"{name} came twice in one update.")
            self._received.add(name)
        self._carrier.send(tensors)

    def _start_receive(self, offer: Offer) -> Receiving:
        raise ValueError("SGLang takes weights as a stream only; use engines.transfer.StreamedTransfer.")

    def _end_update(self) -> None:
        missing = sorted(self._sources.keys() - self._received)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{missing[0]}{more} didn't come, and the engine would go on with old values.")
        self._carrier.end()

    def _abort_update(self) -> None:
        try:
            self._carrier.abort()
        except ServerError as error:
            # The failure that led here is what is reported; a server that is gone has nothing to abort.
            if self._process is not None:
                with self._process.log.open("a") as log:
                    log.write(f"\nmoesaic: abort: {error}\n")

    def _set_version(self, version: int) -> None:
        self._label(str(version))

    def _label(self, version: str) -> None:
        # Unless told, this route aborts all requests.
        self._post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _reset_caches(self) -> None:
        # With a time to wait, it waits for queued requests too, which don't move while it is paused.
        self._post("flush_cache", timeout=FLUSH_TIMEOUT_S if self._state.phase == "running" else 0)

    def _sleep(self, level: int) -> None:
        # A server with requests in it ends itself when its memory is taken; others may have sent some.
        self._stand_still()
        self._post("release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def _wake(self, tags: tuple[Tag, ...]) -> None:
        self._post("resume_memory_occupation", {"tags": list(tags)})
        if self._state.phase == "running" and not self._state.broken and not self._state.asleep - set(tags):
            self._continue()

    def _health(self) -> None:
        if self._process is not None:
            self._process.require_alive()
        # Not /health: it generates a token, and while the server is paused it waits, fails and is remembered.
        self._health_routes.get("server_info")

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        else:
            self._abort_update()

    def _choose_carrier(self, way: Way, folder: Path | None, store_host: str, timeout_s: float) -> Carrier:
        if way == "group":
            return GroupCarrier(self._post, self._facts.tp_size, store_host=store_host, timeout_s=timeout_s)
        if way == "body":
            return BodyCarrier(self._post, self._facts.tp_size)
        if way == "folder":
            if folder is None:
                raise ValueError("way='folder': give folder, one that the server sees under the same name.")
            return FolderCarrier(self._post, folder)
        raise ValueError(f"way={way!r}: group, body or folder.")

    def _require_raw_logprobs(self) -> None:
        """One token, likeliest, at two temperatures."""
        probes = [
            {"max_new_tokens": 1, "temperature": each, "top_k": 1, "ignore_eos": True} for each in PROBE_TEMPERATURES
        ]
        body = {"input_ids": [[0]] * len(probes), "sampling_params": probes, "return_logprob": True}
        answers = self._health_routes.post("generate", body)
        first, second = (answer["meta_info"]["output_token_logprobs"][0][0] for answer in answers)
        if not abs(first - second) < PROBE_TOLERANCE:
            raise ServerError(
                f"the server's log-probabilities depend on the temperature ({first:.4f}, {second:.4f}); start it with "
                "SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment."
            )
        self._is_probed = True

    def _post(self, route: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        try:
            answer = self._routes.post(route, body, **query)
        except ServerError:
            if self._process is not None:
                self._process.require_alive()  # its end says more than that it doesn't answer
            raise
        require_ok(answer, f"/{route} failed")
        return answer


def require_single_experts(names: Iterable[str]) -> None:
    """Raise where experts are stacked: SGLang's loaders drop them and say that all is well.

    Raises:
        ValueError: with the first of them.
    """
    stacked = [name for name in names if STACKED.search(name)]
    if stacked:
        raise ValueError(
            f"{stacked[0]} and {len(stacked) - 1} more: stacked experts, which SGLang would drop without a word. Name "
            "experts one by one: weights.expert_names.name_experts(..., 'per_expert') for the sources, "
            "experts='per_expert' for the stream."
        )
