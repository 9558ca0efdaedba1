"""The engine that needs nothing but transformers: a model in this process."""

from __future__ import annotations

import secrets
import threading
import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from moesaic.engines.base import Completion, Engine, Offer, PauseMode, Receiving, Sampling, require_tokens
from moesaic.engines.hf_batched import Pieces, cut_batches, generate_batched
from moesaic.engines.hf_continuous import generate_continuous, refuse_continuous
from moesaic.engines.hf_weights import Memory, Update, describe_target
from moesaic.engines.routed import RoutedExperts, join
from moesaic.engines.sampler import Draft, draft
from moesaic.engines.states import EngineStateError, Tag
from moesaic.meshes import Meshes
from moesaic.model.build import find_auto_class
from moesaic.model.seam import find_experts
from moesaic.reshard.layout import TargetLayout
from moesaic.weights.agree import raise_together, state_tensors

Batching = Literal["auto", "batched", "continuous"]
# ``auto`` is ``continuous`` where more of the batches' prompt tokens than this would be padding. Measured on a CPU, 32
# prompts, 32 new tokens, 4 layers of hidden 768: lengths 16 to 512 (0.43 padding) 27 s batched, 36 s continuous; four
# of 1,024 among 16s (0.86) 57 s and 19 s.
MAX_PADDING = 0.6


class HfEngine(Engine):
    """A transformers model that generates, in this process.

    The same seed gives a completion the same noise, whatever other prompts are beside it: a stream for each (seed,
    prompt's index in the call, completion's index), or each (prompt's own seed, completion's index). Logits of one
    batch and another differ in the last digits, so with the same prompts in another batching a token may rarely fall on
    the other side of a boundary.

    Keys and values live within a call of ``generate`` only, so none is ever stale, and there is nothing to keep while
    the engine is paused: ``pause("keep")`` is refused while requests are in flight. Calls from several threads take
    turns. ``sleep(1)`` puts the weights in pinned host memory; those of a model on the CPU, in a file.

    A model parallelized by ``moesaic`` (dp, ep and FSDP in any mix; not cp, tp) makes one engine out of all ranks:
    every rank must call ``generate`` together, each with one prompt of its own at least, and no rank returns before all
    are done; where one can't, all of them raise. One whose matrices are split over tp (``hf_split.py``) is one engine
    on the ranks of ``tp_mesh``: they must call together too, and with the same prompts; each returns the same tokens.

    Args:
        model: whole in this process; or parallelized, with its ``meshes``; or split, with its ``tp_mesh``.
        version: of its weights.
        batching: ``batched``: left-padded batches. ``continuous``: transformers' continuous batching (whole models
            only). ``auto``: continuous where the prompts' lengths differ much.
        max_batch_tokens: tokens whose keys and values are kept at a time, at most.
        max_length: of prompt and completion together; default: the model's ``max_position_embeddings``.
        routed_experts: record which experts each token visited (models with experts at transformers' seam).
        owns_weights: False where the model is the trained one itself: then updates move nothing, and sleep leaves the
            weights alone.
        parking_folder: where the file of ``sleep(1)`` is; default: the system's folder for temporary files.

    Raises:
        ValueError: a parallelized model without its meshes, or trained on cp or tp; ``continuous`` for one;
            ``routed_experts`` for a model without experts.
    """

    names = "model"
    in_process = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        meshes: Meshes | None = None,
        tp_mesh: DeviceMesh | None = None,
        version: int = 0,
        batching: Batching = "auto",
        max_batch_tokens: int = 65_536,
        max_length: int | None = None,
        routed_experts: bool = False,
        owns_weights: bool = True,
        parking_folder: str | Path | None = None,
        drain_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(version=version, drain_timeout_s=drain_timeout_s)
        if batching not in get_args(Batching):
            raise ValueError(f"batching={batching!r}: one of {', '.join(get_args(Batching))}.")
        if routed_experts and not find_experts(model):
            raise ValueError(
                f"routed_experts: {type(model).__name__} has no experts at transformers' seam; leave it out."
            )
        _refuse_topology(model, meshes, tp_mesh, batching)
        reason = refuse_continuous(model)
        if reason is not None and batching == "continuous":
            raise ValueError(f"batching='continuous': {reason}; use batched, or auto.")
        self._can_continue = reason is None
        limit = model.config.get_text_config().max_position_embeddings
        self._model = model
        # The ranks that generate together, and the one group of them all.
        self._mesh = tp_mesh if meshes is None else meshes.data
        self._group: dist.ProcessGroup | None = None if self._mesh is None else self._mesh._flatten().get_group()
        # Those that must draw the same tokens.
        self._tp_group: dist.ProcessGroup | None = None if tp_mesh is None else tp_mesh.get_group()
        self._batching = batching
        self._max_batch_tokens = max_batch_tokens
        self._max_length: int = max_length or limit
        self._recorder = RoutedExperts(model) if routed_experts else None
        self._owns_weights = owns_weights
        self._turn = threading.Lock()
        self._salvaged: list[list[Completion]] = []
        self._memory = Memory(model, parking_folder)
        self._update = Update(model)
        self._layouts = (describe_target(model),) if owns_weights else ()

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype | str, device: torch.device, **options: Any) -> HfEngine:
        """An engine of a model folder, whole in this process. ``dtype`` ``auto``: as in the files; ``options``: of
        the engine.

        Raises:
            ValueError: a folder that transformers has no causal language model for.
        """
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        auto_class = cast(Any, find_auto_class(config))
        model = auto_class.from_pretrained(str(folder), dtype=dtype, local_files_only=True).to(device)
        return cls(model, **options)

    @property
    def owns_weights(self) -> bool:
        """Whether its weights are its own, and not the trained ones."""
        return self._owns_weights

    @property
    def model(self) -> PreTrainedModel:
        """What generates."""
        return self._model

    def target_layouts(self) -> tuple[TargetLayout, ...]:
        """This process's part of the model; nothing where the weights are the trained ones themselves."""
        return self._layouts

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """See ``Engine``. Of a parallelized model it is refused on all ranks where it would be on one."""
        self._salvaged = []
        if self._mesh is not None:
            error: Exception | None = None
            try:
                require_tokens(prompts)
                self.state.generate()
            except (ValueError, EngineStateError) as problem:  # raised below, when the other ranks know of it
                error = problem
            request = 0 if self._tp_group is None else zlib.crc32(repr((list(map(list, prompts)), sampling)).encode())
            raise_together(error, self._mesh, "generate", step=request)
        return super().generate(prompts, sampling)

    def salvage(self) -> list[list[Completion]]:
        """See ``Engine``; without routed experts."""
        return self._salvaged

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        drafts = self._draft(prompts, sampling, self._choose_seed(sampling))
        try:
            pieces = self._run([each for group in drafts for each in group], sampling)
        except BaseException:
            self._salvaged = [[self._complete(each, None) for each in group] for group in drafts]
            raise
        return [[self._complete(each, pieces) for each in group] for group in drafts]

    def _run(self, drafts: Sequence[Draft], sampling: Sampling) -> Pieces:
        """Complete ``drafts``, in place."""
        with self._turn, nullcontext() if self._recorder is None else self._recorder.listening():
            if self._is_continuous(drafts):
                return generate_continuous(
                    self._model, drafts, sampling, max_batch_tokens=self._max_batch_tokens, recorder=self._recorder
                )
            return generate_batched(
                self._model,
                drafts,
                sampling,
                max_batch_tokens=self._max_batch_tokens,
                max_length=self._max_length,
                recorder=self._recorder,
                group=self._group,
                tp_group=self._tp_group,
            )

    def _choose_seed(self, sampling: Sampling) -> int | tuple[int, ...]:
        """Of this call; ranks that draw the same tokens have the same."""
        if sampling.seed is not None:
            return sampling.seed
        seed = torch.tensor([secrets.randbits(63)], device=self._model.device)
        if self._tp_group is not None:
            dist.broadcast(seed, group_src=0, group=self._tp_group)
        return int(seed.item())

    def _draft(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | tuple[int, ...]
    ) -> list[list[Draft]]:
        """Refused on all ranks of a parallelized model where one of them has a prompt that is too long, or of tokens
        that the model doesn't have: on an accelerator these would end the process's use of it."""
        drafts: list[list[Draft]] = []
        error: Exception | None = None
        try:
            self._require_known(prompts)
            drafts = draft(prompts, sampling, seed=seed, max_length=self._max_length)
        except ValueError as problem:  # raised below, when the other ranks know of it
            error = problem
        raise_together(error, self._mesh, "generate")
        return drafts

    def _require_known(self, prompts: Sequence[Sequence[int]]) -> None:
        size = self._model.get_input_embeddings().weight.shape[0]
        for number, prompt in enumerate(prompts, start=1):
            if not 0 <= min(prompt) <= max(prompt) < size:
                raise ValueError(
                    f"prompt {number}: tokens {min(prompt)} to {max(prompt)}; the model has 0 to {size - 1}."
                )

    def _is_continuous(self, drafts: Sequence[Draft]) -> bool:
        if self._batching != "auto" or self._group is not None:
            return self._batching == "continuous"
        return self._can_continue and padding_share(cut_batches(drafts, self._max_batch_tokens)) > MAX_PADDING

    def _complete(self, each: Draft, pieces: Pieces | None) -> Completion:
        routed = None
        if self._recorder is not None and pieces is not None:
            routed = join(pieces[id(each)], len(each.prompt) + len(each.tokens) - 1)
        return Completion(
            tokens=tuple(each.tokens),
            logprobs=tuple(each.logprobs),
            finish_reason=each.finish_reason or "aborted",
            weight_version=self.version,
            routed_experts=routed,
        )

    def _pause(self, mode: PauseMode) -> None:
        if mode == "keep" and self.state.num_in_flight:
            raise ValueError(
                f"mode='keep': {self.state.num_in_flight} requests are in flight, which hf can't keep; drain."
            )

    def _begin_update(self) -> None:
        if self._owns_weights:
            self._update.restart()

    def _receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        if self._owns_weights:
            self._update.fill(bucket)

    def _start_receive(self, offer: Offer) -> Receiving:
        return Receiving(sink=self._update if self._owns_weights else None, wait=_nothing_to_wait_for)

    def _end_update(self) -> None:
        if self._owns_weights:
            self._update.require_complete()

    def _reset_caches(self) -> None:
        """None outlives a call."""

    def _sleep(self, level: int) -> None:
        if self._owns_weights:
            self._memory.take(keep=level == 1)
        elif level == 2:
            raise ValueError("level=2 would drop the weights that are trained (owns_weights=False); sleep at level 1.")

    def _wake(self, tags: tuple[Tag, ...]) -> None:
        if "weights" in tags:
            self._memory.give_back()

    def _close(self) -> None:
        self._memory.close()


def padding_share(batches: Iterable[Sequence[Draft]]) -> float:
    """How much of the batches' prompts is padding. Example: one of lengths 2, 2 and 8 has 12 tokens of 24: 0.5."""
    lengths = [[len(each.prompt) for each in batch] for batch in batches]
    return 1 - sum(map(sum, lengths)) / sum(len(batch) * max(batch) for batch in lengths)


def _nothing_to_wait_for(_timeout_s: float) -> None:
    """All of the engine is in this process."""


def _refuse_topology(
    model: PreTrainedModel, meshes: Meshes | None, tp_mesh: DeviceMesh | None, batching: Batching
) -> None:
    if meshes is None and tp_mesh is None:
        sharded = [name for name, tensor in state_tensors(model).items() if isinstance(tensor, DTensor)]
        if sharded:
            raise ValueError(
                f"the model is parallelized (e.g. {sharded[0]}): give the engine its meshes, or its tp_mesh."
            )
        return
    if meshes is not None and tp_mesh is not None:
        raise ValueError("meshes and tp_mesh: give one; a model is parallelized as in training, or split over tp.")
    if meshes is not None and meshes.sequence.size() > 1:
        raise ValueError(
            f"cp_size={meshes.sizes.cp_size}, tp_size={meshes.sizes.tp_size}: the hf engine generates on whole "
            "sequences; use another engine, or make it of a model without cp and tp, or split by engines/hf_split.py."
        )
    if batching == "continuous":
        raise ValueError("batching='continuous': for a model that is whole in one process; use batched.")
