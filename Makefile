# The two commands a newcomer needs are `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime
PORT   ?= 8000
ARGS   ?=
SEEDS  ?= 2000
PROMPTS ?= 300
JOBS   ?= auto

.DEFAULT_GOAL := help

.PHONY: help install serve test lint format sim equality bench clean

help:           ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

install: $(STAMP)  ## build .venv; does nothing when it is up to date

# A venv that is missing or broken is made anew.
define venv
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "quire needs Python 3.11 \
	or newer, $(PYTHON) is %d.%d: say make PYTHON=python3.12 or the like" % v[:2])'
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		$(PYTHON) -m venv --clear $(VENV)
endef

$(STAMP): pyproject.toml constraints.txt
	$(venv)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(RUNTIME) $@

$(RUNTIME): pyproject.toml constraints.txt
	$(venv)
	@echo "installing PyTorch and the server into $(VENV)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server,torch,hub]'
	@touch $@

serve: $(RUNTIME)  ## everything from nothing to a server with the default model and its first answer: PORT=8000 ARGS=...
	@exec $(BIN)/quire serve --port $(PORT) --hello $(ARGS)

test: lint      ## everything CI runs: ruff, mypy, layers, pytest with the simulator
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMP)   ## the proof, in seeded worlds: SEEDS=5000 for that many, 100:200 for those, @77 to replay one
	@$(BIN)/python -m tests.sim --seeds $(SEEDS)

equality: $(STAMP)  ## greedy answers of the real model, alone and in every kind of company: PROMPTS=300
	@$(BIN)/python -m tests.equality --prompts $(PROMPTS)

bench: $(STAMP)  ## the core's cost per operation and per step; `quire bench` measures a model
	$(BIN)/python benchmarks/core.py

clean:          ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
