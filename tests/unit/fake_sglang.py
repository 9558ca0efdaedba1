"""An HTTP server with the routes, fields and refusals of SGLang 0.5.23, and one worker in place of a scheduler.

Its model: after token t comes t + 1 (modulo ``VOCAB``); the log-probability of token t is -t / 10.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

VOCAB = 50
OWN_END = 9  # the model's own end of text
NUM_LAYERS, TOP_K = 3, 2
Answer = tuple[int, Any]


class FakeSglang:
    """``info``: of ``/server_info``; ``fails``: route -> message, refused as SGLang does; ``calls``: what came."""

    def __init__(self, **info: Any) -> None:
        self.info = {
            "version": "0.5.23",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "max_req_input_len": 100,
            "enable_deterministic_inference": False,
            "enable_return_routed_experts": False,
            "enable_memory_saver": False,
            "enable_weights_cpu_backup": False,
            **info,
        }
        self.model_type = "qwen3_moe"
        self.has_raw_logprobs = True
        self.weights: dict[str, Tensor] = {}
        self.fails: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.may_generate = threading.Event()
        self.may_generate.set()
        self.asleep: set[str] = set()
        self.version = "default"
        self.has_session = False
        self._groups: dict[str, Any] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                status, content = fake.answer(url.path[1:], body, query)
                is_text = isinstance(content, str)
                data = (content if is_text else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if is_text else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.may_generate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def names(self) -> list[str]:
        """The routes of the calls, in order; not those that only ask."""
        return [route for route, _ in self.calls if not route.endswith("_info")]

    def answer(self, route: str, body: dict[str, Any], query: dict[str, str]) -> Answer:
        self.calls.append((route, {**body, **query}))
        if route in self.fails:
            return 400, {"success": False, "message": self.fails[route]}
        handle: Callable[..., Answer] | None = vars(type(self)).get(f"_{route}")
        if handle is None:
            return 404, {"object": "error", "message": "Not Found", "type": "404", "param": None, "code": 404}
        return handle(self, **body, **query)

    def _server_info(self) -> Answer:
        return 200, self.info

    def _model_info(self) -> Answer:
        return 200, {"model_path": "ckpt", "weight_version": self.version, "model_type": self.model_type}

    # ---------------------------------------------------------------------------------------------------- generation

    def _generate(
        self,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, Any]],
        return_logprob: bool,
        return_routed_experts: bool = False,
    ) -> Answer:
        assert return_logprob
        self.may_generate.wait()
        if any(len(each) > self.info["max_req_input_len"] for each in input_ids):
            return 400, {"error": {"message": "The input is longer than the model's context length"}}
        return 200, [
            self._complete(prompt, params, return_routed_experts)
            for prompt, params in zip(input_ids, sampling_params, strict=True)
        ]

    def _complete(self, prompt: list[int], params: dict[str, Any], with_experts: bool) -> dict[str, Any]:
        tokens: list[int] = []
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        stops = set() if params["ignore_eos"] else {OWN_END, *params["stop_token_ids"]}
        room = self.info["max_req_input_len"] + 6 - len(prompt)
        while len(tokens) < min(params["max_new_tokens"], room):
            tokens.append(((tokens or prompt)[-1] + 1) % VOCAB)
            if tokens[-1] in stops:
                reason = {"type": "stop", "matched": tokens[-1]}
                break
        scale = 1.0 if self.has_raw_logprobs else params["temperature"]
        meta = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-token / 10 / scale - (scale != 1), token, None] for token in tokens],
        }
        if with_experts:
            shape = (len(prompt) + len(tokens) - 1, NUM_LAYERS, TOP_K)
            values = np.arange(np.prod(shape), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(values.tobytes()).decode()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _pause_generation(self, mode: str = "abort") -> Answer:
        self.may_generate.clear()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self) -> Answer:
        self.may_generate.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush_cache(self, timeout: str = "0") -> Answer:
        return 200, "Cache flushed.\nPlease check backend logs for more details.\n"

    # ------------------------------------------------------------------------------------------------------- weights

    def _begin_weight_update(self, selector: str = "all") -> Answer:
        if self.has_session:
            message = "a weight-update session is already open; call end_weight_update() first"
            return 400, {"success": False, "message": message}
        self.has_session = True
        return 200, {"success": True, "message": "Success"}

    def _end_weight_update(self) -> Answer:
        if not self.has_session:
            message = "no weight-update session is open; call begin_weight_update() first"
            return 400, {"success": False, "message": message}
        self.has_session = False
        return 200, {"success": True, "message": "Success"}

    def _init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Answer:
        """As a worker of tp rank 0: through torch's own rendezvous and groups."""
        c10d: Any = dist.distributed_c10d
        url, rank, timeout = f"tcp://{master_address}:{master_port}", rank_offset, timedelta(seconds=20)
        store, rank, world_size = next(c10d.rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(group_name, store),
            group_name=group_name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
        self._groups[group_name] = group
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def _destroy_weights_update_group(self, group_name: str) -> Answer:
        if group_name not in self._groups:
            return 400, {"success": False, "message": "The group to be destroyed does not exist."}
        dist.destroy_process_group(self._groups.pop(group_name))
        return 200, {"success": True, "message": "Succeeded to destroy custom process group."}

    def _update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> Answer:
        if not self.has_session:
            return self._outside("update_weights_from_distributed")
        assert load_format == "flattened_bucket" and not flush_cache
        kinds = [getattr(torch, name) for name in dtypes]
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            dist.broadcast(data, src=0, group=self._groups[group_name])
        except RuntimeError as error:
            return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        for name, part, kind, shape in zip(names, data.split(sizes), kinds, shapes, strict=True):
            self.weights[name] = part.view(kind).reshape(shape).clone()
        return 200, {"success": True, "message": "Succeeded to update parameter online."}

    def _update_weights_from_tensor(self, serialized_named_tensors: list[str], flush_cache: bool = True) -> Answer:
        if not self.has_session:
            return self._outside("update_weights_from_tensor")
        assert len(serialized_named_tensors) == self.info["tp_size"] and not flush_cache
        self.weights.update(pickle.loads(base64.b64decode(serialized_named_tensors[0])))
        return 200, {"success": True, "message": "Success"}

    def _update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, flush_cache: bool = True
    ) -> Answer:
        assert load_format == "safetensors" and not flush_cache
        for file in sorted(Path(model_path).glob("*.safetensors")):
            self.weights.update(load_file(file))
        message = "Succeeded to update model weights."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    def _outside(self, route: str) -> Answer:
        message = f"{route} must run between begin_weight_update() and end_weight_update()"
        return 400, {"success": False, "message": message}

    def _update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> Answer:
        assert not abort_all_requests
        self.version = new_version
        message = f"Weight version updated to {new_version}"
        return 200, {"success": True, "message": message, "new_version": new_version}

    # -------------------------------------------------------------------------------------------------------- memory

    def _release_memory_occupation(self, tags: list[str]) -> Answer:
        self.asleep |= set(tags)
        return 200, None

    def _resume_memory_occupation(self, tags: list[str]) -> Answer:
        if set(tags) - self.asleep:
            return 400, {"error": {"message": f"{tags} are not released"}}
        self.asleep -= set(tags)
        return 200, None


@contextmanager
def fake_sglang(**info: Any) -> Iterator[FakeSglang]:
    """One that is ended."""
    fake = FakeSglang(**info)
    try:
        yield fake
    finally:
        fake.close()
