# `make demo` and `make test` work in a fresh clone: each sets up .venv first, once.
#
#   TORCH='torch==2.13.0'   what pip installs when no torch >= 2.11 is there already (for CUDA, see README.md)
#   PYTHON=python3          the interpreter that .venv is made from; if it has torch >= 2.11, .venv shares it
#   JOBS=2                  processes that run the tests

TORCH ?= torch==2.13.0
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
HAS_TORCH := import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('+')[0].split('.')[:2])) < (2, 11))

.PHONY: demo test test-slow test-gpu check format bench clean

demo: .venv/ready
	$(BIN)/eyeline train easyvqa-tiny out=runs/demo
	$(BIN)/eyeline eval runs/demo --show 10
	$(BIN)/eyeline report runs/demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-slow: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -s

test-gpu: .venv/ready
	$(BIN)/python -m pytest -m gpu

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready
	$(BIN)/eyeline bench

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Eyeline needs Python >= 3.11; name one: make PYTHON=python3.11"; exit 2; }
	@if [ ! -x $(BIN)/python ]; then \
	  if $(PYTHON) -c "$(HAS_TORCH)" 2>/dev/null; then share=--system-site-packages; fi; \
	  $(PYTHON) -m venv $$share .venv; \
	fi
	@$(BIN)/python -c "$(HAS_TORCH)" 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis
