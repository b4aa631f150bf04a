# make demo       set up, fit a private Bayesian classifier on the digits, write out/demo/report.html
# make test       set up, lint, types, tests
# make test-slow  the long statistical runs
# make test-gpu   the tests of devices on the GPU of this machine; DEVICE=mps or another for that one
# make docs       the documentation as a site, out/site/index.html; warnings are errors
# make hashes     hashes.txt anew, for this machine
# make constraints  constraints.txt anew, from the newest versions that pyproject.toml allows
PYTHON ?= python3
# Where torch comes from. Empty: the package index of this machine, whose torch is the CPU build on some machines and a
# GPU build on others. To choose:
#   make test TORCH_INDEX=...       (the index that PyTorch's start page names for the CPU or for your GPU)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# Every install goes through the constraints, so that versions are pinned.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

TORCH_FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: demo test test-slow test-gpu lint format docs constraints hashes clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(TORCH_FROM) torch
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

# One thread per worker: two workers share the cores, and small tensors do not gain from more. Tests start many processes:
# what these import is compiled once. Files of tests are taken in the order of tests/conftest.py.
test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" -rf

test-slow: $(VENV)/.test
	$(BIN)/pytest -m slow

# Everything that tests/devices runs on the emulated device, on a real one; then how the device compares with the host.
DEVICE ?= cuda
test-gpu: $(VENV)/.test
	CONFIDE_DEVICE=$(DEVICE) $(BIN)/pytest tests/devices/on_device -m gpu
	$(BIN)/python -m benchmarks.devices --device $(DEVICE)

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A fresh environment without constraints; what pip chose is written down. Local parts of a version ("+cpu") are left out.
constraints: FRESH := out/constraints
constraints:
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet $(TORCH_FROM) torch
	$(FRESH)/bin/python -m pip install --quiet hatchling editables ".[test,docs,arviz]"
	echo "# Every version that make installs. Install with: pip install -c constraints.txt ..." > $(FRESH)/new.txt
	$(FRESH)/bin/python -m pip freeze --exclude confide | sed 's/+[a-z0-9.]*$$//' | grep -v '^nvidia-\|^triton' >> $(FRESH)/new.txt
	mv $(FRESH)/new.txt constraints.txt

# hashes.txt anew, of the wheels that pip would take here; torch's build is chosen by the machine and has none.
hashes: $(BIN)/python
	mkdir -p out
	grep -v '^#\|^torch==' constraints.txt > out/pinned.txt
	$(BIN)/python -m pip install --quiet --dry-run --no-deps --ignore-installed --only-binary :all: --report out/hashes.json -r out/pinned.txt
	$(BIN)/python -c "import json; print('# SHA-256 of every wheel but torch\'s: CPython 3.11, Linux x86-64. See docs/reliability.md.'); [print('%s==%s --hash=sha256:%s' % (one['metadata']['name'], one['metadata']['version'], one['download_info']['archive_info']['hashes']['sha256'])) for one in sorted(json.load(open('out/hashes.json'))['install'], key=lambda one: one['metadata']['name'].lower())]" > out/hashes.txt
	mv out/hashes.txt hashes.txt

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
