# make lab        install, examine the machine, open the course in JupyterLab
# make test       install, then everything that CI runs
# make notebooks  build notebooks/, exercises/ and solutions/ from authoring/      (FORCE=1 executes lessons again)
# make check      say which notebooks are stale; build nothing
# make bench      the benchmarks
# make clean      remove the environment and what tools left behind
#
# On Linux without a GPU, PyPI's torch brings gigabytes of CUDA; the CPU build is smaller:
#   make lab TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
DEV := $(VENV)/.dev

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

.PHONY: help lab test notebooks check bench clean

lab: $(LAB)
	@$(BIN)/minizero doctor
	@$(BIN)/minizero lab $(ARGS)

test: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/python -m minizero.course.build --check
	$(BIN)/python -m pytest -n 2 --dist loadfile
	$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-cell-timeout 120 notebooks

notebooks: $(DEV)
	$(BIN)/python -m minizero.course.build $(if $(FORCE),--force)

check: $(DEV)
	$(BIN)/python -m minizero.course.build --check

bench: $(LAB)
	$(BIN)/python benchmarks/step_time.py $(ARGS)
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find minizero tests authoring -name __pycache__ -prune -exec rm -rf {} +

PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt

# Anew when the dependencies change, or when the environment is not whole.
$(LAB): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: make lab PYTHON=python3.12, or any from 3.10 on"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "minizero needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1):"; \
	  echo "    make lab PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make an environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PIP) -e .
	@touch $@

# What tests and authors need besides.
$(DEV): $(LAB)
	$(PIP) -e '.[dev]'
	@touch $@
