"""Three ways in which whole tensors get into an SGLang server's workers; all of them end in the model's own loader.

    group    broadcast over a gloo group of this process and the workers: any network, nothing on disk
    body     in the body of the request, as text: no connection is needed, each worker costs its bytes and a third more
    folder   through files in a folder that both sides see: safetensors, loaded when all are there

Each is used as ``begin``, ``send`` for each bucket, ``end``; or ``abort``, whatever happened before.
"""

from __future__ import annotations

import base64
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from moesaic.engines.server import ServerError

POLL_S = 0.002
REASON_TIMEOUT_S = 5.0
Bucket = Sequence[tuple[str, Tensor]]


class Post(Protocol):
    """Send a request, return its answer, raise ServerError where it was refused."""

    def __call__(self, route: str, body: Mapping[str, Any] | None = None, **query: object) -> Any: ...


class Carrier(Protocol):
    """One of the three ways."""

    def begin(self) -> None:
        """Before the first bucket."""

    def send(self, bucket: Bucket) -> None:
        """Some tensors, contiguous and on the host; they may be changed once this returns."""

    def end(self) -> None:
        """After the last."""

    def abort(self) -> None:
        """Make ``begin`` possible again.

        Raises:
            ServerError: the server doesn't answer.
        """


class GroupCarrier:
    """See the module's docstring. The group is made on the first ``begin``, and kept.

    Args:
        num_workers: of the server; rank 0 of the group is this process, the workers follow.
        store_host: name or address of this machine, as the workers reach it.
        timeout_s: for the workers to connect, and for each bucket.
    """

    def __init__(self, post: Post, num_workers: int, *, store_host: str, timeout_s: float) -> None:
        self._post = post
        self._num_workers = num_workers
        self._store_host, self._timeout_s = store_host, timeout_s
        self._name = ""
        self._store: dist.TCPStore | None = None
        # A ProcessGroupGloo, then the broadcast under way. In no frame's variables: an exception would keep them, and
        # with them the connections whose end the workers wait for.
        self._open: list[Any] = []

    def begin(self) -> None:
        """Connect where there is no connection, and open the update."""
        if not self._open:
            self._connect()
        self._post("begin_weight_update")

    def send(self, bucket: Bucket) -> None:
        """One broadcast of all bytes."""
        # Wide dtypes first, so that none begins at an odd offset.
        ordered = sorted((each for each in bucket if each[1].numel()), key=lambda each: -each[1].element_size())
        if not ordered:
            return
        parts = [tensor.view(-1).view(torch.uint8) for _, tensor in ordered]
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        body = describe(ordered) | {"group_name": self._name, "load_format": "flattened_bucket", "flush_cache": False}
        answer = call_aside(lambda: self._post("update_weights_from_distributed", body))
        try:
            self._broadcast(data, answer)
        except Exception as error:
            self._let_go()
            raise reason_of(answer) or error from error

    def end(self) -> None:
        """Close the update: converts weights to the engine's own formats."""
        self._post("end_weight_update")

    def abort(self) -> None:
        """Close the update and the group, on both sides, as far as they are open."""
        self._let_go()  # ends a wait of the workers
        # The group first: a broadcast that no worker takes part in ends with their connections.
        post_if_open(self._post, "destroy_weights_update_group", {"group_name": self._name})
        post_if_open(self._post, "end_weight_update", {})
        self._store = None

    def _connect(self) -> None:
        """Meet the workers.

        Raises:
            ServerError: refused, or not all came in time.
        """
        timeout = timedelta(seconds=self._timeout_s)
        self._name = f"moesaic-{uuid.uuid4().hex}"  # a worker refuses a name that it has had
        self._store = dist.TCPStore(self._store_host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        port = self._store.port
        contact = {
            "master_address": self._store_host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._num_workers,
            "group_name": self._name,
            "backend": "gloo",
        }
        answer = call_aside(lambda: self._post("init_weights_update_group", contact))
        group = call_aside(lambda: self._join(self._store_host, port, timeout))
        try:
            while not group.done():
                if answer.done():
                    answer.result()  # refused: no worker will come
                time.sleep(POLL_S)
            if (error := group.exception()) is not None:
                raise reason_of(answer) or ServerError(
                    f"not all of {self._num_workers} workers connected to {self._store_host} in {self._timeout_s:g} s: "
                    f"{error}. store_host must be this machine's name as the workers reach it."
                ) from error
            self._open.append(group.result())
            wait_for(answer, self._timeout_s, "init_weights_update_group")
        except BaseException:
            self._store = None  # the thread that waits for workers loses its connection to it, and ends
            self._let_go()
            raise
        finally:
            del group

    def _join(self, host: str, port: int, timeout: timedelta) -> Any:
        """A group under the keys by which torch lets its ranks meet, with SGLang's own prefix before them."""
        store: dist.Store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        for prefix in (self._name, f"{self._name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, 0, 1 + self._num_workers, timeout)

    def _broadcast(self, data: Tensor, answer: Future[Any]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._open.append(self._open[0].broadcast([data], options))
        deadline = time.monotonic() + self._timeout_s
        while not self._open[1].is_completed():
            if answer.done():
                answer.result()  # refused: no worker takes part, and the broadcast would never end
            if time.monotonic() > deadline:
                raise ServerError(f"{data.nbytes} bytes weren't taken within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        self._open.pop().wait()
        wait_for(answer, self._timeout_s, "update_weights_from_distributed")

    def _let_go(self) -> None:
        """Of the connections, in another thread: a group first waits for its broadcast, maybe until a time-out."""
        held, self._open = self._open, []
        call_aside(held.clear)


class BodyCarrier:
    """See the module's docstring.

    Args:
        num_workers: of the server; each is sent a copy.
    """

    def __init__(self, post: Post, num_workers: int) -> None:
        self._post = post
        self._num_workers = num_workers

    def begin(self) -> None:
        """Open the update."""
        self._post("begin_weight_update")

    def send(self, bucket: Bucket) -> None:
        """One request."""
        # Copies: a tensor is pickled with all of its storage. Plain pickles: a ForkingPickler's would name memory of
        # this machine.
        text = base64.b64encode(pickle.dumps([(name, tensor.clone()) for name, tensor in bucket])).decode()
        body = {"serialized_named_tensors": [text] * self._num_workers, "flush_cache": False}
        self._post("update_weights_from_tensor", body)

    def end(self) -> None:
        """Close the update."""
        self._post("end_weight_update")

    def abort(self) -> None:
        """Close the update where it is open."""
        post_if_open(self._post, "end_weight_update", {})


class FolderCarrier:
    """See the module's docstring. The weights of the last update stay in the folder: the server names it as its model.

    Args:
        folder: seen by both sides under this name; what lies in it is left alone.
    """

    def __init__(self, post: Post, folder: Path) -> None:
        self._post = post
        self._folder = folder
        self._used: Path | None = None
        self._new: Path | None = None
        self._num_files = 0

    def begin(self) -> None:
        """A new folder in the folder."""
        self._new = self._folder / f"moesaic-{uuid.uuid4().hex}"
        self._new.mkdir(parents=True)
        self._num_files = 0

    def send(self, bucket: Bucket) -> None:
        """One file."""
        assert self._new is not None, "begin made it"
        self._num_files += 1
        # Copies: tensors that share storage can't be in one file.
        save_file(
            {name: tensor.clone() for name, tensor in bucket}, self._new / f"model-{self._num_files:05}.safetensors"
        )

    def end(self) -> None:
        """Have the server load them."""
        assert self._new is not None, "begin made it"
        body = {"model_path": str(self._new.resolve()), "load_format": "safetensors", "flush_cache": False}
        self._post("update_weights_from_disk", body)
        used, self._used, self._new = self._used, self._new, None
        if used is not None:
            shutil.rmtree(used)

    def abort(self) -> None:
        """Remove what was written."""
        if self._new is not None:
            shutil.rmtree(self._new)
            self._new = None


def describe(bucket: Bucket) -> dict[str, list[Any]]:
    """Names, dtypes and shapes, as SGLang's routes take them."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def post_if_open(post: Post, route: str, body: Mapping[str, Any]) -> None:
    """A request that a server refuses where there is nothing to close.

    Raises:
        ServerError: for another reason.
    """
    try:
        post(route, body)
    except ServerError as error:
        if "no weight-update session is open" not in str(error) and "does not exist" not in str(error):
            raise


def call_aside(call: Callable[[], Any]) -> Future[Any]:
    """Run it in a thread that keeps no process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="sglang", daemon=True).start()
    return future


def wait_for(answer: Future[Any], timeout_s: float, what: str) -> None:
    """Return when it has succeeded.

    Raises:
        ServerError: refused, or not in time.
    """
    try:
        answer.result(timeout_s)
    except TimeoutError as error:
        raise ServerError(f"{what}: no answer within {timeout_s:g} s") from error


def reason_of(answer: Future[Any]) -> BaseException | None:
    """Why the workers failed, where they say so soon: better than that a connection broke."""
    try:
        return answer.exception(REASON_TIMEOUT_S)
    except TimeoutError:
        return None
