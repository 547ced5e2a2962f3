# The two commands a newcomer needs are `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEEDS  ?= 2000

.DEFAULT_GOAL := help
.PHONY: help install serve test lint format sim bench clean

help:           ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

install: $(STAMP)  ## build .venv; does nothing when it is up to date

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(STAMP)  ## start the server (not there yet: says what works today)
	@echo "quire serve: not yet. The scheduler, its cache and the simulator exist today; the real model and the"
	@echo "server are the next two pieces (see README.md, 'What works today'). Try: $(BIN)/quire sim"
	@exit 1

test: lint      ## everything CI runs: ruff, mypy, layers, pytest with the simulator
	$(BIN)/python -m pytest

lint: $(STAMP)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMP)   ## seeded worlds: SEEDS=5000 for that many, SEEDS=@77 to replay one
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

bench: $(STAMP)  ## the core's cost per operation and per step
	$(BIN)/python benchmarks/core.py

clean:          ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
