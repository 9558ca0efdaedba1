"""Tensor parallelism with sequence parallelism: dense matrices split over tp, and tokens too wherever they are not.

Between its matrices the model holds each rank's own run of positions (``ops/sequence.py``), so norms, routers and
experts see every token once, and an expert exchange may span tp. Around each pair of split matrices the runs of a tp
group are gathered, and what its ranks compute is summed and cut into runs again:

    embedding     rows of the vocabulary     every position -> own rows -> sum_runs
    attention     heads                      gather_runs -> q, k, v, attention -> o -> sum_runs
    dense MLP     width                      gather_runs -> gate, up -> down -> sum_runs     (a shared expert too)
    head          rows of the vocabulary     gather_runs -> own columns of the logits; the loss is taken across ranks
    value head    whole, replicated          share_runs -> every value, the same on every rank, and so the loss

What is split becomes a DTensor on tp, read as its local shard in forward. Everything else stays a plain parameter: its
ranks compute on different tokens, so the outer FSDP shards it over tp as over mp_shard and sums its gradients there
(``Meshes.unsplit``). That is the one rule that keeps norms and routers right; no gradient is summed by hand.

The model's own code runs on shorter runs, fewer heads and a narrower MLP, all read from tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from moesaic.model.value_head import value_head_name
from moesaic.ops.runs import gather_runs, share_runs, sum_runs
from moesaic.ops.sequence import run_of

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "g_proj", "up_proj"})
ROWS = frozenset({"o_proj", "down_proj"})
# Inside attention, on all positions and for all heads: low-rank inputs of what is split.
WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
KEY_VALUE = frozenset({"k_proj", "v_proj"})
# Parameters of attention itself with one number per query head.
PER_HEAD = frozenset({"gate_bias"})
# Norms of attention that may span all heads of what the matrix gives, and not each head alone.
NORMS: Mapping[str, str] = MappingProxyType({"q_norm": "q_proj", "k_norm": "k_proj"})


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Which columns of the logits a rank has: those of tokens ``first`` and following.

    Attributes:
        group: whose ranks have all of them between them.
        size: tokens of the whole vocabulary.
    """

    group: dist.ProcessGroup
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class _SplitModule:
    """A module whose inputs are gathered: attention, or an MLP. ``rows`` is the matrix whose outputs are summed."""

    name: str
    module: nn.Module
    columns: tuple[str, ...]
    rows: str
    is_attention: bool

    def linear(self, name: str) -> nn.Linear:
        """A matrix by its name in the module."""
        return cast(nn.Linear, self.module.get_submodule(name))


def vocabulary_shard(model: nn.Module) -> VocabularyShard | None:
    """What ``apply_tensor_parallel`` made of the model's head; None where its logits are whole."""
    return cast("VocabularyShard | None", model.__dict__.get("vocabulary_shard"))


def apply_tensor_parallel(model: PreTrainedModel, tp_mesh: DeviceMesh, blocks: Sequence[nn.Module]) -> None:
    """Split the matrices of ``model`` (on meta, or whole and equal on every rank) over tp. In place, nothing is sent.

    Afterwards the model takes all positions of a cp index, the same on its tp ranks, and gives its logits for them and
    for this rank's part of the vocabulary (``vocabulary_shard``). Before the outer FSDP, after expert parallelism.

    Args:
        tp_mesh: the tp axis of the dense view.
        blocks: the language model's blocks.

    Raises:
        ValueError: heads, widths or modules that can't be split so; all of them in one message.
    """
    names = {module: name for name, module in model.named_modules()}
    split = [found for block in blocks for found in _find_split_modules(block, names)]
    problems = [p for found in split for p in _problems(found, tp_mesh.size())]
    problems += [f"{names[b]} ({type(b).__name__}): no attention that tp can split" for b in _without(blocks, split)]
    # The tokens' embedding gives runs; what another one gives, of all positions, would meet them in the blocks.
    for module in model.get_decoder().modules():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            problems.append(f"{names[module]} ({type(module).__name__}): a second embedding isn't cut into runs")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        problems.append(f"{type(model).__name__}: no linear head over a vocabulary")
    rows_of_head = () if value_head_name(model) is not None else (getattr(head, "out_features", 1),)
    for rows in {model.get_input_embeddings().weight.size(0), *rows_of_head}:
        if not _rows_of(rows, tp_mesh.size() - 1, tp_mesh.size())[1]:
            problems.append(f"{type(model).__name__}: a vocabulary of {rows} leaves ranks without rows")
    if problems:
        raise ValueError(
            f"tp_size={tp_mesh.size()}: {'; '.join(dict.fromkeys(problems))}. Choose a tp_size that divides them, or 1."
        )
    for found in split:
        _apply_to_module(found, tp_mesh)
    _apply_to_vocabulary(model, cast(nn.Linear, head), tp_mesh)


def find_split_params(model: nn.Module, tp_mesh: DeviceMesh) -> set[nn.Parameter]:
    """The parameters that ``apply_tensor_parallel`` split."""
    return {p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh == tp_mesh}


def _find_split_modules(block: nn.Module, names: dict[nn.Module, str]) -> Iterator[_SplitModule]:
    for module in block.modules():
        linears = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
        is_attention = type(module).__name__.endswith("Attention")
        rows = sorted(linears & ROWS)
        if is_attention or (len(rows) == 1 and linears & COLUMNS):
            columns = tuple(sorted(linears & COLUMNS))
            yield _SplitModule(names[module], module, columns, rows[0] if len(rows) == 1 else "", is_attention)


def _without(blocks: Sequence[nn.Module], split: Sequence[_SplitModule]) -> list[nn.Module]:
    """Blocks whose tokens would never meet: without attention, and without linear attention, which is exchanged."""
    mixers = {found.module for found in split if found.is_attention}
    return [
        block
        for block in blocks
        if not any(module in mixers or type(module).__name__.endswith("GatedDeltaNet") for module in block.modules())
    ]


def _problems(found: _SplitModule, tp_size: int) -> Iterator[str]:
    """Why ``found`` can't be split over ``tp_size`` ranks."""
    where = f"{found.name} ({type(found.module).__name__})"
    linears = {name: child for name, child in found.module.named_children() if isinstance(child, nn.Linear)}
    if found.is_attention:
        unknown = sorted(linears.keys() - COLUMNS - ROWS - WHOLE)
        if unknown or not found.rows or not found.columns:
            yield f"{where}: not known how to split {', '.join(unknown) or 'it'}"
            return
        widths = {linears[name].out_features for name in found.columns}
        for name, param in found.module.named_parameters():
            child = name.partition(".")[0]
            is_known = child in linears or name in PER_HEAD or child in _norms_of_all_heads(found)
            if not is_known and (child == name or param.size(-1) in widths):
                yield f"{where}: {name} spans the heads"
        yield from _head_problems(found, linears, where, tp_size)
        return
    for name in found.columns:
        if linears[name].out_features % tp_size:
            yield f"{where}: {name} has {linears[name].out_features} outputs"


def _head_problems(found: _SplitModule, linears: dict[str, nn.Linear], where: str, tp_size: int) -> Iterator[str]:
    num_heads = _num_heads(found)
    if num_heads % tp_size:
        yield f"{where}: {num_heads} heads"
    num_kv_heads = _num_kv_heads(found, linears)
    if num_kv_heads % tp_size and (tp_size % num_kv_heads or "k_norm" in _norms_of_all_heads(found)):
        yield f"{where}: {num_kv_heads} key and value heads"


def _num_heads(found: _SplitModule) -> int:
    """Query heads: o_proj takes them all, each as wide as a value."""
    attention, config = cast(Any, found.module), cast(Any, found.module).config
    if "kv_b_proj" in found.columns:
        return int(config.num_attention_heads)
    return int(found.linear(found.rows).in_features // attention.head_dim)


def _num_kv_heads(found: _SplitModule, linears: dict[str, nn.Linear]) -> int:
    if "k_proj" not in linears:
        return _num_heads(found)
    return int(linears["k_proj"].out_features // cast(Any, found.module).head_dim)


def _norms_of_all_heads(found: _SplitModule) -> dict[str, nn.Module]:
    """Norms over the whole output of a split matrix, with one weight each; none in an MLP."""
    norms = {name: child for name, child in found.module.named_children() if NORMS.get(name) in found.columns}
    return {
        name: norm
        for name, norm in norms.items()
        if [p.shape for p in norm.parameters()] == [(found.linear(NORMS[name]).out_features,)]
    }


def _apply_to_module(found: _SplitModule, tp_mesh: DeviceMesh) -> None:
    group, module = tp_mesh.get_group(), found.module
    linears = {name: found.linear(name) for name in (*found.columns, found.rows)}
    num_kv_heads = _num_kv_heads(found, linears) if found.is_attention else tp_mesh.size()
    for name in found.columns:
        if name in KEY_VALUE and num_kv_heads % tp_mesh.size():
            # Fewer key and value heads than ranks: each computes all, and takes the one that its query heads share.
            head_dim = cast(Any, module).head_dim
            first = tp_mesh.get_local_rank() * num_kv_heads // tp_mesh.size() * head_dim
            linears[name].register_forward_hook(_take_columns(first, head_dim))
        else:
            _split(linears[name], {"weight": 0, "bias": 0}, tp_mesh)
    if found.is_attention and num_kv_heads % tp_mesh.size():
        cast(Any, module).num_key_value_groups = _num_heads(found) // tp_mesh.size()
    for norm in _norms_of_all_heads(found).values():
        _apply_to_norm(norm, tp_mesh)
    per_head = PER_HEAD & module._parameters.keys() if found.is_attention else frozenset()
    if per_head:
        _split(module, dict.fromkeys(sorted(per_head), 0), tp_mesh)
    _split(linears[found.rows], {"weight": 1}, tp_mesh)
    _sum_outputs(linears[found.rows], group)
    module.register_forward_pre_hook(_gather_inputs(group), with_kwargs=True)


def _apply_to_norm(norm: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Every rank computes the norm of all heads, gathered, and keeps its own: a weight's gradient is there alone."""
    group, rank = tp_mesh.get_group(), tp_mesh.get_local_rank()

    def keep_own(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return run_of(output, rank, group.size())

    norm.register_forward_pre_hook(lambda module, args: (gather_runs(args[0], group, args[0].ndim - 1), *args[1:]))
    norm.register_forward_hook(keep_own)


def _apply_to_vocabulary(model: PreTrainedModel, head: nn.Linear, tp_mesh: DeviceMesh) -> None:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), type(embedding).__name__
    group, rank = tp_mesh.get_group(), tp_mesh.get_local_rank()
    is_tied = embedding.weight is head.weight
    _split(embedding, {"weight": 0}, tp_mesh)
    first, num_rows = _rows_of(embedding.weight.size(0), rank, tp_mesh.size())
    _look_up_own_rows(embedding, first, num_rows, group)
    if value_head_name(model) is not None:
        # Every rank computes every value: whole on each, it gets the same whole gradient on each.
        _place(head, {"weight": Replicate(), "bias": Replicate()}, tp_mesh)
        model.get_decoder().register_forward_hook(_gather_hidden_states(share_runs, group))
        return
    _split(head, {"weight": 0, "bias": 0}, tp_mesh, tied_to=embedding if is_tied else None)
    model.get_decoder().register_forward_hook(_gather_hidden_states(gather_runs, group))
    chunk_first, _ = _rows_of(head.weight.size(0), rank, tp_mesh.size())
    cast(Any, model).vocabulary_shard = VocabularyShard(group=group, first=chunk_first, size=head.weight.size(0))


def _rows_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First row and number of rows of a rank's chunk, as DTensor cuts: chunks of ceil(n / W), the last ones shorter."""
    chunk = -(-num_rows // num_ranks)
    first = min(rank * chunk, num_rows)
    return first, min(chunk, num_rows - first)


def _split(module: nn.Module, dims: dict[str, int], tp_mesh: DeviceMesh, tied_to: nn.Module | None = None) -> None:
    """Make parameters of ``module`` DTensors, sharded along ``dims``; its forward reads their local shards."""
    _place(module, {name: Shard(dim) for name, dim in dims.items()}, tp_mesh, tied_to)


def _place(
    module: nn.Module, placements: Mapping[str, Placement], tp_mesh: DeviceMesh, tied_to: nn.Module | None = None
) -> None:
    split: list[str] = []
    for name, placement in placements.items():
        param = module._parameters.get(name)
        if param is None:
            continue
        if tied_to is not None and name == "weight":
            module.register_parameter(name, cast(nn.Parameter, tied_to._parameters[name]))
        else:
            local = distribute_tensor(param.detach(), tp_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
        split.append(name)
    _read_local(module, {name: placements[name] for name in split})


def _read_local(module: nn.Module, placements: Mapping[str, Placement]) -> None:
    """For the time of its forward, the module's parameters are what this rank has of them; so are their gradients."""
    swapped: list[dict[str, nn.Parameter | None]] = []

    def swap(module: nn.Module, args: Any) -> None:
        swapped.append({name: module._parameters[name] for name in placements})
        for name, placement in placements.items():
            param = module._parameters[name]
            if isinstance(param, DTensor):
                module._parameters[name] = param.to_local(grad_placements=[placement])

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(swapped.pop())

    module.register_forward_pre_hook(swap)
    module.register_forward_hook(restore, always_call=True)


def _sum_outputs(linear: nn.Linear, group: dist.ProcessGroup) -> None:
    """Sum the ranks' outputs and keep the own run; a bias, which tp doesn't split, is added to it once."""

    def without_bias(module: nn.Module, args: Any) -> None:
        kept.append(module._parameters["bias"])
        module._parameters["bias"] = None

    def sum_and_add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        run = sum_runs(output, group, output.ndim - 2)
        return run if kept[-1] is None else run + kept[-1]

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters["bias"] = kept.pop()

    kept: list[nn.Parameter | None] = []
    linear.register_forward_pre_hook(without_bias)
    linear.register_forward_hook(sum_and_add)
    linear.register_forward_hook(restore, always_call=True)  # recomputation may stop in here


def _gather_inputs(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Pre-hook: hidden states [B, s, H] or [N, H], the first argument or named so, become those of the whole group."""

    def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (gather_runs(args[0], group, args[0].ndim - 2), *args[1:]), kwargs
        states = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": gather_runs(states, group, states.ndim - 2)}

    return gather


def _gather_hidden_states(
    runs: Callable[[Tensor, dist.ProcessGroup, int], Tensor], group: dist.ProcessGroup
) -> Callable[..., Any]:
    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = runs(output["last_hidden_state"], group, 1)
        return output

    return gather


def _take_columns(first: int, num_columns: int) -> Callable[..., Any]:
    return lambda module, args, output: output.narrow(-1, first, num_columns)


def _look_up_own_rows(embedding: nn.Embedding, first: int, num_rows: int, group: dist.ProcessGroup) -> None:
    """The table holds rows ``first`` and following: other tokens give zeros, and the ranks' sum is cut into runs.

    A token of no rank's rows gives NaN, so that no step is taken with it; one process would fail.
    """
    fills: list[tuple[Tensor, Tensor]] = []

    def to_rows(module: nn.Module, args: Any) -> Any:
        rows = args[0] - first
        fills[:] = [((rows < 0) | (rows >= num_rows), (args[0] < 0) | (args[0] >= num_tokens))]
        return (rows.clamp(0, num_rows - 1), *args[1:])

    def sum_rows(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        is_other, is_unknown = (mask[..., None] for mask in fills.pop())
        return sum_runs(output.masked_fill(is_other, 0.0).masked_fill(is_unknown, float("nan")), group, 1)

    num_tokens = embedding.num_embeddings

    if embedding.padding_idx is not None:  # the row whose gradient torch leaves out
        row = embedding.padding_idx - first
        embedding.padding_idx = row if 0 <= row < num_rows else None
    embedding.register_forward_pre_hook(to_rows)
    embedding.register_forward_hook(sum_rows)
