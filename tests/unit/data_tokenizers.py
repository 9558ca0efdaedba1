"""Tiny tokenizers with chat templates, built in memory."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def marked_chatml(after_mark: str, inside_mark: str = "") -> str:
    """ChatML with generation marks; the end of a turn is written inside the marks or after them."""
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}" + inside_mark + "{% endgeneration %}" + after_mark + "{% else %}"
        "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


MARKED = marked_chatml("\n", "<|im_end|>")
MARKED_NEWLINE_INSIDE = marked_chatml("", "<|im_end|>\n")
MARKED_END_OUTSIDE = marked_chatml("<|im_end|>\n")

# As Qwen3: the last answer gets an (empty) thinking block that earlier answers don't have.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The blank before an answer belongs to the template, and byte-level BPE joins it with the answer's first word.
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|im_end|>"
    "{% else %}Question: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


def build_tokenizer(
    chat_template: str | None = CHATML, *, trim_offsets: bool = False, bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, about 300 tokens; eos is <|im_end|>, and with ``bos`` the tokenizer itself begins with <bos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, what is the sum of it? the answer is: the sum\n\n\n\n"] * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        chat_template=chat_template,
    )
