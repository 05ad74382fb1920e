# `make demo` and `make test` work in a fresh clone: each sets up .venv first, once.
#
#   TORCH='torch==2.13.0'   what pip installs when no torch >= 2.11 is there already (for CUDA, see README.md)
#   PYTHON=python3          the interpreter that .venv is made from; if it has torch >= 2.11, .venv shares it
#   JOBS=2                  processes that run the tests
#   SOAK_S=600              seconds that schedules of racing workers are tried in `make test-slow`
#   CASES='step packed'     what `make bench` measures; all if none is named

TORCH ?= torch==2.13.0
PYTHON ?= python3
JOBS ?= 2
SOAK_S ?= 600
BIN := .venv/bin
HAS_TORCH := import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('+')[0].split('.')[:2])) < (2, 11))

.PHONY: demo test test-slow mutants test-transformers4 test-qlora test-gpu check format bench docs sample-image clean

demo: .venv/ready
	$(BIN)/eyeline train easyvqa-tiny out=runs/demo
	$(BIN)/eyeline eval runs/demo --show 10
	$(BIN)/eyeline report runs/demo

QUICK := not slow and not gpu and not transformers4 and not qlora

# Tests that start several ranks run alone: beside others on the same cores they would wait for one another
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m '$(QUICK) and not ranks'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '$(QUICK) and ranks'

test-slow: .venv/ready
	SOAK_S=$(SOAK_S) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -s

# Plants faults in a copy of the code, one at a time, and expects the test that is named for each to fail
mutants: .venv/ready
	JOBS=$(JOBS) $(BIN)/python -m tests.mutants

# Exports in the newest transformers 4, in an environment of its own that shares torch and the test tools with .venv
test-transformers4: .venv/ready .venv-transformers4/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m transformers4 tests/bundle/test_transformers4.py

.venv-transformers4/ready: Makefile .venv/ready
	$(BIN)/python -m venv --clear .venv-transformers4
	.venv-transformers4/bin/python -m pip install --quiet --disable-pip-version-check 'transformers>=4.57,<5'
	@$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	  > "$$(.venv-transformers4/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

# NF4 against bitsandbytes, in an environment of its own: dev does without it
test-qlora: .venv/ready .venv-qlora/ready
	OMP_NUM_THREADS=1 .venv-qlora/bin/python -m pytest -m qlora tests/kernels/test_nf4.py tests/kernels/test_dynamic8.py tests/train/test_adamw_8bit.py

.venv-qlora/ready: Makefile .venv/ready
	$(BIN)/python -m venv --clear .venv-qlora
	.venv-qlora/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'bitsandbytes>=0.48'
	@$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	  > "$$(.venv-qlora/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

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
	$(BIN)/python -m bench $(CASES)

# The pages of docs/ as a site in build/site; a link or an anchor that leads nowhere fails it
docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "build/site/index.html"

sample-image: .venv/ready
	$(BIN)/python docs/sample_image.py

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
	rm -rf .venv .venv-transformers4 .venv-qlora runs .pytest_cache .ruff_cache .hypothesis
