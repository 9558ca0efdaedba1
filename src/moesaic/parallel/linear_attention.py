"""Linear attention over a sequence that ranks share: positions are exchanged for heads and back, as in attention.

The gated delta rule and the causal convolution before it carry a state from each position to the next, for every head
(and channel) by itself. So between its projections each rank computes some heads on the whole sequence:

    hidden [B, S/n, H] -> in_proj, own positions, all heads [B, S/n, C] -> exchange -> own heads, all positions
    [B, S, C/n] -> convolution, delta rule, gated norm -> exchange -> all heads, own positions -> out_proj [B, S/n, H]

The other way, to gather the hidden states and compute projections for own heads only, needs no columns put in order,
but sends and holds [B, S, H] on every rank, however many there are; what is exchanged here shrinks with n.

transformers' code is not touched: it reads sizes, parameters and projections from its module, and for the time of one
forward finds there those of this rank's heads. The parameters stay whole; slices of the convolution's weight, of
``A_log`` and of ``dt_bias`` have gradients in their own places, and FSDP sums them over ranks as it does all others.

Suffixes: B rows, S positions of the whole sequence, n ranks, s = S/n own positions, C channels, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from moesaic.ops import host
from moesaic.ops.head_exchange import heads_to_positions, positions_to_heads
from moesaic.ops.sequence import PADDING, SequenceLayout, run_of

Part = Literal["key", "value", "number"]
"""What one head has in a projection: a key's or a value's channels, or (of a value head) a single number."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer into the block, by name, and the parts of its output.

    ``by_key_head``: all parts of the first key head (with its value heads), then of the next; otherwise all heads of
    the first part, then of the next.
    """

    name: str
    parts: tuple[Part, ...]
    by_key_head: bool = False


# The two ways in which families lay out the same block.
LAYOUTS: tuple[tuple[Projection, ...], ...] = (
    (
        Projection("in_proj_qkv", ("key", "key", "value")),
        Projection("in_proj_z", ("value",)),
        Projection("in_proj_b", ("number",)),
        Projection("in_proj_a", ("number",)),
    ),
    (
        Projection("in_proj_qkvz", ("key", "key", "value", "value"), by_key_head=True),
        Projection("in_proj_ba", ("number", "number"), by_key_head=True),
    ),
)
CONVOLUTION = Projection("conv1d", ("key", "key", "value"))
PER_HEAD = Projection("", ("number",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A block's heads, and their split over ranks: rank i has the i-th of ``num_ranks`` equal runs of value heads, and
    the key heads that these share. With fewer key heads than ranks, several ranks have the same one.

    Example, 2 key heads, 4 value heads, 4 ranks: value heads 0 | 1 | 2 | 3, key heads 0 | 0 | 1 | 1.
    """

    num_key: int
    num_value: int
    key_dim: int
    value_dim: int
    num_ranks: int

    @property
    def local_key(self) -> int:
        """Key heads of a rank."""
        return max(1, self.num_key // self.num_ranks)

    @property
    def local_value(self) -> int:
        """Value heads of a rank."""
        return self.num_value // self.num_ranks

    def problem(self) -> str | None:
        """Why they can't be split so; None where they can."""
        shown = f"{self.num_key} key heads and {self.num_value} value heads over {self.num_ranks} ranks"
        if self.num_value % self.num_ranks:
            return f"{shown}: each rank takes equally many value heads"
        if self.num_key % self.num_ranks and self.num_ranks % self.num_key:
            return f"{shown}: one of the numbers of key heads and of ranks must divide the other"
        return None

    def by_rank(self, x_C: Tensor, projection: Projection) -> Tensor:
        """A projection's output [..., C] (or a parameter of its channels) in the part of each rank: [..., n, C/n], laid
        out as the projection of a block that has these heads alone. More than C/n where ranks share key heads.

        Example, two key heads, four value heads of 1 channel, 2 ranks, parts key and value: k0 k1 v0 v1 v2 v3 becomes
        [k0 v0 v1], [k1 v2 v3].
        """
        groups, local_groups = (self.num_key, self.local_key) if projection.by_key_head else (1, 1)
        sizes = [num * dim // groups for num, dim in map(self._size, projection.parts)]
        parts = []
        for part, piece in zip(projection.parts, x_C.unflatten(-1, (groups, -1)).split(sizes, dim=-1), strict=True):
            num, dim = self._size(part)
            heads = piece.flatten(-2).unflatten(-1, (num, dim))
            if num < self.num_ranks:
                num_copies = self.num_ranks // num
                heads = heads.unsqueeze(-2).expand(*heads.shape[:-1], num_copies, dim).flatten(-3, -2)
            parts.append(heads.unflatten(-2, (self.num_ranks, local_groups, -1)).flatten(-2))
        return torch.cat(parts, dim=-1).flatten(-2)

    def _size(self, part: Part) -> tuple[int, int]:
        """Number of heads with this part, and channels of one."""
        if part == "key":
            return self.num_key, self.key_dim
        return self.num_value, self.value_dim if part == "value" else 1


class _SplitBlock:
    """Hooks of one block: what its forward finds on the module while it runs."""

    def __init__(self, module: nn.Module, projections: tuple[Projection, ...], heads: Heads, mesh: DeviceMesh) -> None:
        self.projections, self.heads = projections, heads
        self.group, self.rank = mesh.get_group(), mesh.get_local_rank()
        self.convolution = module.get_submodule(CONVOLUTION.name)
        self.put_back: list[Callable[[], None]] = []

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Before forward: project and exchange; then the module is one of this rank's heads, on the whole sequence."""
        assert not args and not self.put_back, "the block takes keywords, and no forward of it runs within another"
        hidden_BsH, others = _own_run(kwargs, self.rank, self.heads.num_ranks)
        # What goes to one rank travels like one head.
        sent = [self._project(module, projection, hidden_BsH).transpose(1, 2) for projection in self.projections]
        whole = [part_B1SC.squeeze(1) for part_B1SC in heads_to_positions(sent, self.group)]
        out_proj, heads = module.get_submodule("out_proj"), self.heads
        seen: dict[str, Any] = {
            "num_k_heads": heads.local_key,
            "num_v_heads": heads.local_value,
            "key_dim": heads.local_key * heads.key_dim,
            "value_dim": heads.local_value * heads.value_dim,
            "out_proj": lambda x_BSC: out_proj(positions_to_heads(x_BSC.unsqueeze(2), self.group).flatten(2)),
        }
        seen |= {p.name: _returns(piece) for p, piece in zip(self.projections, whole, strict=True)}
        seen |= {name: self._own(module.get_parameter(name), PER_HEAD) for name in ("A_log", "dt_bias")}
        weight_C1K = self.convolution.get_parameter("weight")
        self._show(module, seen)
        self._show(self.convolution, {"weight": self._own(weight_C1K.movedim(0, -1), CONVOLUTION).movedim(-1, 0)})
        # The projections are done: of the hidden states only the shape is read.
        others["hidden_states"] = hidden_BsH.new_zeros(()).expand(*whole[0].shape[:2], hidden_BsH.size(-1))
        return (), others

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After forward, also where it raised: the module is the whole one again."""
        while self.put_back:
            self.put_back.pop()()

    def _project(self, module: nn.Module, projection: Projection, hidden_BsH: Tensor) -> Tensor:
        return self.heads.by_rank(module.get_submodule(projection.name)(hidden_BsH), projection)

    def _own(self, param: Tensor, projection: Projection) -> Tensor:
        return self.heads.by_rank(param, projection).select(-2, self.rank)

    def _show(self, owner: nn.Module, values: Mapping[str, Any]) -> None:
        """Attributes in ``owner``'s own dictionary, where they come before its parameters and modules."""
        before = {name: value for name, value in vars(owner).items() if name in values}

        def put_back() -> None:
            for name in values:
                vars(owner).pop(name)
            vars(owner).update(before)

        vars(owner).update(values)
        self.put_back.append(put_back)


def _returns(value: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: value


def _own_run(kwargs: Mapping[str, Any], rank: int, num_ranks: int) -> tuple[Tensor, dict[str, Any]]:
    """A block's hidden states [B, s, H], zero where they are padding as transformers makes them, and other keywords."""
    others = dict(kwargs)
    hidden_BsH, layout = others.pop("hidden_states"), others.pop("sequence_layout", None)
    if not isinstance(layout, SequenceLayout):
        raise ValueError(
            f"sequence_layout is missing: linear attention here has one of {num_ranks} runs of each row. Cut the batch "
            "(shard_batch), and hand its model_inputs() to the model."
        )
    unused = [name for name in ("attention_mask", "cache_params") if others.get(name) is not None]
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: linear attention over {num_ranks} ranks has no cache, and finds padding in the "
            "sequence_layout. Call the model with use_cache=False and attention_mask=None."
        )
    assert hidden_BsH.size(1) * num_ranks == layout.num_positions, f"{hidden_BsH.shape} of {layout.num_positions}"
    if layout.documents_BS is not None:
        is_real_Bs = run_of(layout.documents_BS, rank, num_ranks) != PADDING
        hidden_BsH = (hidden_BsH * is_real_Bs.unsqueeze(-1)).to(hidden_BsH.dtype)
    return hidden_BsH, others


def apply_linear_attention_parallel(model: nn.Module, sequence_mesh: DeviceMesh) -> None:
    """Make the linear-attention blocks of ``model`` compute on the whole sequence, some heads on each rank. In place.

    Every rank of ``sequence_mesh`` then calls the model's forward and backward together; a block's ``hidden_states``
    and output are the rank's own run [B, S/n, H], and the model takes ``sequence_layout`` as a keyword. A model without
    such blocks is left as it is. Before the outer FSDP; parameters stay whole and their gradients must be summed over
    the mesh. Not collective.

    Args:
        sequence_mesh: 1-D, ``Meshes.sequence``: rank i holds the i-th of n equal runs of positions.

    Raises:
        ValueError: heads that can't be split over the ranks, or other convolutions along the sequence: all of them in
            one message. From forward: packed rows, or inputs that were not cut.
    """
    assert sequence_mesh.ndim == 1
    num_ranks = sequence_mesh.size()
    blocks = _find_blocks(model)
    splits = {name: _find_heads(module, num_ranks) for name, (module, _) in blocks.items()}
    problems = [f"{name}: {problem}" for name, heads in splits.items() if (problem := heads.problem())]
    problems += _find_strangers(model, {module for module, _ in blocks.values()})
    if problems:
        raise ValueError(
            f"cp_size * tp_size = {num_ranks}: linear attention can't be split over the ranks of a sequence. "
            f"{'; '.join(problems)}. Choose sizes whose product divides the heads, or 1 for both."
        )
    if blocks:
        model.register_forward_pre_hook(_refuse_packed, with_kwargs=True)
    for name, (module, projections) in blocks.items():
        hooks = _SplitBlock(module, projections, splits[name], sequence_mesh)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks.leave, always_call=True)


def _find_blocks(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[Projection, ...]]]:
    """Blocks of the gated delta rule by name, and how they lay out their projections."""
    found = {}
    for name, module in model.named_modules():
        children = {child for child, _ in module.named_children()}
        params = {param for param, _ in module.named_parameters(recurse=False)}
        for layout in LAYOUTS:
            known = {projection.name for projection in layout} | {CONVOLUTION.name, "norm", "out_proj"}
            if children == known and params == {"A_log", "dt_bias"}:
                found[name] = (module, layout)
    return found


def _find_heads(module: nn.Module, num_ranks: int) -> Heads:
    block = cast(Any, module)
    return Heads(
        num_key=block.num_k_heads,
        num_value=block.num_v_heads,
        key_dim=block.head_k_dim,
        value_dim=block.head_v_dim,
        num_ranks=num_ranks,
    )


def _find_strangers(model: nn.Module, known: set[nn.Module]) -> list[str]:
    """Convolutions of the language model that would take each run for a whole sequence."""
    text = set((model.get_decoder() if isinstance(model, PreTrainedModel) else model).modules())
    return [
        f"{name} ({type(module).__name__}) has a convolution along the sequence that isn't known"
        for name, module in model.named_modules()
        if module in text - known and any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


def _refuse_packed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Once per forward: several documents in a row would share one state."""
    layout = kwargs.get("sequence_layout")
    if isinstance(layout, SequenceLayout) and layout.documents_BS is not None:
        ((last_document,),) = host.read_ints(layout.documents_BS.amax().view(1, 1))
        if last_document > 0:
            raise ValueError(
                "packing: a row holds several documents, and linear attention would carry the state of one into the "
                "next. Set packing: false, and micro_batch_size instead of micro_batch_tokens."
            )
