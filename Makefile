# Every target builds its own environment (.venv) if it is absent. VENV=DIR chooses another place.
PYTHON ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-aot test-slow lint clean

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
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

test-aot: $(VENV)/.installed-aot
	$(BIN)/python -m pytest -n 2 -m aot $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m slow $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info
