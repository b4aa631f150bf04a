# make demo       set up, fit a private Bayesian classifier on the digits, write out/demo/report.html
# make test       set up, lint, types, tests
# make test-slow  the long statistical runs
# make docs       the documentation as a site, out/site/index.html; warnings are errors
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Every install goes through the constraints, so that versions are pinned and torch stays the CPU build.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow lint format docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --no-build-isolation --editable ".[test]"
	touch $@

demo: $(VENV)/.base
	rm -rf out/demo
	$(BIN)/confide fit digits --method sgld --epsilon 3 --delta 1e-4 --out out/demo
	@echo "Report: out/demo/report.html"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread per worker: two workers share the cores, and small tensors do not gain from more.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(VENV)/.test
	$(BIN)/pytest -m slow

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
