# Every target builds its own environment (.venv) if it is absent. VENV=DIR chooses another place.
PYTHON ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-aot test-slow parity lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 12), f"Python 3.12 is needed, {sys.version.split()[0]} was found; set PYTHON="'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[exp,dev]'
	touch $@

# Only the compile tier needs CUDA's compiler; it needs no GPU and no CUDA libraries.
$(VENV)/.installed-aot: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
	  jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m experiments.reproduce --config=configs/reproduce.py:quick --workdir=runs/demo-$$(date -u +%Y%m%dT%H%M%SZ)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

test-aot: $(VENV)/.installed-aot
	$(BIN)/python -m pytest -n 2 -m aot $(PYTEST_ARGS)

test-slow: $(VENV)/.installed parity
	$(BIN)/python -m pytest -n 2 -m slow $(PYTEST_ARGS)

# The reference models run in an environment of their own: torch is no dependency of this project. PyPI's torch
# is a CUDA build on Linux; set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to where a CPU build is.
PARITY_PYTHON ?= python3.11
PARITY_VENV ?= .venv-parity
PARITY_DIR ?= build/parity
PARITY_SEED ?= $(shell date +%s)

$(PARITY_VENV)/.installed:
	$(PARITY_PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python -m pip install --quiet 'torch==2.13.0' 'transformers>=5.24,<6'
	touch $@

parity: $(VENV)/.installed $(PARITY_VENV)/.installed
	rm -rf $(PARITY_DIR)
	$(PARITY_VENV)/bin/python tests/parity/write_reference.py --out $(PARITY_DIR) --seed $(PARITY_SEED)
	KVMEM_REFERENCES=$(abspath $(PARITY_DIR)) $(BIN)/python -m pytest tests/parity tests/models/test_parity.py $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info
