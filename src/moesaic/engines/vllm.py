"""vLLM as a rollout engine: a server (started here, or somewhere already), or in this process.

    engine = VllmServer.start(ServerOptions(model="ckpt", tp_size=2), sources, log=Path("vllm.log"))
    engine.generate([[1, 2, 3]], Sampling(max_tokens=16))

Weights come by either way of ``engines.sync``. Planned: each worker is a process of the plan, and receives its own
shards from the trainers. Streaming: whole tensors go to this object, and from here to each worker.

What its version 0.32 was found to do: log-probabilities are raw; one seed makes one sequence of draws for each prompt,
whatever else runs; which experts a token went to is returned by its runner V2 only, which refuses to start without
triton, and so on a CPU.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.engines.base import Completion, Engine, FinishReason, Offer, PauseMode, Receiving, Sampling, Sources
from moesaic.engines.server import INCOMPLETE, Routes, ServerError, ServerProcess, require_ok
from moesaic.engines.states import Tag
from moesaic.engines.vllm_layout import require_all_used
from moesaic.engines.vllm_messages import Task, put_pickled
from moesaic.engines.vllm_server import ServerOptions
from moesaic.reshard.connect import connect_transport
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.transports import GlooTransport

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
# Requests under way at once; vLLM runs as many as ``max_num_seqs`` and queues the others.
NUM_THREADS = 64
NUM_UPDATE_THREADS = 4  # one is enough until a server hangs
HEALTH_TIMEOUT_S = 20.0


class VllmServer(Engine):
    """A vLLM server, over HTTP. This object speaks for all of its workers; it lives in one process of the trainer.

    Args:
        routes: where it listens.
        process: the server itself, where it is this object's to end.
        sources: keys of the model's files, with shapes and dtypes (``describe_files``); without them the engine
            generates, but its weights can't be updated.
        store_host: name or address of this machine, as the workers reach it.
        timeout_s: for the workers to connect, for what is sent to them, and for each step of an update; what takes
            longer (generation, tracing the loader) has the time of ``routes``.
        version: of its weights; None: what the server says, 0 where nobody told it.
    """

    in_process = False

    def __init__(
        self,
        routes: Routes,
        sources: Sources | None = None,
        *,
        process: ServerProcess | None = None,
        store_host: str = "127.0.0.1",
        timeout_s: float = 120.0,
        drain_timeout_s: float = 600.0,
        version: int | None = None,
    ) -> None:
        self._routes, self._control = routes, routes.within(timeout_s)
        label = self._control.get("weight_info")["weight_version"]
        known = int(label) if label.isdecimal() else 0
        super().__init__(version=known if version is None else version, drain_timeout_s=drain_timeout_s)
        self._process = process
        self._sources = dict(sources or {})
        self._store_host = store_host
        self._timeout_s = timeout_s
        self._store: dist.TCPStore | None = None
        self._layouts: tuple[TargetLayout, ...] = ()
        self._pause_mode: PauseMode = "drain"
        self._fingerprint = ""  # of the plan that the workers have
        self._num_offers = self._num_connections = 0
        self._stream: GlooTransport | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="vllm")
        # Another than those of requests: these may all stand still during an update.
        self._update_threads = ThreadPoolExecutor(NUM_UPDATE_THREADS, thread_name_prefix="vllm-update")
        if label == INCOMPLETE:
            self.fail("its weights are those of an update that was never finished")
        elif not label.isdecimal() or version is not None:
            self._set_version(self.version)

    @classmethod
    def start(
        cls,
        options: ServerOptions,
        sources: Sources | None = None,
        *,
        log: Path,
        start_timeout_s: float = 600.0,
        request_timeout_s: float = 3600.0,
        **others: Any,
    ) -> VllmServer:
        """Start a server, wait until it answers, and end it on ``close``. ``request_timeout_s``: for one request, from
        its turn in the server's queue to its last token.

        Raises:
            ServerError: it ended, or doesn't answer in time; with the end of ``log``.
        """
        process = ServerProcess(options, log, start_timeout_s=start_timeout_s, name="vLLM")
        try:
            routes = Routes(process.url, timeout_s=request_timeout_s)
            if not options.load_weights:
                routes.post("update_weight_version", {"new_version": INCOMPLETE})
            return cls(routes, sources, process=process, **others)
        except BaseException:
            process.close()
            raise

    @classmethod
    def attach(
        cls, url: str, sources: Sources | None = None, *, request_timeout_s: float = 3600.0, **others: Any
    ) -> VllmServer:
        """A server that runs already, with the options of ``ServerOptions.command`` and ``variables``. ``close`` leaves
        it running. Where an update of it wasn't finished, the engine is broken until one has been."""
        return cls(Routes(url, timeout_s=request_timeout_s), sources, **others)

    @property
    def process(self) -> ServerProcess | None:
        """The server, where this object started it."""
        return self._process

    @property
    def drain_timeout_s(self) -> float:
        """Twice: for this object's own requests, then for the server's others."""
        return 2 * self._drain_timeout_s

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        """Of all workers, in their order, traced by themselves on the first call."""
        if not self._layouts:
            if not self._sources:
                raise ValueError("sources: none were given, and without the files' keys no loader can be traced.")
            prefix = "moesaic"
            self._store = dist.TCPStore(
                self._store_host,
                0,
                is_master=True,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
            put_pickled(self._store, f"{prefix}/sources", self._sources)
            contact = {
                "host": self._store_host,
                "port": self._store.port,
                "prefix": prefix,
                "timeout_s": self._timeout_s,
            }
            self._call_workers("moesaic_abort_update")  # of an earlier client
            self._post("init_weight_transfer_engine", {"init_info": contact}, self._routes)
            num_workers = int(self._control.get("get_world_size")["world_size"])
            layouts = [pickle.loads(self._store.get(f"{prefix}/layout/{index}")) for index in range(num_workers)]
            require_all_used(layouts, self._sources)
            # Replicas (dp) have equal layouts: one object for them, which makes planning cheap.
            self._layouts = tuple({layout: layout for layout in layouts}[layout] for layout in layouts)
        return self._layouts

    def worker_bytes(self) -> list[int]:
        """Bytes that each worker received in the last planned update, as counted by it."""
        reports = sorted(self._call_workers("moesaic_report"), key=lambda report: report["index"])
        return [report["num_bytes_received"] for report in reports]

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        # vLLM refuses n > 1 where it is greedy, so that each such completion is a request of its own.
        num_each, n = (sampling.n, 1) if sampling.temperature == 0 else (1, sampling.n)
        values = sampling_values(sampling) | {"n": n}
        requests = [
            {"token_ids": list(map(int, prompt)), "sampling_params": values | {"seed": sampling.seed_of(index)}}
            for index, prompt in enumerate(prompts)
            for _ in range(num_each)
        ]
        post = partial(self._post, "inference/v1/generate", routes=self._routes)
        answers = list(self._threads.map(post, requests))
        choices = [
            [self._completion(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
            for answer in answers
        ]
        return [sum(choices[start : start + num_each], []) for start in range(0, len(choices), num_each)]

    def _completion(self, choice: Mapping[str, Any]) -> Completion:
        tokens = choice["token_ids"] or ()
        spans = choice.get("weight_versions") or ()
        if any(span["version"] == INCOMPLETE for span in spans):
            raise ServerError("the server answered from weights of an update that isn't finished: who resumed it?")
        experts = choice.get("routed_experts")
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(entry["logprob"] for entry in choice["logprobs"]["content"] or ()),
            finish_reason=FINISH_REASONS[choice["finish_reason"]],
            weight_version=int(spans[0]["version"]) if spans else self.version,
            routed_experts=None if experts is None else decode_experts(experts),
        )

    def _pause(self, mode: PauseMode) -> None:
        self._pause_mode = mode
        try:
            if mode == "drain":  # the requests of others too
                self._post("pause", routes=self._routes.within(self._drain_timeout_s), mode="wait", clear_cache=False)
            else:
                self._post("pause", mode="keep", clear_cache=False)
        except ServerError:
            with suppress(ServerError):  # it may be paused all the same, e.g. where the answer came too late
                self._resume()
            raise

    def _resume(self) -> None:
        self._post("resume")

    def _begin_update(self) -> None:
        self.target_layouts()
        self._post("update_weight_version", {"new_version": INCOMPLETE})
        self._post("start_weight_update")

    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        is_new = self._stream is None
        self._num_connections += is_new
        name = f"moesaic/stream/{self._num_connections}"
        info = {
            "mode": "stream",
            "key": name,
            "names": [name for name, _ in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        }
        answer = self._submit_update(info)
        num_workers = len(self._layouts)
        try:
            if self._stream is None:
                assert self._store is not None, "begin_update made it"
                device = bucket[0][1].device
                self._stream = connect_transport(self._store, 0, 1 + num_workers, device, self._timeout_s, name=name)
                self._stream.prepare(range(1 + num_workers))
            for number, (_, tensor) in enumerate(bucket):
                if tensor.numel():
                    data = tensor.detach().to(self._stream.device).contiguous().view(-1).view(torch.uint8)
                    for work in [self._stream.start_send(data, 1 + index, number) for index in range(num_workers)]:
                        work.wait()
        except Exception as error:
            raise self._reason(answer) or error from error
        answer.result(self._timeout_s)

    def _start_receive(self, offer: Offer) -> Receiving:
        store = self._store
        assert store is not None, "begin_update made it"
        self._num_offers += 1
        key, plan_key = f"moesaic/offer/{self._num_offers}", "moesaic/plan"
        task = Task(
            fingerprint=offer.plan.fingerprint,
            plan_key=plan_key,
            processes=offer.processes,
            num_processes=offer.num_processes,
            store=offer.store,
            prefix=offer.prefix,
            timeout_s=offer.timeout_s,
            verify_checksum=offer.verify_checksum,
        )
        put_pickled(store, key, task)
        if offer.plan.fingerprint != self._fingerprint:
            put_pickled(store, plan_key, offer.plan)
        self._fingerprint = ""  # until they have said that they have it
        answer = self._submit_update({"mode": "planned", "key": key})

        def wait(timeout_s: float) -> None:
            answer.result(timeout_s)
            self._fingerprint = offer.plan.fingerprint
            for each in (key, plan_key):
                store.delete_key(each)

        return Receiving(sink=None, wait=wait)

    def _submit_update(self, info: Mapping[str, Any]) -> Future[Any]:
        body = {"update_info": info}
        return self._update_threads.submit(self._post, "update_weights", body, self._routes)

    def _end_update(self) -> None:
        self._post("finish_weight_update")

    def _abort_update(self) -> None:
        self._drop_stream()
        self._fingerprint = ""
        try:
            self._call_workers("moesaic_abort_update")
        except ServerError as error:
            # The failure that led here is what is reported; a server that is gone has nothing to abort.
            if self._process is not None:
                with self._process.log.open("a") as log:
                    log.write(f"\nmoesaic: abort: {error}\n")

    def _set_version(self, version: int) -> None:
        self._post("update_weight_version", {"new_version": str(version)})

    def _reset_caches(self) -> None:
        # Requests that stand still hold blocks: they are computed again, with the new weights.
        preempts = "true" if self._pause_mode == "keep" else "false"
        answer = self._post("reset_prefix_cache", reset_running_requests=preempts)
        require_ok(answer, "the prefix cache wasn't reset")

    def _sleep(self, level: int) -> None:
        self._post("sleep", level=level)

    def _wake(self, tags: tuple[Tag, ...]) -> None:
        self._post("wake_up", tags=list(tags))
        if self._state.phase == "paused" or self._state.broken:
            # vLLM goes on by itself once all is awake.
            self._post("pause", mode="keep", clear_cache=False)

    def _health(self) -> None:
        if self._process is not None:
            self._process.require_alive()
        self._routes.within(HEALTH_TIMEOUT_S).get("health")

    def _close(self) -> None:
        self._drop_stream()
        if self._process is not None:
            self._process.close()
        for pool in (self._threads, self._update_threads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _post(
        self, route: str, body: Mapping[str, Any] | None = None, routes: Routes | None = None, **query: object
    ) -> Any:
        try:
            return (routes or self._control).post(route, body, **query)
        except ServerError:
            if self._process is not None:
                self._process.require_alive()  # its end says more than that it doesn't answer
            raise

    def _call_workers(self, method: str) -> list[Any]:
        """A method of ``WorkerExtension`` on all workers, and what they return."""
        answer = self._control.post("collective_rpc", {"method": method})
        return list(answer["results"]) if answer else []

    def _reason(self, answer: Future[Any]) -> BaseException | None:
        """Why the workers failed, where they say so soon: better than that a connection broke."""
        try:
            return answer.exception(5.0)
        except TimeoutError:
            return None


def sampling_values(sampling: Sampling) -> dict[str, Any]:
    """vLLM's sampling parameters, all that could come from elsewhere written out, but for each prompt's ``seed``.
    Log-probabilities: of the sampled token alone, raw by ``--logprobs-mode``."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "n": sampling.n,
        "logprobs": 0,
        "detokenize": False,
    }


def decode_experts(text: str) -> Tensor:
    """Routed experts as the server writes them, base64 of a ``.npy`` file; see ``read_experts``."""
    return read_experts(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


def read_experts(values: np.ndarray[Any, Any]) -> Tensor:
    """Routed experts as vLLM gives them, uint8 to int32, as ``Completion.routed_experts``."""
    return torch.from_numpy(values.astype(np.int32))
