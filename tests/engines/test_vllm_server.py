"""Real vLLM servers on the CPU, one after the other: four gloo ranks (ep2, efsdp2) train, and their weights go in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moesaic.engines.base import Completion, Sampling
from moesaic.engines.server import Routes, ServerError, ServerProcess
from moesaic.engines.states import EngineStateError
from moesaic.engines.sync import Agreement, SyncFailed, WeightSync
from moesaic.engines.transfer import PlannedTransfer, StreamedTransfer
from moesaic.engines.vllm import VllmServer
from moesaic.engines.vllm_layout import describe_files
from moesaic.engines.vllm_server import ServerOptions
from moesaic.meshes import build_meshes
from moesaic.parallel.apply import from_pretrained
from moesaic.reshard.transports import GlooTransport
from moesaic.weights.export import export_hf
from tests.engines.checkpoints import read_files, save_checkpoint
from tests.oracle.cells import ShardOptimizer
from tests.pool import RunRanks

WORLD_SIZE = 4
NUM_STEPS = 3
TIMEOUT_S = 60.0  # the first sync traces the loader too, on a machine that has other things to do
# One of more than two blocks of the prefix cache, which would answer for it with keys and values of older weights.
PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 140)), [7] * 33]
GREEDY = Sampling(max_tokens=12, temperature=0)
# Of a sampled token, natural logarithm: fp32 sums in another order cost 1.4e-6; stale or wrong weights 1e-1 and more.
DLOGP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server, and the checkpoint that it was started with."""

    name: str
    folder: Path
    tp_size: int
    process: ServerProcess


def options(folder: Path, **fields: Any) -> ServerOptions:
    values: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_gib": 1,
        "enforce_eager": True,
        # Workers that are bound to cores of their own would share these with the trainers all the same.
        "environment": (("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")),
    }
    return ServerOptions(model=str(folder), **values | fields)


CASES: dict[str, tuple[int, dict[str, Any]]] = {"tp1": (1, {}), "tp2-tied": (2, {"tie_word_embeddings": True})}


@pytest.fixture(scope="module", params=list(CASES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tp_size, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, "qwen3_moe", **overrides)
    process = ServerProcess(options(folder, tp_size=tp_size), folder / "server.log", name="vLLM", start_timeout_s=240.0)
    yield Served(name=request.param, folder=folder, tp_size=tp_size, process=process)
    process.close()


@torch.no_grad()
def logits_of(model: PreTrainedModel, prompt: Sequence[int], completion: Completion) -> Tensor:
    """Those that each token of the completion was chosen from."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    return model(ids).logits[0, len(prompt) - 1 : -1]


def assert_from(folder: Path, prompts: Sequence[Sequence[int]], answers: list[list[Completion]]) -> float:
    """The greedy answers are those of the checkpoint in ``folder``; the largest difference of log-probability."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    worst = 0.0
    for prompt, (completion,) in zip(prompts, answers, strict=True):
        logits = logits_of(model, prompt, completion)
        assert logits.argmax(-1).tolist() == list(completion.tokens), folder
        raw = logits.log_softmax(-1)[torch.arange(len(completion.tokens)), list(completion.tokens)]
        worst = max(worst, (raw - torch.tensor(completion.logprobs)).abs().max().item())
    assert worst < DLOGP, folder
    return worst


def test_what_a_server_generates(served: Served) -> None:
    engine = VllmServer.attach(served.process.url)
    engine.health()
    assert_from(served.folder, PROMPTS, engine.generate(PROMPTS, GREEDY))
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)

    # Sampled: n of them, of one seed the same, log-probabilities before temperature, top-p and top-k.
    sampling = Sampling(max_tokens=8, temperature=1.7, top_p=0.9, top_k=20, n=3, seed=11)
    first, again = engine.generate(PROMPTS[:1], sampling), engine.generate(PROMPTS[:1], sampling)
    assert first == again and len({completion.tokens for completion in first[0]}) == 3
    for completion in first[0]:
        logits = logits_of(model, PROMPTS[0], completion)
        raw = logits.log_softmax(-1)[torch.arange(8), list(completion.tokens)]
        assert (raw - torch.tensor(completion.logprobs)).abs().max() < DLOGP
        ranks = (logits > logits.gather(1, torch.tensor(completion.tokens)[:, None])).sum(-1)
        assert ranks.max() < 20 and completion.finish_reason == "length" and completion.weight_version == 0

    # Greedy ones are alike; a stop token ends a completion, and is its last.
    ((one, two),) = engine.generate(PROMPTS[:1], Sampling(max_tokens=8, temperature=0, n=2))
    assert one == two
    stop = one.tokens[2]
    ((stopped,),) = engine.generate(PROMPTS[:1], Sampling(max_tokens=8, temperature=0, stop_token_ids=(stop,)))
    assert stopped.tokens == one.tokens[: one.tokens.index(stop) + 1] and stopped.finish_reason == "stop"
    with pytest.raises(ServerError, match="max_tokens|length|context"):
        engine.generate([[1] * 300], GREEDY)

    # What is under way stands still, is computed anew from the caches' reset on, and goes on.
    long = Sampling(max_tokens=100, temperature=0)
    ((alone,),) = engine.generate(PROMPTS[:1], long)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(engine.generate, PROMPTS[:1], long)
        while not engine.state.num_in_flight and not under_way.done():
            pass
        engine.pause("keep")
        engine.reset_caches()
        engine.resume()
        assert under_way.result(60.0) == [[alone]]
    engine.pause()
    engine.sleep(1)  # does nothing on a CPU, but is taken
    engine.wake()
    engine.resume()
    engine.close()  # leaves the server, which isn't this object's
    served.process.require_alive()


class Trainer:
    """One rank's part of the training."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.model = from_pretrained(folder, build_meshes("cpu", ep_size=2))
        self.optimizer = ShardOptimizer(lambda params: torch.optim.AdamW(params, lr=5e-3), self.model.parameters())

    def step(self, number: int) -> None:
        """One optimizer step on tokens of this rank's own."""
        torch.manual_seed(100 * number + self.rank)
        tokens = torch.randint(0, 500, (2, 24))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def agreement_of(rank: int, name: str) -> Agreement:
    """Of the four ranks, for one sync."""
    store = dist.distributed_c10d._get_default_store()
    return Agreement(store, rank, WORLD_SIZE, timeout_s=TIMEOUT_S, prefix=name)


def sync_steps(rank: int, served_at: str, folder: Path, out: Path) -> list[tuple[list[list[Completion]], list[int]]]:
    """Three steps with a planned sync each, then one with a streamed sync. By rank 0: what the server then generates,
    and how much each of its workers had received; the checkpoints are in ``out``."""
    trainer = Trainer(folder, rank)
    engines = []
    if rank == 0:
        engines.append(VllmServer.attach(served_at, describe_files(trainer.model), timeout_s=TIMEOUT_S))
        engines[0].generate(PROMPTS, GREEDY)  # their keys and values are in the cache from here on
    planned = PlannedTransfer(trainer.model, timeout_s=TIMEOUT_S)
    by_plan = WeightSync(engines, planned, agreement_of(rank, "planned"))
    by_stream = WeightSync(engines, StreamedTransfer(trainer.model, bucket_mib=0.25), agreement_of(rank, "streamed"))
    found = []
    for number in range(1, NUM_STEPS + 2):
        trainer.step(number)
        (by_plan if number <= NUM_STEPS else by_stream).sync(number)
        if engines:
            answers = engines[0].generate(PROMPTS, GREEDY)
            found.append((answers, engines[0].worker_bytes()))
            if number <= NUM_STEPS:
                assert planned.plan is not None
                assert found[-1][1] == [planned.plan.lower_bound(index) for index in range(len(found[-1][1]))]
        export_hf(trainer.model, out / str(number))
    return found


def test_each_step_reaches_the_server(served: Served, run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(sync_steps, WORLD_SIZE, served.process.url, served.folder, tmp_path, timeout_s=240.0)[0]
    assert len(found) == NUM_STEPS + 1
    for number, (answers, received) in enumerate(found, start=1):
        worst = assert_from(tmp_path / str(number), PROMPTS, answers)
        assert {completion.weight_version for (completion,) in answers} == {number}
        assert len(received) == served.tp_size
        print(f"{served.name} step {number}: log-probabilities to {worst:.1e}, {received} bytes received")
    all_tokens = [tuple(completion.tokens for (completion,) in answers) for answers, _ in found]
    assert len(set(all_tokens)) > 1, "training changed nothing: the test would pass with weights that never came"


def test_half_new_weights_answer_nobody(served: Served) -> None:
    """After an update that failed the server stays paused, and says so to whoever comes; the next update heals it."""
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    sources = describe_files(model)
    files = list(read_files(served.folder).items())
    routes = Routes(served.process.url)
    first = VllmServer.attach(served.process.url, sources, timeout_s=TIMEOUT_S)
    version = first.version
    first.pause()
    first.begin_update()
    first.receive(files[: len(files) // 2])
    with pytest.raises(ServerError, match="didn't bring"):
        first.end_update()
    first.resume()
    assert routes.get("is_paused")["is_paused"]
    first.close()
    second = VllmServer.attach(served.process.url, sources, timeout_s=TIMEOUT_S)
    with pytest.raises(EngineStateError, match="broken"):
        second.generate(PROMPTS, GREEDY)
    second.pause()
    second.begin_update()
    second.receive(files)
    second.end_update()
    second.reset_caches()
    second.set_version(version + 1)
    second.resume()
    answers = second.generate(PROMPTS, GREEDY)
    assert_from(served.folder, PROMPTS, answers)
    assert answers[0][0].weight_version == version + 1 == VllmServer.attach(served.process.url).version
    second.close()


def kill_midway(rank: int, served_at: str, pid: int, folder: Path) -> tuple[str, float, str]:
    """The server dies when rank 2 sends its second message: what each rank sees, after how many seconds."""
    trainer = Trainer(folder, rank)
    engines = [VllmServer.attach(served_at, describe_files(trainer.model), timeout_s=TIMEOUT_S)] if rank == 0 else []
    sync = WeightSync(engines, PlannedTransfer(trainer.model, timeout_s=TIMEOUT_S), agreement_of(rank, "killed"))
    sync.sync(10)  # beyond what the tests before this one came to
    send, num_sent = GlooTransport.start_send, 0

    def send_and_kill(self: GlooTransport, *args: Any) -> Any:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 2:
            os.killpg(pid, signal.SIGKILL)
        return send(self, *args)

    if rank == 2:
        GlooTransport.start_send = send_and_kill  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        sync.sync(11)
    except SyncFailed as failure:
        seconds, text = time.monotonic() - begin, str(failure)
    else:
        raise AssertionError(f"rank {rank} saw nothing")
    finally:
        GlooTransport.start_send = send  # type: ignore[method-assign]
    state = ""
    for engine in engines:
        state = engine.state.text
        with pytest.raises(RuntimeError):
            engine.generate(PROMPTS, GREEDY)
        with pytest.raises(RuntimeError):
            engine.health()
        engine.close()
    return text, seconds, state


def test_killing_the_server_midway_fails_all_ranks(served: Served, run_ranks: RunRanks) -> None:
    """The last test of each server."""
    results = run_ranks(kill_midway, WORLD_SIZE, served.process.url, served.process.pid, served.folder)
    for text, seconds, _ in results:
        assert seconds < 30 and "transfer failed on rank" in text, text
    assert len({text for text, _, _ in results}) == 1  # one verdict
    assert "broken" in results[0][2]
    with pytest.raises(ServerError, match="exit code -9"):
        served.process.require_alive()
    print(
        f"{served.name}: failed on all ranks after {max(seconds for _, seconds, _ in results):.2f} s: {results[0][0]}"
    )


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    """Routed experts need vLLM's runner V2, which needs triton, which has no CPU backend here."""
    save_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ServerError, match="(?s)ended with exit code.*Model Runner V2 requires Triton"):
        ServerProcess(
            options(tmp_path, routed_experts=True), tmp_path / "server.log", name="vLLM", start_timeout_s=120.0
        )
