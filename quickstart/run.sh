#!/usr/bin/env bash
# The quickstart, step by step: each line is a command that you could give yourself. Run from the repository's root.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/quickstart
heldout=$build/data/heldout.jsonl
rm -rf "$build/run" # a run starts from the beginning; the models are kept, and made only once

step() { printf '\n== %s (%d s since the start)\n' "$1" "$SECONDS"; }

step "a dense model, upcycled to a mixture of experts"
python -m quickstart.prepare_model
step "sums to train on, and others to ask afterwards"
python -m quickstart.sums --out-folder "$build/data"
step "before training"
python -m quickstart.evaluate "$build/model" "$heldout" --out "$build/before.json"
step "training on 4 local processes: ep 2, efsdp 2"
moesaic check recipes/quickstart.yaml --world 4
moesaic train recipes/quickstart.yaml --nproc 4
step "after training, asked of the exported model in plain transformers"
python -m quickstart.evaluate "$build/run/export" "$heldout" --out "$build/after.json"
step "result"
python -m quickstart.compare "$build/before.json" "$build/after.json"
step "reinforcement learning: a 5M model that spells some words backward, from its own short fine-tuning"
rm -rf build/tiny_rl/grpo
python -m quickstart.tiny_rl --out build/tiny_rl
step "GRPO on 4 local processes: ep 2, efsdp 2"
moesaic train recipes/rl/grpo_tiny.yaml --nproc 4
step "what its rewards became"
python -m quickstart.rewards build/tiny_rl/grpo/metrics.jsonl
