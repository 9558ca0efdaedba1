"""A server of another package as a process, and its routes over HTTP: what the adapters of servers have in common.

A server is started in a session of its own, so that its workers end with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from moesaic.runtime import child_environment

NUM_LOG_LINES = 30
STOP_TIMEOUT_S = 10.0
POLL_S = 0.2
# What the adapters have a server call its weights from the beginning of an update to its end, so that another client of
# it, or one after a crash, can tell. A number otherwise, and before any client came the server's own word.
INCOMPLETE = "incomplete"


class ServerError(RuntimeError):
    """The server refused a request, failed, or is gone; with what it said."""


class Routes:
    """The routes of a server that this project uses.

    Args:
        url: e.g. ``http://127.0.0.1:8000``.
        timeout_s: for one request.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # A proxy of the environment must not come between this process and its own server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def within(self, timeout_s: float) -> Routes:
        """The same, with another time-out."""
        return Routes(self.url, timeout_s=timeout_s)

    def get(self, route: str, **query: object) -> Any:
        """The answer's JSON (None where it has none)."""
        return self._send(route, query, None, "GET")

    def post(self, route: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """The answer's JSON (None where it has none).

        Raises:
            ServerError: refused, failed or gone.
        """
        return self._send(route, query, json.dumps(body or {}).encode(), "POST")

    def _send(self, route: str, query: Mapping[str, object], data: bytes | None, method: str) -> Any:
        url = f"{self.url}/{route}" + (f"?{urlencode(query, doseq=True)}" if query else "")
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                content = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
        except urllib.error.HTTPError as error:
            raise ServerError(f"{method} /{route}: {error.code} {_message(error.read())}") from error
        except (OSError, HTTPException) as error:  # refused, reset, timed out (URLError is one); or ended in mid-answer
            raise ServerError(f"{method} /{route}: no answer from {self.url}: {error}") from error
        return json.loads(content) if content and is_json else None


class Startable(Protocol):
    """What ``ServerProcess`` starts."""

    def command(self, host: str, port: int) -> list[str]:
        """What to run."""
        ...

    def variables(self) -> dict[str, str]:
        """The environment of the process, beside what this one has."""
        ...


class ServerProcess:
    """A server of this process's own: started, awaited, ended.

    Args:
        log: file for what the server writes.
        start_timeout_s: until it must answer.
        name: of the engine, for messages.

    Raises:
        ServerError: it ended before it answered, with the end of its log; or the time ran out.
    """

    def __init__(
        self,
        options: Startable,
        log: Path,
        *,
        start_timeout_s: float = 600.0,
        host: str = "127.0.0.1",
        name: str,
    ) -> None:
        self.log = log
        self._name = name
        port = find_free_port(host)
        self.url = f"http://{host}:{port}"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                options.command(host, port),
                env=child_environment(options.variables()),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Also when this process ends without ``close``.
        self._end = weakref.finalize(self, _end_process, self._process)
        try:
            self._await(Routes(self.url, timeout_s=5.0), start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server; its workers have others, in the same process group."""
        return self._process.pid

    def require_alive(self) -> None:
        """Raise ServerError where the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ServerError(
                f"the {self._name} server ended with exit code {code}; its log {self.log} ends with\n{self.log_end()}"
            )

    def log_end(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])

    def close(self) -> None:
        """End the server and its workers: SIGTERM, then SIGKILL."""
        self._end()

    def _await(self, routes: Routes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.require_alive()
            try:
                routes.get("health")
                return
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the {self._name} server didn't answer within {timeout_s:g} s ({error}); its log {self.log} "
                        f"ends with\n{self.log_end()}"
                    ) from error
            time.sleep(POLL_S)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue


def find_free_port(host: str) -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_ok(answer: Any, what: str, keys: Sequence[str] = ("success",)) -> None:
    """Raise where an answer of status 200 says that nothing was done."""
    if isinstance(answer, Mapping) and any(answer.get(key) is False for key in keys):
        raise ServerError(f"{what}: {answer}")


def _message(content: bytes) -> str:
    """What an error's answer says, in one line where it has the form of OpenAI's."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace").strip() or "(no message)"
