# Everything from a clean clone: `make run`, `make test`. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help run test check format bench clean
help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

run: $(READY)  ## Simulate scenarios/dcut_h20.yaml and write reports/dcut_h20/report.html
	$(BIN)/adasim run scenarios/dcut_h20.yaml --overwrite

test: $(READY)  ## Run the tests
	$(BIN)/pytest -n auto

check: $(READY)  ## Lint, formatting, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(READY)  ## Measure speed as ratios within one run; the last line is JSON
	$(BIN)/python -m tests.bench

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
