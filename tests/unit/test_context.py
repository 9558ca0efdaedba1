"""Attention over parts of sequences, without ranks: masks, what the base attention is given, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moesaic.config import Recipe
from moesaic.data.batch import Batch
from moesaic.model.build import build_on_meta
from moesaic.ops.attention_mask import Documents, build_flash_arguments, build_mask
from moesaic.ops.head_exchange import repeat_heads
from moesaic.ops.sequence import SequenceLayout, number_documents
from moesaic.parallel.context import (
    ATTENTION_FUNCTION,
    MODES,
    SharedAttention,
    apply_context_parallel,
    attention_forward,
    attention_mask,
    build_mode,
    find_attentions,
)
from tests.families.configs import tiny_config

CPU = torch.device("cpu")


class FakeMesh:
    """A group of ``size`` ranks that nothing is sent over."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def get_group(self) -> FakeMesh:
        return self


def fake_meshes(cp_size: int = 1, tp_size: int = 1) -> Any:
    return SimpleNamespace(data={"cp": FakeMesh(cp_size)}, sizes=SimpleNamespace(cp_size=cp_size, tp_size=tp_size))


def lay_out(rows: list[list[int]] | None, num_positions: int = 6) -> SequenceLayout:
    documents = None if rows is None else torch.tensor(rows)
    layout = SequenceLayout(num_positions=len(rows[0]) if rows else num_positions, documents_BS=documents)
    if documents is not None:
        layout.kept[Documents] = Documents.read(documents)
    return layout


def mask_rows(layout: SequenceLayout, window: int | None = None) -> list[list[str]]:
    mask = build_mask(layout, window, CPU)
    assert mask is not None
    return [["".join("x" if seen else "." for seen in query) for query in row] for row in mask[:, 0].tolist()]


# ------------------------------------------------------------------------------------------------------------- masks


def test_no_mask_where_causal_attention_is_right() -> None:
    assert build_mask(lay_out(None), None, CPU) is None
    assert build_mask(lay_out(None), 6, CPU) is None, "a window that holds all positions hides none"


def test_padding_behind_a_document_needs_no_mask() -> None:
    """Nothing before it sees it; a row of padding alone sees itself."""
    assert build_mask(lay_out([[0, 0, -1], [0, 0, 0], [-1, -1, -1]]), None, CPU) is None


def test_documents_of_a_row_are_apart_and_so_is_padding() -> None:
    assert mask_rows(lay_out([[0, 0, 1, 1, -1]])) == [["x....", "xx...", "..x..", "..xx.", "....x"]]


def test_padding_before_a_document_is_hidden() -> None:
    assert mask_rows(lay_out([[-1, -1, 0, 0]])) == [["x...", "xx..", "..x.", "..xx"]]


def test_a_document_that_padding_interrupts_is_one() -> None:
    assert mask_rows(lay_out([[0, -1, 0]])) == [["x..", ".x.", "x.x"]]


def test_windows() -> None:
    assert mask_rows(lay_out(None, 4), 2) == [["x...", "xx..", ".xx.", "..xx"]]
    assert mask_rows(lay_out([[0, 0, 0, 1]]), 2) == [["x...", "xx..", ".xx.", "...x"]]
    assert mask_rows(lay_out([[0, 0, 0, -1]]), 2) == [["x...", "xx..", ".xx.", "..xx"]], "padding may see anything"


@pytest.mark.parametrize("rows", [[[0, 0, 1, 1, -1]], [[-1, 0, 0]], [[0, -1, 0, 1]], [[-1, -1, -1], [0, 1, 1]]])
@pytest.mark.parametrize("window", [None, 1, 2])
def test_every_query_sees_a_key(rows: list[list[int]], window: int | None) -> None:
    mask = build_mask(lay_out(rows), window, CPU)
    assert mask is not None and bool(mask.any(dim=-1).all())


def test_padding_begins_no_document() -> None:
    """Positions of padding are 0, as those of a document's first token."""
    positions = torch.tensor([[0, 1, 0, 1, 0, 0]])
    documents = number_documents(positions, torch.tensor([[True] * 4 + [False] * 2]))
    assert documents is not None and documents.tolist() == [[0, 0, 1, 1, -1, -1]]


def test_a_row_that_begins_with_padding() -> None:
    is_real = torch.tensor([[False, False, True, True]])
    for positions in ([[0, 1, 2, 3]], [[0, 0, 0, 1]]):
        documents = number_documents(torch.tensor(positions), is_real)
        assert documents is not None and documents.tolist() == [[-1, -1, 0, 0]]


def test_positions_of_several_axes_say_nothing_of_documents() -> None:
    with pytest.raises(AssertionError, match="3-D position ids"):
        number_documents(torch.zeros(3, 1, 4, dtype=torch.int64), None)


# ----------------------------------------------------------------------------------------------------- base attention


class FakeBase:
    """Records what it was given; returns the queries."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        seen = {"groups": module.num_key_value_groups, "base": module.config._attn_implementation}
        self.calls.append({**kwargs, **seen, "layer": module.layer_idx, "mask": mask})
        return query.transpose(1, 2), None


@pytest.fixture
def base() -> Iterator[FakeBase]:
    fake = FakeBase()
    kept = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "flash_attention_2")}
    for name in kept:
        ALL_ATTENTION_FUNCTIONS.register(name, fake)
    yield fake
    for name, function in kept.items():
        ALL_ATTENTION_FUNCTIONS.register(name, function)


def build_attention(implementation: str, **attributes: Any) -> nn.Module:
    module = nn.Module()
    config = Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2, attn_implementation=implementation)
    cast(Any, module).layer_idx, cast(Any, module).num_key_value_groups = 3, 17
    cast(Any, module).shared_attention = SharedAttention(mode=None, cp_size=1, config=config)
    for name, value in attributes.items():
        cast(Any, module).__setattr__(name, value)
    return module


def attend(module: nn.Module, layout: SequenceLayout | None, num_rows: int = 1, size: int = 0, **kwargs: Any) -> Tensor:
    size = size or (layout.num_positions if layout else 6)
    query, key = torch.randn(num_rows, 4, size, 8), torch.randn(num_rows, 2, size, 8)
    return attention_forward(module, query, key, key, None, sequence_layout=layout, **kwargs)[0]


def test_heads_are_those_that_are_there(base: FakeBase) -> None:
    out = attend(build_attention("sdpa"), lay_out(None))
    assert out.shape == (1, 6, 4, 8)
    (call,) = base.calls
    assert (call["groups"], call["base"], call["layer"]) == (2, "sdpa", 3)


def test_what_is_of_own_positions_is_not_passed_on(base: FakeBase) -> None:
    attend(build_attention("flash_attention_2"), lay_out(None), position_ids=torch.arange(6)[None], scaling=0.5)
    (call,) = base.calls
    assert call["scaling"] == 0.5 and call["mask"] is None and call["is_causal"]
    assert not {"position_ids", "cu_seq_lens_q", "sequence_layout"} & call.keys()


def test_masks_are_made_once_for_all_layers_of_a_window(base: FakeBase) -> None:
    layout = lay_out([[0, 0, 1, 1]])
    for window in (None, 2, None, 2):
        attend(build_attention("sdpa", sliding_window=window), layout)
    attend(build_attention("sdpa", sliding_window=3), layout, sliding_window=2)  # what is passed is what counts
    first, second, *others = [call["mask"] for call in base.calls]
    assert first is not second and [m is s for m, s in zip(others, (first, second, second), strict=True)] == [True] * 3


def test_flash_attention_gets_where_documents_end_in_all_rows(base: FakeBase) -> None:
    layout = lay_out([[0, 0, 1, -1], [0, 0, 0, 0], [-1, -1, -1, -1]])
    attend(build_attention("flash_attention_2"), layout, num_rows=3, sliding_window=2)
    (call,) = base.calls
    assert call["cu_seq_lens_q"].tolist() == call["cu_seq_lens_k"].tolist() == [0, 2, 3, 4, 8, 12]
    assert call["cu_seq_lens_q"].dtype == torch.int32
    assert (call["max_length_q"], call["max_length_k"], call["mask"], call["sliding_window"]) == (4, 4, None, 2)


def test_flash_attention_without_documents_gets_nothing() -> None:
    assert build_flash_arguments(lay_out(None), CPU) == {}


def test_sinks_reach_flash_attention(base: FakeBase) -> None:
    sinks = torch.arange(4.0)
    attend(build_attention("flash_attention_2"), lay_out(None), s_aux=sinks)
    assert base.calls[0]["s_aux"] is sinks


# ----------------------------------------------------------------------------------------------------------- refusals


def test_sinks_are_refused_with_sdpa() -> None:
    """It would ignore them."""
    with pytest.raises(ValueError, match="attention sinks need attn_implementation flash_attention_2"):
        attend(build_attention("sdpa"), lay_out(None), s_aux=torch.zeros(4))


@pytest.mark.parametrize("kwargs", [{"is_causal": False}, {"position_bias": torch.zeros(1, 4, 6, 6)}])
def test_what_the_layout_does_not_describe_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a position bias, or attention that isn't causal"):
        attend(build_attention("sdpa"), lay_out(None), **kwargs)


def test_a_batch_that_was_not_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cut the batch with moesaic\.data\.shard\.shard_batch"):
        attend(build_attention("sdpa"), None)
    with pytest.raises(ValueError, match=r"cut the batch with moesaic\.data\.shard\.shard_batch"):
        attend(build_attention("sdpa"), lay_out(None), size=5)


def build_model(family: str = "qwen3_moe", **changes: Any) -> Any:
    config = copy.copy(tiny_config(family))
    for name, value in changes.items():
        setattr(config, name, value)
    return build_on_meta(config, attn_implementation=None, dtype=torch.float32)


def test_a_model_refuses_what_was_not_cut() -> None:
    model = build_model()
    apply_context_parallel(model, fake_meshes(tp_size=2))
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    batch = Batch(input_ids=ids, labels=ids, position_ids=ids)
    with pytest.raises(ValueError, match="Qwen3MoeModel: its ranks share each sequence"):
        model(**batch.model_inputs())
    with pytest.raises(ValueError, match="Qwen3MoeModel: its ranks share each sequence"):
        model(**batch.model_inputs() | {"attention_mask": ids, "sequence_layout": lay_out(None, 4)})


@pytest.mark.parametrize(
    ("family", "cp_size", "message"),
    [
        ("qwen3_moe", 3, r"cp_size=3, tp_size=1: qwen3_moe: a rank has 4 attention heads, which cp_size must divide"),
        ("gpt_oss", 2, r"attn_implementation='eager' can't attend .*; choose flash_attention_2 or flash_attention_3"),
        ("deepseek_v4", 2, r"attn_implementation='eager' .*; this model has no other; set cp_size and tp_size 1"),
        ("glm_moe_dsa", 2, r"layer_types indexed_attention look at positions that a rank doesn't hold"),
        ("zaya", 2, r"layer_types hybrid look at"),
        ("jamba", 2, r"JambaMambaDecoderLayer \(JambaMambaMixer\) mixes positions elsewhere than at"),
        ("lfm2_moe", 2, r"Lfm2MoeDecoderLayer \(Lfm2MoeShortConv\) mixes positions elsewhere than at"),
        ("minimax", 2, r"MiniMaxDecoderLayer \(MiniMaxLightningAttention, .*\) mixes positions elsewhere than at"),
        ("diffusion_gemma", 2, r"DiffusionGemmaDecoderTextAttention isn't causal"),
    ],
)
def test_models_that_cannot_share_sequences(family: str, cp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_context_parallel(build_model(family), fake_meshes(cp_size=cp_size))


def test_a_window_that_only_a_mask_has_is_refused() -> None:
    config = tiny_config("phimoe")
    config.sliding_window = 5
    model = build_on_meta(config, attn_implementation=None, dtype=torch.float32)
    with pytest.raises(ValueError, match="PhimoeAttention: its sliding window is only in a mask"):
        apply_context_parallel(model, fake_meshes(cp_size=2))


def test_a_convolution_beside_attention_is_refused() -> None:
    model = build_model()
    model.get_decoder().layers[1].self_attn.conv = nn.Conv1d(4, 4, 3)
    with pytest.raises(ValueError, match=r"Qwen3MoeDecoderLayer \(Qwen3MoeAttention\) mixes positions elsewhere"):
        apply_context_parallel(model, fake_meshes(cp_size=2))


def test_heads_are_those_that_tp_leaves() -> None:
    with pytest.raises(ValueError, match="a rank has 2 attention heads, which cp_size must divide"):
        apply_context_parallel(build_model(), fake_meshes(cp_size=4, tp_size=2))


def test_the_recipe_names_the_modes() -> None:
    assert set(get_args(Recipe.model_fields["cp_mode"].annotation)) == MODES.keys()


def test_unknown_modes() -> None:
    with pytest.raises(ValueError, match=r"cp_mode='rings': unknown; choose one of \['ulysses'\]"):
        build_mode("rings", cast(Any, FakeMesh(2)))


def test_masks_of_own_positions_are_refused() -> None:
    assert attention_mask(batch_size=1, q_length=2, kv_length=2) is None  # type: ignore[func-returns-value]
    model = build_model()
    apply_context_parallel(model, fake_meshes(tp_size=2))
    config, embeddings = model.get_decoder().config, torch.zeros(1, 4, 8)
    common: dict[str, Any] = {"config": config, "inputs_embeds": embeddings, "past_key_values": None}
    assert create_causal_mask(**common, attention_mask=None) is None
    with pytest.raises(ValueError, match="attention_mask: describes a rank's own positions only"):
        create_causal_mask(**common, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="overlays its causal mask"):
        create_causal_mask(**common, attention_mask=None, or_mask_function=lambda *place: True)


# --------------------------------------------------------------------------------------------------------------- apply


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_the_configs_that_users_see_stay_as_they_are(family: str) -> None:
    model = build_model(family)
    before = model.config.to_json_string()
    apply_context_parallel(model, fake_meshes(tp_size=2))
    assert model.config.to_json_string() == before
    assert model.config._attn_implementation == model.config.get_text_config()._attn_implementation == "sdpa"
    assert model.get_decoder().config._attn_implementation == ATTENTION_FUNCTION
    attentions = find_attentions(model)
    assert len(attentions) == 2 and all("language_model" in n or "visual" not in n for n in attentions)
    assert {cast(Any, m).config._attn_implementation for m in attentions.values()} == {ATTENTION_FUNCTION}


def test_heads_are_repeated_only_as_often_as_needed() -> None:
    heads = torch.arange(3)[None, :, None, None]
    assert repeat_heads(heads, 3) is heads and repeat_heads(heads, 1) is heads
    assert repeat_heads(heads, 2).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert repeat_heads(heads[:, :2], 4).flatten().tolist() == [0, 0, 1, 1]
    assert repeat_heads(heads[:, :2], 2).flatten().tolist() == [0, 1]
