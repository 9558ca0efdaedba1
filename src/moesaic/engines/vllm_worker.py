"""Runs inside vLLM's workers: traces their loader, and receives new weights there.

vLLM imports this file because ``--worker-extension-cls`` names ``WorkerExtension``; importing it registers the
weight-transfer backend ``moesaic``. Client and workers speak through a store of the client's (trusted: what is in it is
unpickled), large things in it, small ones as arguments of vLLM's own calls:

    init_weight_transfer_engine   read the checkpoint's keys, trace the loader, put the layout in the store
    start_weight_update           parameters go back to their load-time layout
    update_weights                ``planned``: run this rank's part of a plan; ``stream``: take whole tensors
    finish_weight_update          all must have come; vLLM converts, the CPU's packed copies are made again
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moesaic.engines.base import Sources
from moesaic.engines.vllm_layout import fresh_model, trace_model
from moesaic.engines.vllm_live import LiveModel
from moesaic.engines.vllm_messages import BACKEND, Contact, Delivery, Task, put_pickled
from moesaic.reshard.connect import connect_transport
from moesaic.reshard.layout import TargetLayout
from moesaic.reshard.run import run_plan
from moesaic.reshard.transfers import ProcessView, ReshardPlan
from moesaic.reshard.transports import GlooTransport


class Receiver:
    """vLLM's side of a weight transfer in one worker; ``backend_class`` makes vLLM's own kind of object of it."""

    init_info_cls = Contact
    update_info_cls = Delivery
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)  # type: ignore[call-arg]
        self._vllm_config = vllm_config
        self._model = model
        self._device = device
        self._contact: Contact | None = None
        self._store: dist.Store | None = None
        self._layout: TargetLayout | None = None
        self._live: LiveModel | None = None
        self._view: ProcessView | None = None
        # What connects to the trainers, and to the client; with the prefix that it was connected under.
        self._connection: tuple[str, GlooTransport] | None = None
        self._stream: GlooTransport | None = None
        self.num_bytes_received = 0

    @property
    def index(self) -> int:
        """This worker's number among all of the engine: tp innermost, then pp, then dp."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: Contact) -> None:
        """Trace this rank's loader on a model of its own, of all layers, and put the layout in the store. What an
        earlier client left behind is dropped."""
        self.abort()
        self._contact, self._view = init_info, None
        store = dist.TCPStore(
            init_info.host,
            init_info.port,
            is_master=False,
            timeout=timedelta(seconds=init_info.timeout_s),
            wait_for_workers=False,
        )
        self._store = store
        sources: Sources = pickle.loads(store.get(f"{init_info.prefix}/sources"))
        with fresh_model(self._vllm_config) as model:
            self._layout = trace_model(model, sources)
        self._live = LiveModel(self._model, self._vllm_config, sources)
        put_pickled(store, f"{init_info.prefix}/layout/{self.index}", self._layout)

    def start_weight_update(self) -> None:
        """Parameters go back to their load-time layout."""
        self._require_live().begin()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive, and wait for the device. vLLM's own calls ``torch.accelerator``, which a CPU doesn't have."""
        delivery = Delivery(**update_info)
        try:
            if delivery.mode == "planned":
                self._receive_planned(delivery)
            else:
                self._receive_stream(delivery)
        except BaseException:
            self.abort()
            raise
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Delivery) -> None:
        """vLLM's hook behind its own ``update_weights``, which isn't used."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """All must have come; convert it."""
        self._require_live().finish()

    def abort(self) -> None:
        """Give the update up; connections with it, which others then see."""
        self._disconnect()
        if self._live is not None and self._live.is_updating:
            self._live.abort()

    def shutdown(self) -> None:
        """Drop connections."""
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
        if self._stream is not None:
            self._stream.close()
        self._connection = self._stream = None

    def _require_live(self) -> LiveModel:
        if self._live is None:
            raise RuntimeError("init_weight_transfer_engine comes before any update")
        return self._live

    def _receive_planned(self, delivery: Delivery) -> None:
        assert self._store is not None and self._layout is not None
        task: Task = pickle.loads(self._store.get(delivery.key))
        process = task.processes[self.index]
        if self._view is None or self._view.fingerprint != task.fingerprint:
            plan: ReshardPlan = pickle.loads(self._store.get(task.plan_key))
            self._view = plan.messages_of(process)
        if self._connection is None or self._connection[0] != task.prefix:
            self._disconnect()
            host, port = task.store
            transport = connect_transport(
                f"{host}:{port}", process, task.num_processes, self._device, task.timeout_s, name=task.prefix
            )
            self._connection = (task.prefix, transport)
        sink = self._require_live().sink(self._layout)
        report = run_plan(self._view, self._connection[1], None, sink, verify_checksum=task.verify_checksum)
        self.num_bytes_received = report.bytes_received

    def _receive_stream(self, delivery: Delivery) -> None:
        assert self._store is not None and self._contact is not None
        if self._stream is None:
            num_workers = self._vllm_config.parallel_config.world_size_across_dp
            self._stream = connect_transport(
                self._store, 1 + self.index, 1 + num_workers, self._device, self._contact.timeout_s, name=delivery.key
            )
            self._stream.prepare([0, 1 + self.index])
        bucket = []
        described = zip(delivery.names, delivery.shapes, delivery.dtypes, strict=True)
        for number, (name, shape, dtype) in enumerate(described):
            tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._stream.device)
            if tensor.numel():
                self._stream.start_receive(tensor.view(-1).view(torch.uint8), 0, number).wait()
            bucket.append((name, tensor))
        self._require_live().load(bucket)


class WorkerExtension:
    """Methods that vLLM adds to its worker class, for ``collective_rpc``. ``self`` is the worker."""

    def moesaic_abort_update(self) -> None:
        """Leave an update that will not be finished; without one nothing happens."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        engine.abort()
        self._weight_update_active = False

    def moesaic_report(self) -> dict[str, int]:
        """Of the last planned update: this worker's number, and the bytes that it received."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"index": engine.index, "num_bytes_received": engine.num_bytes_received}


def backend_class() -> type:
    """``Receiver`` as a weight-transfer engine of vLLM."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return type("MoesaicWeightTransferEngine", (Receiver, WeightTransferEngine), {})


def register_backend() -> None:
    """Make the backend known to vLLM in this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, backend_class())


if importlib.util.find_spec("vllm") is not None:
    register_backend()
