"""An HTTP server with those routes of vLLM 0.32 that the client uses, and nothing behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class FakeVllm:
    """Each request gets the token 7, at once or when it is resumed; a new one waits too while it is paused.

    Attributes:
        calls: routes that were posted to, requests apart.
        num_waiting: requests that stand still.
        fails: routes that are refused; ``cut``: routes whose answer ends in its middle.
        label: what it calls its weights.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.cut: set[str] = set()
        self.label = "default"
        self.seeds: dict[tuple[int, ...], int | None] = {}
        self.num_waiting = 0
        self._changed = threading.Condition()
        self._is_paused = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                route = urlsplit(self.path).path[1:]
                content = fake.answer(route, body)
                data = json.dumps(content).encode()
                self.send_response(500 if route in fake.fails else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data) + (100 if route in fake.cut else 0)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        if route == "weight_info":
            return {"weight_version": self.label}
        if route == "inference/v1/generate":
            self.seeds[tuple(body["token_ids"])] = body["sampling_params"]["seed"]
            return {"choices": [self._generate()]}
        with self._changed:
            self.calls.append(route)
            if route in ("pause", "resume"):
                self._is_paused = route == "pause"
                self._changed.notify_all()
            if route == "update_weight_version":
                self.label = body["new_version"]
        return {"error": {"message": f"no {route} today"}} if route in self.fails else {}

    def wait_for(self, num_waiting: int) -> None:
        """Until so many requests stand still."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_waiting == num_waiting, 10)

    def _generate(self) -> dict[str, Any]:
        with self._changed:
            self.num_waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._is_paused, 20)
            self.num_waiting -= 1
        return {
            "index": 0,
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "finish_reason": "length",
            "weight_versions": [{"version": self.label}],
        }

    @contextmanager
    def running(self) -> Iterator[FakeVllm]:
        """Served in a thread."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
