"""How an SGLang server is started, and what one that runs says of itself. Nothing of SGLang is imported here.

Written for SGLang 0.5.23. What a server of it must be told, because requests can't:

    SGLANG_RETURN_ORIGINAL_LOGPROB      log-probabilities before temperature; else they are after it
    --enable-deterministic-inference    seeds of requests; else they are ignored, without a word
    --enable-memory-saver               sleep; else memory isn't given back, without a word
    --enable-weights-cpu-backup         sleep(1); else weights are gone after it
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.engines.server import ServerError


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """How to start a server.

    Attributes:
        model: folder of a checkpoint; with ``load_weights=False`` only its configs are read, and the engine can't be
            used before its first update.
        dtype: of the engine's weights, as SGLang spells it.
        ep_size: over how many of the tp ranks experts are spread.
        max_model_len: prompt and completion, in tokens.
        max_num_seqs: sequences that run at the same time.
        seeds: heed ``Sampling.seed``, at the price of slower kernels.
        routed_experts: return which experts each token went to.
        sleep_mode: make ``sleep`` give memory back.
        host_weights: keep a copy of the weights on the host, for ``sleep(1)``.
        python: the interpreter to run it with; empty: this one. SGLang asks for other versions of torch and
            transformers than this package: an environment of its own keeps the two apart.
        args, environment: whatever else, as SGLang's command line and variables take it.
    """

    model: str
    dtype: str = "bfloat16"
    tp_size: int = 1
    ep_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 64
    load_weights: bool = True
    seeds: bool = False
    routed_experts: bool = False
    sleep_mode: bool = False
    host_weights: bool = False
    python: str = ""
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, host: str, port: int) -> list[str]:
        """What to run."""
        values: list[tuple[str, object]] = [
            ("--model-path", self.model),
            ("--host", host),
            ("--port", port),
            ("--dtype", self.dtype),
            ("--tp-size", self.tp_size),
            ("--ep-size", self.ep_size),
            ("--max-running-requests", self.max_num_seqs),
            # Otherwise the checkpoint's generation_config.json would stand in for what a request leaves out.
            ("--sampling-defaults", "openai"),
        ]
        values += [("--context-length", self.max_model_len)] if self.max_model_len is not None else []
        values += [("--load-format", "dummy")] if not self.load_weights else []
        flags = {
            "--skip-tokenizer-init": True,
            "--enable-deterministic-inference": self.seeds,
            "--enable-return-routed-experts": self.routed_experts,
            "--enable-memory-saver": self.sleep_mode,
            "--enable-weights-cpu-backup": self.host_weights,
        }
        command = [self.python or sys.executable, "-m", "sglang.launch_server"]
        command += [part for name, value in values for part in (name, str(value))]
        return [*command, *(name for name, is_on in flags.items() if is_on), *self.args]

    def variables(self) -> dict[str, str]:
        """The environment of the process, beside what this one has."""
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"} | dict(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a running server was started with, as far as it matters here.

    Attributes:
        model_type: as its config has it.
        weight_version: what it called its weights when it was asked.
        max_prompt: the longest that it takes, in tokens.
    """

    tp_size: int
    model_type: str
    weight_version: str
    max_prompt: int | None
    has_seeds: bool
    has_routed_experts: bool
    has_sleep: bool
    has_host_weights: bool


def read_facts(server: Mapping[str, Any], model: Mapping[str, Any]) -> ServerFacts:
    """From the answers of ``/server_info`` and ``/model_info``.

    Raises:
        ServerError: a field is missing: another version of SGLang.
        ValueError: its pp_size or dp_size is above 1: its updates reach the ranks of one of each only.
    """
    try:
        for name in ("pp_size", "dp_size"):
            if server[name] != 1:
                raise ValueError(
                    f"{name}={server[name]}: SGLang takes weight updates over HTTP with 1 only; start one server per "
                    "replica, and use tp_size (and ep_size) within it."
                )
        return ServerFacts(
            tp_size=server["tp_size"],
            model_type=model["model_type"],
            weight_version=model["weight_version"],
            max_prompt=server.get("max_req_input_len"),
            has_seeds=server["enable_deterministic_inference"],
            has_routed_experts=server["enable_return_routed_experts"],
            has_sleep=server["enable_memory_saver"],
            has_host_weights=server["enable_weights_cpu_backup"],
        )
    except KeyError as error:
        raise ServerError(
            f"the server doesn't say its {error}; this adapter is written for SGLang 0.5.23, the server is of version "
            f"{server.get('version', 'unknown')}."
        ) from error
