"""Packing changes neither what a document sees nor the loss."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from moesaic.data import Batch, Sample, shift_labels
from moesaic.data.batch import find_loss_positions
from moesaic.data.packing import NUM_OPEN_ROWS, RowOptions, build_rows, collate, pack_rows
from moesaic.train.losses import count_loss_tokens, token_loss_sum

VOCABULARY = 64
PAD = 0
PACKED = RowOptions(cutoff_len=16, packing=True, pad_token_id=PAD)
PADDED = RowOptions(cutoff_len=16, packing=False, pad_token_id=PAD)


def build_sample(length: int, seed: int) -> Sample:
    stream = random.Random(seed)
    ids = [stream.randrange(1, VOCABULARY) for _ in range(length)]
    return Sample(input_ids=ids, labels=shift_labels(ids, [position >= length // 3 for position in range(length)]))


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    config._attn_implementation = "sdpa"
    return Qwen3MoeForCausalLM(config).eval()


def run(model: Qwen3MoeForCausalLM, batch: Batch) -> torch.Tensor:
    """Logits at every position."""
    with torch.no_grad():
        return model(**replace(batch, loss_positions=None).model_inputs()).logits


def summed_loss(model: Qwen3MoeForCausalLM, batch: Batch) -> float:
    logits = run(model, batch).double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"))


def test_shift_labels():
    trained = [False, False, False, True, True]
    assert shift_labels([10, 11, 12, 13, 14], trained) == [-100, -100, 13, 14, -100]
    assert shift_labels([7], [True]) == [-100]
    assert shift_labels([], []) == []


def test_pack_rows_example():
    assert pack_rows([5, 6, 3, 2], [0, 1, 2, 3], 8) == [(0, 2), (1, 3)]
    # best fit, not first fit: the 2 goes to the row with 2 left although another with 3 left is older
    assert pack_rows([5, 6, 2], [0, 1, 2], 8) == [(0,), (1, 2)]


def test_pack_rows_places_every_document_once():
    stream = random.Random(0)
    lengths = [stream.randrange(1, 17) for _ in range(500)]
    order = list(range(500))
    stream.shuffle(order)
    rows = pack_rows(lengths, order, 16)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= 16 for row in rows)
    assert len(rows) <= 1.1 * sum(lengths) / 16
    assert rows == pack_rows(lengths, order, 16)


def test_pack_rows_keeps_a_bounded_window():
    # a row opened long ago has room for the last document, but is closed by then
    lengths = [15, *[16] * NUM_OPEN_ROWS, 1]
    rows = pack_rows(lengths, range(len(lengths)), 16)
    assert rows[0] == (0,) and rows[-1] == (len(lengths) - 1,)


def test_packed_batch():
    first, second = build_sample(3, 1), build_sample(2, 2)
    batch = collate([first, second], [(0, 1), ()], RowOptions(cutoff_len=8, packing=True, pad_token_id=PAD))
    assert batch.attention_mask is None
    assert batch.input_ids.tolist() == [[*first.input_ids, *second.input_ids, 0, 0, 0] + [0] * 8]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2] + list(range(8))]
    assert batch.labels.tolist() == [[*first.labels, *second.labels, -100, -100, -100] + [-100] * 8]
    assert batch.labels[0, 2] == -100  # the first document's last token doesn't predict the second's first
    assert batch.document_lengths == (3, 2)  # neither the padding nor the row without documents
    assert batch.real_tokens.tolist() == [[True] * 5 + [False] * 11]


@pytest.mark.parametrize("lengths", [[4, 1, 9, 9, 7], [16, 16], [3, 16]])
def test_flash_attention_sees_packed_documents(lengths):
    """transformers looks for restarting positions in a batch of one row only: elsewhere documents would mix."""
    samples = [build_sample(length, seed) for seed, length in enumerate(lengths)]
    rows = build_rows(samples, range(len(samples)), PACKED)
    batch = collate(samples, rows, PACKED)
    assert len(rows) == 2 and batch.input_ids.shape == (1, 32)
    assert _is_packed_sequence(batch.position_ids, batch_size=batch.input_ids.shape[0])
    starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
    assert starts[0] == 0 and 16 in starts  # each row starts a document, also after a row without padding


def test_padded_batch():
    first, second = build_sample(3, 1), build_sample(2, 2)
    options = RowOptions(cutoff_len=8, packing=False, pad_token_id=PAD, pad_to_multiple_of=2)
    batch = collate([first, second], [(0,), (1,), ()], options)
    assert batch.attention_mask is not None
    assert batch.input_ids.tolist() == [[*first.input_ids, 0], [*second.input_ids, 0, 0], [0] * 4]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert int(count_loss_tokens(batch.labels)) == first.num_loss_tokens + second.num_loss_tokens
    assert batch.document_lengths == (3, 2)
    assert batch.real_tokens.sum(1).tolist() == [3, 2, 0]  # the mask's lone 1 in an empty row is no token
    assert collate([first, second], [()], PADDED).input_ids.shape == (1, 1)


def test_model_inputs_have_no_labels():
    inputs = collate([build_sample(3, 1)], [(0,)], PADDED).model_inputs()
    assert set(inputs) == {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}
    assert inputs["use_cache"] is False


def test_moved_batch_is_equal():
    batch = collate([build_sample(3, 1)], [(0,)], PADDED)
    moved = batch.to("meta")
    assert moved.document_lengths == batch.document_lengths == (3,)
    assert moved.real_tokens.device.type == "meta"
    assert moved.labels.device.type == moved.attention_mask.device.type == "meta"  # type: ignore[union-attr]
    assert collate([build_sample(3, 1)], [(0,)], PACKED).to("meta").attention_mask is None
    assert torch.equal(batch.to("cpu").position_ids, batch.position_ids)


def test_packed_logits_equal_each_document_alone(model):
    # 4 + 1 + 9 leaves a padded tail; 9 + 7 fills its row exactly
    samples = [build_sample(length, seed) for seed, length in enumerate([4, 1, 9, 9, 7])]
    rows = [(0, 1, 2), (3, 4)]
    logits = run(model, collate(samples, rows, PACKED))
    for number, row in enumerate(rows):
        start = number * PACKED.cutoff_len
        for index in row:
            ids = torch.tensor([samples[index].input_ids])
            with torch.no_grad():
                alone = model(input_ids=ids, use_cache=False).logits[0]
            # fp32, other matmul shapes: rounding only
            torch.testing.assert_close(logits[0, start : start + ids.shape[1]], alone, rtol=0, atol=1e-5)
            start += ids.shape[1]


def test_packed_loss_equals_padded_loss(model):
    samples = [build_sample(length, seed) for seed, length in enumerate([4, 1, 9, 9, 7, 16, 3])]
    packed = collate(samples, build_rows(samples, range(7), PACKED), PACKED)
    padded = collate(samples, [*build_rows(samples, range(7), PADDED), ()], PADDED)
    assert int(count_loss_tokens(packed.labels)) == int(count_loss_tokens(padded.labels)) > 0
    # sum of 40 losses of about 4, fp32 logits
    assert summed_loss(model, packed) == pytest.approx(summed_loss(model, padded), rel=1e-6)


def test_empty_rows_are_valid_input(model):
    for options in (PACKED, PADDED):
        for rows in ([()], [(), (0,)]):
            assert run(model, collate([build_sample(5, 0)], rows, options)).isfinite().all()


def test_too_long_document_is_an_error():
    with pytest.raises(ValueError, match="sample 1 has 17 tokens.*cutoff_len=16"):
        build_rows([build_sample(3, 0), build_sample(17, 1)], range(2), PACKED)


@pytest.mark.parametrize("packing", [False, True])
def test_logits_at_loss_positions_alone_give_the_same_loss_and_gradients(packing: bool) -> None:
    """What the loader's batches leave out (prompts, padding) carries no loss."""
    torch.manual_seed(0)
    documents = [Sample(input_ids=[5, 6, 7, 8], labels=[-100, 7, 8, -100]), Sample(input_ids=[9, 5], labels=[5, -100])]
    options = RowOptions(cutoff_len=8, packing=packing, pad_token_id=0)
    batch = collate(documents, build_rows(documents, [0, 1], options), options)
    assert batch.loss_positions is not None and batch.loss_positions.numel() < batch.labels.size(1)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=10
    )
    model = LlamaForCausalLM(config)
    grads = []
    for variant in (batch, replace(batch, loss_positions=None)):
        loss = token_loss_sum(model(**variant.model_inputs()).logits, variant.kept_labels)
        loss.backward()
        grads.append({name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None})
        model.zero_grad()
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-5, atol=1e-7)


def test_a_batch_without_loss_keeps_one_position() -> None:
    assert find_loss_positions(torch.full((2, 3), -100)).tolist() == [0]
