"""How a vLLM server is started. Nothing of vLLM is imported here.

As ``python -m vllm.entrypoints.openai.api_server``: whether the ``vllm`` command works depends on the name of the
package that vLLM came in.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from moesaic.engines.vllm_messages import BACKEND

# The RL routes are there in vLLM's development mode only.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to start a server.

    Attributes:
        model: folder of a checkpoint; with ``load_weights=False`` only its configs are read, and the engine can't be
            used before its first update.
        dtype: of the engine's weights, as vLLM spells it.
        max_model_len: prompt and completion, in tokens.
        max_num_seqs: sequences that run at the same time.
        block_size: of the cache of keys and values, in tokens; on a CPU a multiple of 32.
        kv_cache_gib: its size; on a CPU whole GiB; None: what vLLM finds.
        routed_experts: return which experts each token went to; needs vLLM's runner V2, which needs triton.
        sleep_mode: make ``sleep`` give memory back; not on a CPU.
        python: of the environment that vLLM is installed in, with this package beside it; default: this one.
        args, environment: whatever else, as vLLM's command line and variables take it.
    """

    model: str
    dtype: str = "bfloat16"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    block_size: int | None = None
    kv_cache_gib: int | None = None
    enforce_eager: bool = False
    load_weights: bool = True
    routed_experts: bool = False
    sleep_mode: bool = False
    python: str = sys.executable
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, host: str, port: int) -> list[str]:
        """What to run."""
        values: list[tuple[str, object]] = [
            ("--model", self.model),
            ("--host", host),
            ("--port", port),
            ("--dtype", self.dtype),
            ("--tensor-parallel-size", self.tp_size),
            ("--pipeline-parallel-size", self.pp_size),
            ("--data-parallel-size", self.dp_size),
            ("--max-num-seqs", self.max_num_seqs),
            ("--worker-extension-cls", "moesaic.engines.vllm_worker.WorkerExtension"),
            ("--weight-transfer-config", json.dumps({"backend": BACKEND})),
            ("--logprobs-mode", "raw_logprobs"),
            # Otherwise the checkpoint's generation_config.json would stand in for what a request leaves out.
            ("--generation-config", "vllm"),
        ]
        values += [("--max-model-len", self.max_model_len)] if self.max_model_len is not None else []
        values += [("--block-size", self.block_size)] if self.block_size is not None else []
        values += [("--load-format", "dummy")] if not self.load_weights else []
        flags = {
            "--enable-scale-out": True,  # token ids in, token ids out
            "--skip-tokenizer-init": True,
            "--enable-expert-parallel": self.expert_parallel,
            "--enforce-eager": self.enforce_eager,
            "--enable-return-routed-experts": self.routed_experts,
            "--enable-sleep-mode": self.sleep_mode,
        }
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += [part for name, value in values for part in (name, str(value))]
        return [*command, *(name for name, is_on in flags.items() if is_on), *self.args]

    def variables(self) -> dict[str, str]:
        """The environment of the process, beside what this one has."""
        values = dict(ENVIRONMENT)
        if self.kv_cache_gib is not None:
            values["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_cache_gib)
        if self.enforce_eager:
            values["TORCH_COMPILE_DISABLE"] = "1"
        if self.routed_experts:
            values["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        return values | dict(self.environment)
