# Commands for developers and CI. `make help` lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip --disable-pip-version-check
# Installed first and separately, so that resolving other packages does not select another build.
TORCH  := torch==2.13.0

CONFIG := --config-path ./examples/llama3/conf --config-name train

.PHONY: help setup setup-dev system backend data quickstart hetero-quickstart test test-fast _fast test-sinks _sinks test-storage _storage test-bare lint format docs \
	gpu-test gpu-bench bench wheel sanitize fuzz clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else \
	"flagscale requires Python 3.10 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25"

$(VENV)/.setup: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(RUN) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v <= (3, 13) else \
	"training requires Python 3.10 to 3.13, for which megatron-core has wheels; $(VENV) has %d.%d: remove it, " \
	"then make PYTHON=python3.13 ..." % v)'
	$(RUN) -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train,data,bench,reference,evaluate,dev]'
	@touch $@

# Only for the slow tests, so that other tests do not wait for the installation.
$(VENV)/.setup-frameworks: $(VENV)/.setup-dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[frameworks]'
	@touch $@

$(VENV)/.setup-fast: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(VENV)/.setup ## create the virtual environment for training
setup-dev: $(VENV)/.setup-dev ## setup, and install the dependencies of tests and lint
system: ## install the system packages that tests use (root, Debian or Ubuntu)
	PYTHON=$(PYTHON) tools/dev/system.sh

backend: setup ## fetch and adapt the training backend's source (idempotent)
	$(RUN) tools/patch/unpatch.py --backend Megatron-LM

data: setup ## create the corpus and tokenizer of the quickstart (idempotent)
	$(RUN) tools/data/quickstart.py

quickstart: setup backend data ## train a tiny Llama-3 on this machine, including setup and data
	$(RUN) run.py $(CONFIG) action=test

HETERO := train.model.train_iters=40 train.model.global_batch_size=8 train.system.precision.bf16=false \
	train.system.logging.log_interval=5 train.model.eval_interval=40 train.system.checkpoint.save=null

hetero-quickstart: setup backend data ## train on two heterogeneous meshes and compare the loss with that of one rank
	$(RUN) run.py $(CONFIG) $(HETERO) experiment.exp_name=llama3_one_rank experiment.runner.nproc_per_node=1 \
	action=test
	$(RUN) run.py $(CONFIG) $(HETERO) train=tiny_hetero experiment.runner.nproc_per_node=4 action=test
	$(RUN) tools/train/compare.py outputs_llama3_one_rank outputs_llama3_tiny_hetero

# Twice as many workers as cores, because many tests wait for processes. All tests of a file run on
# one worker, because they share expensive fixtures. Files keep their order, in which the longest
# come first (tests/conftest.py) and short ones last.
TEST_WORKERS ?= 4

# Each worker would compile all tests again if the environment forbade to store bytecode.
PYTEST = PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: setup-dev backend ## run the test suite; as root, install the system packages that it uses
	PYTHON=$(PYTHON) tools/dev/system.sh --if-possible
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.setup-frameworks backend ## run the long tests that rarely find a regression
	$(PYTEST) -m slow

# One environment per Python version, without torch, as on a login node that only launches runs.
test-fast: ## run the tests that use neither torch nor processes, for PYTHON=python3.10 to 3.14
	@$(MAKE) --no-print-directory _fast \
	VENV=.venv-fast-$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

_fast: $(VENV)/.setup-fast
	$(RUN) -m pytest --numprocesses $(TEST_WORKERS) -m "not torch and not integration and not gpu"

test-sinks: ## run the tests of metrics sinks with their clients, in an environment without torch
	@$(MAKE) --no-print-directory _sinks VENV=.venv-sinks

# Without constraints: the clients need older versions of packages that training uses.
$(VENV)/.setup-sinks: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[sinks,dev]'
	@touch $@

_sinks: $(VENV)/.setup-sinks
	FLAGSCALE_REQUIRE_SINKS=1 $(RUN) -m pytest tests/unit/sinks tests/integration/sinks

test-storage: backend ## run the tests of checkpoints on an S3 server, in an environment of their own
	@$(MAKE) --no-print-directory _storage VENV=.venv-storage

# Without constraints: the S3 client needs older versions of packages that training uses.
$(VENV)/.setup-storage: pyproject.toml | $(VENV)/bin/python
	$(RUN) -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --editable '.[train,data,storage-tests,dev]'
	@touch $@

_storage: $(VENV)/.setup-storage
	FLAGSCALE_REQUIRE_STORAGE=1 $(RUN) -m pytest tests/integration/checkpoint/test_s3_checkpoints.py \
	tests/integration/checkpoint/test_stored_checkpoints.py tests/unit/test_object_storage.py
	$(RUN) tools/bench/storage_kills.py --rounds 5

test-bare: ## run quickstart and test in a minimal Debian, as root and as a user (requires debootstrap)
	tools/dev/bare.sh

lint: setup-dev ## run ruff, mypy --strict and the language check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/dev/language.py

format: setup-dev ## apply ruff's fixes and formatting
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: setup-dev ## generate pages: configuration, arguments, commands, benchmark tables
	$(RUN) tools/config/generate_arguments.py
	$(RUN) tools/config/reference.py
	$(RUN) tools/config/commands.py
	$(RUN) tools/bench/tables.py

wheel: setup ## build dist/flagscale-*.whl with fsccl for this torch, for hosts without a compiler
	$(RUN) tools/dev/wheel.py

bench: setup backend data ## benchmark launching and training on this machine; results in docs/results/
	$(RUN) tools/bench/local_launch.py

gpu-bench: setup backend ## benchmark training on this machine's GPUs; TORCHTITAN=checkout compares torchtitan
	$(RUN) tools/bench/gpu.py --output docs/results/gpu.json
	$(if $(TORCHTITAN),$(RUN) tools/bench/beside_torchtitan.py --checkout $(TORCHTITAN) --output docs/results/torchtitan.json)

gpu-test: setup-dev backend ## run the tests that require a CUDA device
	$(RUN) -m pytest -m gpu

SANITIZE_ROUNDS ?= 70

sanitize: setup-dev ## test fsccl's core with ranks as threads under sanitizers, SANITIZE_ROUNDS rounds
	FLAGSCALE_SANITIZE_ROUNDS=$(SANITIZE_ROUNDS) $(RUN) -m pytest tests/unit/fsccl

FUZZ_SEEDS ?= 20000

fuzz: setup-dev ## fuzz the input from peers and the store, FUZZ_SEEDS seeds (takes minutes)
	FLAGSCALE_FUZZ_SEEDS=$(FUZZ_SEEDS) $(RUN) -m pytest tests/unit/fsccl/test_fsccl_core.py -k fuzzed_peers

clean: ## remove generated files, but not the environment and your runs
	rm -rf third_party build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
