# make demo and make test do all the set-up that they need; make help lists the rest.

PYTHON    ?= python3
VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# For example: make test ARGS="-m gpu", make test ARGS="-k arena", make test PIP_FLAGS=--verbose
ARGS      ?=
# Processes that tests run in; one GPU serves one of them at a time.
JOBS      ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo 2)
PIP_FLAGS ?= --quiet

KERNEL_SOURCES := $(wildcard kernels/*.c kernels/*.cpp kernels/*.h kernels/*.hpp)
CPP_SOURCES    := $(KERNEL_SOURCES) $(wildcard tests/kernels/*.cpp)
SETUP_INPUTS   := pyproject.toml ci-constraints.txt $(wildcard setup.py) $(KERNEL_SOURCES)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Make .venv and install the package into it (demo and test do this themselves)

demo: $(INSTALLED)  ## Train a small model that does not fit the device memory it is given
	@$(BIN)/outcore train $(ARGS)

test: $(INSTALLED)  ## Run the tests that need no GPU and little time
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(INSTALLED)  ## Check Python with ruff and C++ with clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(if $(CPP_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES))

typecheck: $(INSTALLED)  ## Check the package with mypy --strict
	@$(BIN)/mypy --strict -p outcore

format: $(INSTALLED)  ## Rewrite Python and C++ in the project's format
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .
	@$(if $(CPP_SOURCES),$(BIN)/clang-format -i $(CPP_SOURCES))

clean:  ## Remove .venv, what was built, and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f outcore/kernels/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so that a set-up that was interrupted starts again.
$(INSTALLED): $(SETUP_INPUTS)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "There is no $(PYTHON) here. Install Python 3.10 or later, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Outcore needs Python 3.10 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its venv module is missing."; \
	  echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null 2>&1 || \
	  echo "No C++ compiler found: the kernels will be replaced by slower torch code with the same results."
	@echo "Setting up $(VENV) with $$($(PYTHON) --version). This happens once and takes some minutes, mostly for torch."
	@$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "NVIDIA GPU found: installing torch with CUDA."; constraint=; \
	else \
	  echo "No NVIDIA GPU found: installing the versions of ci-constraints.txt."; \
	  constraint="-c ci-constraints.txt"; \
	fi; \
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) $$constraint -e '.[dev]' || { \
	  echo "The set-up failed; pip's message is above. For more of it: make setup PIP_FLAGS=--verbose"; exit 1; }
	@touch $@
	@echo "Set-up done."
