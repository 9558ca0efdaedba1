"""vLLM in this process, on one device and without a process group: for a look at a model, and for tests."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.engines.base import Completion, Engine, Offer, PauseMode, Receiving, Sampling, Sources
from moesaic.engines.server import ServerError
from moesaic.engines.states import Tag
from moesaic.engines.vllm import FINISH_REASONS, read_experts, sampling_values
from moesaic.engines.vllm_layout import fresh_model, require_all_used, trace_model
from moesaic.engines.vllm_live import LiveModel
from moesaic.engines.vllm_server import ServerOptions
from moesaic.model.buffers import random_state_kept
from moesaic.reshard.layout import TargetLayout
from moesaic.runtime import current_device, environment


class VllmLocal(Engine):
    """A vLLM engine of one rank in this process. ``generate`` takes one call at a time.

    Args:
        options: sizes of parallelism must be 1; ``args`` are a server's and must be empty.
        sources: keys of the model's files, with shapes and dtypes (``describe_files``).

    Raises:
        ValueError: the options ask for more than one rank, or this process is in a process group: vLLM makes a default
            group of its own.
    """

    in_process = True

    def __init__(self, options: ServerOptions, sources: Sources, *, version: int = 0) -> None:
        super().__init__(version=version)
        if max(options.tp_size, options.pp_size, options.dp_size) > 1 or options.args:
            raise ValueError(
                f"tp_size={options.tp_size}, pp_size={options.pp_size}, dp_size={options.dp_size}, "
                f"args={options.args}: in a process there is one rank, and no command line; use the server."
            )
        if dist.is_initialized():
            raise ValueError(
                "this process is in a process group, and vLLM would make another default one; use the server."
            )
        from vllm import LLM

        # Without these vLLM puts its engine in a process of its own, where its model can't be reached.
        variables = options.variables() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        given = {"max_model_len": options.max_model_len, "block_size": options.block_size}
        with environment(variables), _noise_kept():
            self._llm = LLM(
                model=options.model,
                dtype=options.dtype,
                max_num_seqs=options.max_num_seqs,
                enforce_eager=options.enforce_eager,
                load_format="auto" if options.load_weights else "dummy",
                enable_return_routed_experts=options.routed_experts,
                enable_sleep_mode=options.sleep_mode,
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="raw_logprobs",
                distributed_executor_backend="uni",
                **{name: value for name, value in given.items() if value is not None},
            )
        self._worker: Any = self._llm.llm_engine.model_executor.driver_worker.worker
        self._live = LiveModel(self._worker.get_model(), self._worker.vllm_config, sources)
        with fresh_model(self._worker.vllm_config) as model:
            self._layout = trace_model(model, sources)
        require_all_used([self._layout], sources)
        self._one_call = threading.Lock()
        if not options.load_weights:
            self.fail("it was started without weights (load_weights=False)")

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        """Of the one rank."""
        return (self._layout,)

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        from vllm import SamplingParams

        # vLLM refuses n > 1 where it is greedy.
        num_each, n = (sampling.n, 1) if sampling.temperature == 0 else (1, sampling.n)
        values = sampling_values(sampling) | {"n": n}
        inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(num_each)]
        params = [
            SamplingParams(**values, seed=sampling.seed_of(index))
            for index in range(len(prompts))
            for _ in range(num_each)
        ]
        with self._one_call, _noise_kept():
            torch.manual_seed(secrets.randbits(63))  # what a request without seed is drawn from
            answers = self._llm.generate(inputs, params, use_tqdm=False)
        choices = [[self._completion(output) for output in answer.outputs] for answer in answers]
        return [sum(choices[start : start + num_each], []) for start in range(0, len(choices), num_each)]

    def _completion(self, output: Any) -> Completion:
        tokens = tuple(output.token_ids)
        return Completion(
            tokens=tokens,
            logprobs=tuple(entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)),
            finish_reason=FINISH_REASONS[output.finish_reason],
            weight_version=self.version,
            routed_experts=None if output.routed_experts is None else read_experts(output.routed_experts),
        )

    def _pause(self, mode: PauseMode) -> None:
        if mode == "keep":
            raise ValueError("mode='keep': in one process nothing can stand still; use drain.")

    def _begin_update(self) -> None:
        with self._config():
            self._live.begin()

    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        with self._config():
            # Copies: vLLM keeps what it is given until a layer is whole, and the caller uses its buffer again.
            self._live.load([(name, tensor.detach().clone()) for name, tensor in bucket])

    def _start_receive(self, offer: Offer) -> Receiving:
        return Receiving(sink=self._live.sink(self._layout), wait=lambda timeout_s: None)

    def _end_update(self) -> None:
        with self._config():
            self._live.finish()

    def _abort_update(self) -> None:
        if self._live.is_updating:
            with self._config():
                self._live.abort()

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise ServerError("the prefix cache wasn't reset: blocks of it are in use")

    def _sleep(self, level: int) -> None:
        self._llm.sleep(level)

    def _wake(self, tags: tuple[Tag, ...]) -> None:
        self._llm.wake_up(list(tags))

    def _close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._worker, self._live
        cleanup_dist_env_and_memory()

    def _config(self) -> Any:
        """Where vLLM's layers look for their config."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)


@contextmanager
def _noise_kept() -> Iterator[None]:
    """The random states as they were: vLLM seeds them all when it starts, and training in this process draws from
    them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with random_state_kept(current_device()):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
