"""What the client of a vLLM server and its workers tell one another. Plain values."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

BACKEND = "moesaic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Where the client's store is, what its keys begin with, and how long to wait for it."""

    host: str
    port: int
    prefix: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What one call of ``update_weights`` brings.

    Attributes:
        mode: ``planned``: the ``Task`` of all workers is in the store under ``key``; ``stream``: the named tensors
            follow from the client.
        names, shapes, dtypes: of the tensors of a stream, in the order in which they come.
    """

    mode: Literal["planned", "stream"]
    key: str = ""
    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The workers' part in a planned transfer; see ``engines.base.Offer``.

    Attributes:
        fingerprint: of the plan.
        plan_key: where in the store the ``ReshardPlan`` is, for a worker that hasn't had it before. A plan is smaller
            than what follows from it for one process: each worker finds that for itself.
    """

    fingerprint: str
    plan_key: str
    processes: tuple[int, ...]
    num_processes: int
    store: tuple[str, int]
    prefix: str
    timeout_s: float
    verify_checksum: bool


def put_pickled(store: dist.Store, key: str, value: object) -> None:
    """Keep any plain value in a store; ``pickle.loads(store.get(key))`` reads it."""
    data: Any = pickle.dumps(value)  # a store takes bytes; its stubs know strings only
    store.set(key, data)
