"""Linear attention over a shared sequence, by itself: one block against the same block whole in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from moesaic.kernels import apply_kernels, select_kernels
from moesaic.meshes import build_meshes
from moesaic.model.build import build_on_meta, find_auto_class
from moesaic.ops.sequence import SequenceLayout, run_of
from moesaic.parallel.linear_attention import (
    LAYOUTS,
    Heads,
    Projection,
    apply_linear_attention_parallel,
)
from tests.families.configs import tiny_config
from tests.oracle.cells import TOLERANCES, largest, rel_error
from tests.pool import RunRanks

NUM_ROWS, NUM_POSITIONS = 3, 24
FAMILIES = ("qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text")


def build_block(family: str, num_key_heads: int, num_value_heads: int = 8) -> nn.Module:
    """The first layer's linear attention, the same on every rank. It forgets slowly, as in the oracle's models."""
    config = tiny_config(family)
    config.update({"linear_num_key_heads": num_key_heads, "linear_num_value_heads": num_value_heads})
    torch.manual_seed(0)
    model = find_auto_class(config).from_config(config)
    (block,) = (m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    with torch.no_grad():
        for name, param in block.named_parameters():
            param.uniform_(-3, 0) if name == "A_log" else param.normal_(std=0.3)
    assert isinstance(block, nn.Module)
    return block


def mark_real(padded: bool) -> Tensor:
    """[B, S] bool. Padding behind a row's tokens leaves one of two runs, and of four two, with nothing else; the last
    row has it in front, where an unmasked state would reach the tokens."""
    position = torch.arange(NUM_POSITIONS)
    rows = (position >= 0, position < 11, position >= NUM_POSITIONS - 7)
    return torch.stack(rows if padded else rows[:1] * NUM_ROWS)


def run_whole(block: nn.Module, hidden: Tensor, is_real: Tensor, weights: Tensor, padded: bool) -> Tensor:
    """One process: all positions at once, padding as transformers is told of it. The loss is of real tokens alone."""
    out = block(hidden_states=hidden, attention_mask=is_real.long() if padded else None)
    (out * weights * is_real.unsqueeze(-1)).sum().backward()
    return out.detach()


def measure_block(
    mesh: DeviceMesh, family: str, num_key_heads: int, padded: bool, recomputes: bool
) -> dict[str, float]:
    """Errors of a run's output and input gradient, and of every parameter's gradient summed over ranks."""
    whole, split = (build_block(family, num_key_heads) for _ in range(2))
    apply_linear_attention_parallel(split, mesh)
    apply_kernels(split, select_kernels(device_type="cpu"))  # binds a forward of its own, hooks or not
    hidden = torch.randn(NUM_ROWS, NUM_POSITIONS, 64)
    weights = torch.randn_like(hidden)
    is_real = mark_real(padded)
    hidden.requires_grad_()
    documents = is_real.long() - 1 if padded else None
    layout = SequenceLayout(num_positions=NUM_POSITIONS, documents_BS=documents)
    cut = functools.partial(run_of, index=mesh.get_local_rank(), num_runs=mesh.size(), dim=1)
    state = dict(vars(split))

    out = run_whole(whole, hidden, is_real, weights, padded)
    own = cut(hidden.detach()).clone().requires_grad_()
    run: Any = functools.partial(checkpoint, split, use_reentrant=False) if recomputes else split
    # Twice, as micro-batches are: gradients add up.
    for share in (0.25, 0.75):
        own_out = run(hidden_states=own, attention_mask=None, sequence_layout=layout, use_cache=False)
        (own_out * cut(weights) * cut(is_real).unsqueeze(-1)).sum().mul(share).backward()

    assert vars(split) == state, "what the forward put on the module is gone"
    assert hidden.grad is not None and own.grad is not None
    errors = {"out": rel_error(own_out, cut(out)), "hidden": rel_error(own.grad, cut(hidden.grad))}
    for (name, param), (_, expected) in zip(split.named_parameters(), whole.named_parameters(), strict=True):
        assert param.grad is not None and expected.grad is not None, name
        dist.all_reduce(param.grad)
        errors[name] = rel_error(param.grad, expected.grad)
    return errors


# Key heads (of 4 ranks two share one where there are 2, all where there is 1), padding, recomputation.
BLOCKS = ((4, False, False), (4, True, True), (2, True, False), (1, False, True), (1, True, False))


def measure_blocks(rank: int, family: str) -> list[dict[str, float]]:
    mesh = build_meshes("cpu", cp_size=dist.get_world_size()).sequence
    return [measure_block(mesh, family, *case) for case in BLOCKS]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_what_one_process_computes(family: str, num_ranks: int, run_ranks: RunRanks) -> None:
    """Outputs and every gradient."""
    for results in run_ranks(measure_blocks, num_ranks, family):
        for case, errors in zip(BLOCKS, results, strict=True):
            assert largest(errors)[0] <= TOLERANCES["grads"], f"{case}: {errors}"


def count_exchanges(rank: int) -> list[int]:
    """Numbers that each exchange of one forward sends to other ranks."""
    sent: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d.alltoall_base_.default:
                sent.append(args[1].numel() * (dist.get_world_size() - 1) // dist.get_world_size())
            return func(*args, **(kwargs or {}))

    block = build_block("qwen3_5_moe_text", 4)
    apply_linear_attention_parallel(block, build_meshes("cpu", cp_size=dist.get_world_size()).sequence)
    layout = SequenceLayout(num_positions=16, documents_BS=None)
    with Count(), torch.no_grad():
        block(hidden_states=torch.randn(1, 16 // dist.get_world_size(), 64), sequence_layout=layout)
    return sent


def test_a_block_has_two_exchanges_of_what_leaves_the_rank(run_ranks: RunRanks) -> None:
    """4 key heads and 8 value heads of 8: q, k, v, z, b, a there, values back; 3/4 of a rank's 4 positions."""
    keys, values = 4 * 8, 8 * 8
    assert run_ranks(count_exchanges, 4) == [[3 * (2 * keys + 2 * values + 2 * 8), 3 * values]] * 4


def test_channels_by_rank() -> None:
    """k0 k1 v0 v1 v2 v3, as ``Heads.by_rank`` shows it; and both key heads' groups, of which four ranks take halves."""
    by_part, by_group = (Projection("in", ("key", "value"), by_key_head=grouped) for grouped in (False, True))
    x = torch.tensor([0, 1, 20, 21, 22, 23])
    two, four = (Heads(num_key=2, num_value=4, key_dim=1, value_dim=1, num_ranks=n) for n in (2, 4))
    assert two.by_rank(x, by_part).tolist() == [[0, 20, 21], [1, 22, 23]]
    assert four.by_rank(x, by_part).tolist() == [[0, 20], [0, 21], [1, 22], [1, 23]]
    grouped = torch.tensor([0, 20, 21, 1, 22, 23])
    assert two.by_rank(grouped, by_group).tolist() == [[0, 20, 21], [1, 22, 23]]
    assert four.by_rank(grouped, by_group).tolist() == [[0, 20], [0, 21], [1, 22], [1, 23]]
    assert all(len({projection.by_key_head for projection in layout}) == 1 for layout in LAYOUTS)


def refusal_of_apply(rank: int, num_key_heads: int, num_value_heads: int) -> str:
    block = build_block("qwen3_next", num_key_heads, num_value_heads)
    with pytest.raises(ValueError) as caught:
        apply_linear_attention_parallel(block, build_meshes("cpu", cp_size=dist.get_world_size()).sequence)
    assert not block._forward_pre_hooks
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "heads", "rule"),
    [
        (4, (2, 6), "2 key heads and 6 value heads over 4 ranks: each rank takes equally many value heads"),
        (4, (6, 12), "6 key heads and 12 value heads over 4 ranks: one of the numbers of key heads and of ranks must"),
    ],
)
def test_uneven_heads_are_refused(num_ranks: int, heads: tuple[int, int], rule: str, run_ranks: RunRanks) -> None:
    for message in run_ranks(refusal_of_apply, num_ranks, *heads):
        assert rule in message and "cp_size * tp_size = 4" in message and "Choose sizes" in message


def refusals_of_layers(rank: int) -> dict[str, str]:
    mesh = build_meshes("cpu", cp_size=2).sequence
    messages = {}
    for family in ("lfm2_moe", "jamba"):
        model = build_on_meta(tiny_config(family), attn_implementation=None, dtype=torch.float32)
        with pytest.raises(ValueError) as caught:
            apply_linear_attention_parallel(model, mesh)
        messages[family] = str(caught.value)
    plain = build_on_meta(tiny_config("qwen3_moe"), attn_implementation=None, dtype=torch.float32)
    apply_linear_attention_parallel(plain, mesh)
    assert not plain._forward_pre_hooks
    return messages


def test_other_convolutions_are_refused(run_ranks: RunRanks) -> None:
    """Each run would be a sequence of its own to them, without a word. Attention alone is somebody else's matter."""
    for messages in run_ranks(refusals_of_layers, 2):
        assert "model.layers.0.conv (Lfm2MoeShortConv) has a convolution along the sequence" in messages["lfm2_moe"]
        assert "JambaMambaMixer) has a convolution along the sequence" in messages["jamba"]


def refusals_of_forward(rank: int) -> list[str]:
    block = build_block("qwen3_5_moe_text", 2)
    apply_linear_attention_parallel(block, build_meshes("cpu", cp_size=2).sequence)
    hidden, state = torch.randn(1, 4, 64), dict(vars(block))
    packed = SequenceLayout(num_positions=8, documents_BS=torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]]))
    padded = SequenceLayout(num_positions=8, documents_BS=torch.tensor([[0, 0, 0, 0, 0, 0, -1, -1]]))
    cases: list[dict[str, Any]] = [
        {"sequence_layout": packed},
        {},
        {"sequence_layout": padded, "attention_mask": torch.ones(1, 4)},
    ]
    messages = []
    for kwargs in cases:
        with pytest.raises(ValueError) as caught:
            block(hidden_states=hidden, **kwargs)
        messages.append(str(caught.value))
    # A forward that fails half-way leaves the block as it was, so that it can run again.
    out_proj = block.get_submodule("out_proj")
    broken = out_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        block(hidden_states=hidden, sequence_layout=padded)
    broken.remove()
    assert vars(block) == state and "weight" not in vars(block.get_submodule("conv1d"))
    assert block(hidden_states=hidden, sequence_layout=padded).isfinite().all()
    return messages


def test_what_a_forward_refuses(run_ranks: RunRanks) -> None:
    for packed, uncut, masked in run_ranks(refusals_of_forward, 2):
        assert packed.startswith("packing: a row holds several documents") and "Set packing: false" in packed
        assert uncut.startswith("sequence_layout is missing") and "shard_batch" in uncut
        assert masked.startswith("attention_mask: ") and "attention_mask=None" in masked
