# The two commands a newcomer needs are `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# PyTorch is for GPUs; a CPU does better without it: `make serve BACKEND=torch` has it all the same.
BACKEND ?= $(if $(wildcard /proc/driver/nvidia/version),torch,native)
RUNTIME := $(VENV)/.runtime-$(BACKEND)
NATIVE := quire/backends/native
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard $(NATIVE)/csrc/*)
PORT   ?= 8000
ARGS   ?=
SEEDS  ?= 2000
PROMPTS ?= 300
# One more than there are cores: some tests wait for servers most of the time.
JOBS   ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1) + 1)

.DEFAULT_GOAL := help

.PHONY: help install serve test check lint style format sim equality precision structured bench sanitize clients clean

help:           ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

install: $(STAMP)  ## build .venv; does nothing when it is up to date

# When only C has changed, no dependency has; and with the tools at hand pip compiles only what is new.
quickly = test -e $@ && echo --no-deps; $(BIN)/python -c 'import scikit_build_core' 2>/dev/null && \
	command -v cmake >/dev/null && echo --no-build-isolation

# A venv that is missing or broken is made anew. pip builds the C library too.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "quire needs Python 3.11 \
	or newer, $(PYTHON) is %d.%d: say make PYTHON=python3.12 or the like" % v[:2])'
	@for compiler in "$$CC" cc gcc clang; do command -v "$$compiler" >/dev/null && exit; done; \
		echo "quire needs a C compiler: install gcc or clang"; exit 1
	@set -e; began=$$(date +%s); phase() { echo "[$$(($$(date +%s) - began)) s] $$1"; }; \
	if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		phase "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
	fi; \
	phase "downloading packages and compiling the C library; the first time this takes minutes"; \
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt \
		--editable '.[$(EXTRAS)]' $(if $(filter pyproject.toml constraints.txt,$?),,$$($(quickly))); \
	phase "compiling Python files"; \
	$(BIN)/python -m compileall -qq -j 0 -x /transformers/models/ $(VENV)/lib || true; \
	phase "installed"
endef

$(STAMP): EXTRAS := dev
$(STAMP): $(SOURCES)
	$(install)
	@touch $(VENV)/.runtime-native $(VENV)/.runtime-torch $@

$(RUNTIME): EXTRAS := server,$(BACKEND),hub
$(RUNTIME): $(SOURCES)
	@echo "installing the server and its $(BACKEND) backend into $(VENV)"
	$(install)
	@touch $@

serve: $(RUNTIME)  ## from nothing to a server with the default model and its first answer: PORT=8000 ARGS=...
	@exec $(BIN)/quire serve --port $(PORT) --hello $(ARGS)

test: style     ## everything CI runs: ruff, layers, pytest with mypy among its tests and the simulator
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: style    ## ruff, layers, mypy and the quick tests: two minutes. Before a commit
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --quick

lint: style     ## ruff, mypy --strict, import-linter
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMP)   ## the proof, in seeded worlds: SEEDS=5000 for that many, 100:200 for those, @77 to replay one
	@$(BIN)/python -m tests.sim --seeds $(SEEDS)

equality: $(STAMP)  ## greedy answers of the real model, alone and in every kind of company: PROMPTS=300 BACKEND=torch
	@$(BIN)/python -m tests.equality --prompts $(PROMPTS) --backend $(BACKEND)

precision: $(STAMP)  ## the native backend's distributions against fp32 of the same weights, at every position of a text
	@$(BIN)/python -m tests.precision

structured: $(STAMP)  ## the real model's answers in the shapes of 240 JSON schemas, judged by another library
	@$(BIN)/python -m tests.structured

bench: $(STAMP)  ## the core's cost per operation and per step; `quire bench` measures a model
	$(BIN)/python benchmarks/core.py

# Python is not built with the sanitizers, so theirs come before it; what Python itself never frees is no leak.
sanitize: $(STAMP)  ## the native backend's tests, its C under the address and undefined-behaviour sanitizers of gcc
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/sanitize/site . \
		--config-settings build-dir=build/sanitize/objects --config-settings cmake.build-type=Debug \
		--config-settings cmake.define.QUIRE_SANITIZE=ON
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 QUIRE_NATIVE_LIBRARY=$$(ls $(CURDIR)/build/sanitize/site/$(NATIVE)/libquire_native.*) \
		$(BIN)/python -m pytest --capture=sys tests/$(NATIVE:quire/%=%)

clients: $(STAMP)  ## clients nobody here wrote, in environments of their own, against the real server: CLIENTS="llm litellm"
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

clean:          ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	rm -f $(NATIVE)/libquire_native.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
