# Start with `make serve` to run a server, or `make test` to run the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SYSTEM  := $(shell uname -s)
MACHINE := $(shell uname -m)
# MLX is used on Apple silicon, PyTorch on NVIDIA GPUs, and the native backend on other machines. `make serve BACKEND=torch`
# installs PyTorch anyway and serves with it.
BACKEND ?= $(if $(filter Darwin-arm64,$(SYSTEM)-$(MACHINE)),mlx,$(if $(wildcard /proc/driver/nvidia/version),torch,native))
RUNTIME := $(VENV)/.runtime-$(BACKEND)
NATIVE := quire/backends/native
LEVELS  := quire/engine/levels
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard $(NATIVE)/csrc/* $(LEVELS)/csrc/*)
PORT   ?= 8000
ARGS   ?=
LOCK   := requirements/core.lock
# LOCKED=1: packages of the lock are installed only if their files have its hashes. It is not the default because torch comes
# from a wheel of the machine, which has no hash that is known beforehand, and pip compares all hashes or none.
LOCKED ?=
SEEDS  ?= 2000
PROMPTS ?= 300
COSTS  := build/test-costs.json
# Two more than the number of cores, because some tests wait for servers most of the time.
JOBS   ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1) + 2)

# With `--costs FILE`, pytest would take a FILE that exists for tests, and not read tests/conftest.py, which has the option.
# The tests of a file run in one process, in their order: they share models and servers.
PYTEST  = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help

.PHONY: help install serve test check nightly lint style format sim equality precision structured bench sanitize gauntlet clients wheel docs lock audit sbom clean

help:           ## list the targets
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 18

install: $(STAMP)  ## create .venv; does nothing if it is up to date

# If only C sources changed, dependencies are not installed again. With the build tools installed, pip compiles only
# changed files.
quickly = test -e $@ && echo --no-deps; $(BIN)/python -c 'import scikit_build_core' 2>/dev/null && \
	command -v cmake >/dev/null && echo --no-build-isolation

# On macOS without the Command Line Tools, `cc` is a stub that opens a dialog; xcode-select opens none. Without them, the C
# libraries are not built (CMakeLists.txt); MLX does not need it.
without_compiler = $(if $(filter mlx,$(BACKEND)),echo "there is no C compiler: only the mlx backend is installed",\
	echo "the $(BACKEND) backend needs a C compiler: xcode-select --install"; exit 1)

# A missing or broken venv is created again. pip also builds the C libraries.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "quire needs Python 3.11 \
	or newer, $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v[:2])'
	@$(if $(filter Darwin,$(SYSTEM)),xcode-select -p >/dev/null 2>&1 && exit; $(without_compiler),\
	for compiler in "$$CC" cc gcc clang; do command -v "$$compiler" >/dev/null && exit; done; \
	echo "quire needs a C compiler: install gcc or clang"; exit 1)
	@set -e; began=$$(date +%s); phase() { echo "[$$(($$(date +%s) - began)) s] $$1"; }; \
	if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		phase "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
	fi; \
	$(if $(LOCKED),phase "downloading packages and comparing their hashes"; $(BIN)/python -m pip install --no-compile \
		--disable-pip-version-check --require-hashes --no-deps --only-binary :all: --requirement $(LOCK);) \
	phase "downloading packages and building quire; the first time this takes minutes"; \
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt \
		--editable '.[$(EXTRAS)]' $(if $(filter pyproject.toml constraints.txt,$?),,$$($(quickly))); \
	phase "compiling Python files"; \
	$(BIN)/python -m compileall -qq -j 0 -x /transformers/models/ $(VENV)/lib || true; \
	phase "installed"
endef

$(STAMP): EXTRAS := dev
$(STAMP): $(SOURCES)
	$(install)
	@touch $(VENV)/.runtime-native $(VENV)/.runtime-torch $(VENV)/.runtime-mlx $@

$(RUNTIME): EXTRAS := server,$(BACKEND),hub
$(RUNTIME): $(SOURCES)
	@echo "installing the server and its $(BACKEND) backend into $(VENV)"
	$(install)
	@touch $@

serve: $(RUNTIME)  ## install and start a server with the default model, and print a first answer: PORT=8000 ARGS=...
	@exec $(BIN)/quire serve --port $(PORT) --hello $(if $(filter file,$(origin BACKEND)),,--backend $(BACKEND)) $(ARGS)

test: lint      ## all checks of CI: ruff, import layers, mypy, and pytest with the world simulation
	$(PYTEST) --costs=$(COSTS)

check: lint     ## ruff, import layers, mypy and the quick tests, in two minutes: run it before a commit
	$(PYTEST) --quick

# Each part runs although another fails; the last line is the exit status.
nightly: lint   ## all tests, and everything that is too long for `make test`: hours on two cores
	@failed=; run() { echo "== $$*"; "$$@" || failed="$$failed; $$*"; }; \
	run $(PYTEST) --nightly --costs=$(COSTS); \
	run make sim SEEDS=20000; \
	run make equality; \
	run make precision; \
	run make structured; \
	run make sanitize; \
	run make gauntlet; \
	run make clients; \
	run make audit; \
	test -z "$$failed" || { echo "failed$$failed"; exit 1; }

lint: style     ## ruff, mypy --strict, import-linter
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMP)   ## check the scheduler in seeded worlds: SEEDS=5000 runs that many, 100:200 a range, @77 replays one
	@$(BIN)/python -m tests.sim --seeds $(SEEDS)

# Shapes whose logits are compared bit by bit on a GPU. On a CPU, only the native backend promises equal bits.
EXACT  ?= $(if $(wildcard /proc/driver/nvidia/version),qwen3-0.6b llama-3-8b qwen3-30b-a3b qwen3.5-0.8b gpt-oss-20b)

equality: $(STAMP)  ## compare answers of the real model alone and batched, and bits of logits: PROMPTS=300 BACKEND=torch EXACT="llama-3-8b"
	@$(BIN)/python -m tests.equality --prompts $(PROMPTS) --backend $(BACKEND)
	@$(if $(filter native,$(BACKEND)),$(BIN)/python -m tests.exactness --model smollm2-135m-instruct --backend native \
		--kv-memory 500M --longest 150 --tokens 8 --at-once 16 --rows 2000)
	@for shape in $(EXACT); do $(BIN)/python -m tests.exactness --shape $$shape --rows 50000 || exit 1; done

precision: $(STAMP)  ## compare the native backend's distributions with fp32 of the same weights
	@$(BIN)/python -m tests.precision

structured: $(STAMP)  ## validate the real model's answers to 240 JSON schemas with another library
	@$(BIN)/python -m tests.structured

bench: $(STAMP)  ## measure the core per operation and per step; `quire bench` measures a model
	$(BIN)/python benchmarks/core.py

# Python is not built with the sanitizers, so their libraries are preloaded. Leak detection is off: Python itself does not
# free all of its memory.
sanitize: $(STAMP)  ## run the native backend's tests with the address and undefined-behaviour sanitizers of gcc
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/sanitize/site . \
		--config-settings build-dir=build/sanitize/objects --config-settings cmake.build-type=Debug \
		--config-settings cmake.define.QUIRE_SANITIZE=ON
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 QUIRE_NATIVE_LIBRARY=$$(ls $(CURDIR)/build/sanitize/site/$(NATIVE)/libquire_native.*) \
		$(BIN)/python -m pytest --capture=sys tests/$(NATIVE:quire/%=%)

gauntlet: $(STAMP)  ## measure each promise of reliability and security: ROWS=R1,R9 SOAK=24h QUICK=1
	@$(BIN)/python -m tests.gauntlet $(if $(ROWS),--rows $(ROWS)) $(if $(SOAK),--soak $(SOAK)) $(if $(QUICK),--quick)

clients: $(STAMP)  ## run third-party clients, each in its own environment, with the real server: CLIENTS="llm litellm"
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

docs: $(STAMP)    ## generate docs/options.md and docs/families.md from the code
	@$(BIN)/python -m tests.options_page
	@$(BIN)/python -m tests.families_page

wheel: $(STAMP)  ## build the wheel of this platform into dist/
	@mkdir -p dist && rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist \
		$$(command -v cmake >/dev/null && echo --no-build-isolation) .
	@ls -l dist/*.whl

lock: $(STAMP)  ## write requirements/core.lock: hashes of the packages that `make serve` installs, from the index of pip
	@$(BIN)/python -m tests.dependencies lock

audit: $(STAMP)  ## compare installed packages and the index with the lock; search known vulnerabilities if pip-audit is there
	@$(BIN)/python -m tests.dependencies audit

sbom: $(STAMP)  ## write a bill of materials (CycloneDX) to build/sbom.json
	@$(BIN)/python -m tests.dependencies sbom

clean:          ## remove all files created by the other targets
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	rm -f $(NATIVE)/libquire_native.* $(LEVELS)/libquire_files.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
