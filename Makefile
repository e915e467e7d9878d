# Every target installs what it needs into .venv first, with the versions of constraints.txt.
# Another interpreter: make test PYTHON=python3.12 (VENV=.venv-3.12 beside another .venv)
# Another torch, in an environment of its own: make test TORCH=2.11.0

PYTHON ?= python3
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED_TORCH)
IS_PINNED := $(filter $(PINNED_TORCH),$(TORCH))
VENV := .venv$(if $(IS_PINNED),,-torch-$(TORCH))
# Torches differ in the setuptools that they admit.
PINS := 's/^torch==.*/torch==$(TORCH)/$(if $(IS_PINNED),,; /^setuptools==/d)'
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.installed
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

ifeq ($(origin PYTHON),command line)
    VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
    THERE := $(if $(wildcard $(VENV)/bin/python),$(shell $(VENV)/bin/python $(VERSION)))
    ifneq ($(THERE),$(if $(THERE),$(shell $(PYTHON) $(VERSION))))
        $(error PYTHON=$(PYTHON): $(VENV) has Python $(THERE). Name another: VENV=.venv-other)
    endif
endif

# What is imported is compiled once and kept, whatever the environment says: packages are installed
# uncompiled, and each process would compile torch anew, which takes longer than its start.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(RUN) pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

ARGS ?=
BENCH_ARGS ?=
COMPARE_ARGS ?=
RECIPE ?= gpt2_zero3
TRAIN_CONFIG ?= recipes/$(RECIPE).yaml
TRAIN_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 3
LOGS ?= runs
PORT ?= 6006

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install bench bench-full bench-optimizer compare guide gpu train test test-all mutants check format tensorboard clean distclean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

install: $(READY) ## Create .venv and install the pinned versions into it

bench: $(READY) ## Compare the engines on two CPU processes; report and pictures in runs/bench
	$(RUN) lightning_fsdp.bench run --out runs/bench $(BENCH_ARGS)

bench-full: $(READY) ## The same over batch sizes and accumulations; in runs/bench-full
	$(RUN) lightning_fsdp.bench run --out runs/bench-full --batch-sizes 1 2 4 8 \
	    --grad-accum 1 2 $(BENCH_ARGS)

bench-optimizer: $(READY) ## Optimizers built before and after sharding; table, JSON, picture in runs/optimizer
	$(RUN) benchmarks.optimizer --out runs/optimizer $(BENCH_ARGS)

compare: $(READY) ## Judge by value what each engine lets one read; report in runs/compare
	$(RUN) lightning_fsdp.compare --out runs/compare $(COMPARE_ARGS)

guide: $(READY) ## Measure again what docs/fsdp1-vs-fsdp2.md says, and rewrite its tables
	$(RUN) benchmarks.guide

gpu: $(READY) ## All that a GPU has to tell: tests, speed, recipes; in runs/gpu. ARGS="--device cpu": in small
	$(RUN) benchmarks.gpu --out runs/gpu $(ARGS)

train: $(READY) ## Train GPT-2 nano under ZeRO-3 on two CPU processes; RECIPE=qwen_zero3 for Qwen2.5
	$(RUN) recipes.train fit --config $(TRAIN_CONFIG) $(TRAIN_ARGS)

test: $(READY) ## Run each test that is not slow, up to the first that fails
	$(PYTEST) --once --maxfail 1 --tb short $(TEST_ARGS)

test-all: $(READY) ## Run all tests
	$(PYTEST) $(TEST_ARGS)

mutants: $(READY) ## Change the core in one place after another; a test must notice each. ARGS="--only hooks.py": some
	$(RUN) tests.mutants $(ARGS)

check: $(READY) ## Formatting, lint, types and import layers
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(READY) ## Format the sources and apply the lint's safe fixes
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

tensorboard: $(READY) ## Open the logs of all runs at http://localhost:6006
	$(RUN) tensorboard.main --logdir $(LOGS) --host 127.0.0.1 --port $(PORT)

clean: ## Remove runs and caches; keep .venv
	rm -rf runs build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove .venv as well, and the others beside it
	rm -rf .venv .venv-*

# The stamp is written last, so an installation that was interrupted anywhere is repeated, and a
# .venv whose own pip does not answer (interrupted creation, a Python that went away) is rebuilt.
$(READY): pyproject.toml constraints.txt
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { \
	    $(PYTHON) -c '$(IS_SUPPORTED)' 2>/dev/null || { \
	        echo "expected Python 3.11, 3.12 or 3.13, got: $$($(PYTHON) --version 2>&1)." \
	            "Name one with: make PYTHON=python3.12" >&2; exit 1; }; \
	    echo "creating $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear $(VENV); }
	@sed $(PINS) constraints.txt > $(VENV)/constraints.txt
	$(RUN) pip install --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@
