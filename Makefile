# Two commands for a newcomer: `make simulate` and `make test`. Each sets up what it needs, and both can be repeated.
PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: simulate test test-pythons test-slow check static docs bench mutants clean
.DEFAULT_GOAL := simulate

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcgd needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (about 6 GB with PyTorch; a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# Train DP-SGD and DP-λCGD at the same (ε, δ) on handwritten digits, federated over 2 nodes that host one user per example.
simulate: $(VENV)/installed
	PYTHONPATH=simulations $(BIN)/python -m fedcgd_simulations.demo --results $(RESULTS)

# A process a core, four at most: each takes a gigabyte.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# The suite on every interpreter that is installed, each in an environment of its own (about 6 GB each).
test-pythons:
	@found=; for python in python3.11 python3.12 python3.13; do \
		if $$python -c '' 2> /dev/null; then found=1; $(MAKE) test PYTHON=$$python VENV=.venv-$$python || exit 1; \
		else echo "$$python is not installed"; fi; \
	done; test -n "$$found"

# Long checks: many kills, big sizes, every real Flower run.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

check: static test

static: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Do the tests notice a change in what ε depends on? An hour on 2 cores; goes on where it was stopped (docs/testing.md).
mutants: $(VENV)/installed
	$(BIN)/python tools/mutants/run.py --minutes 60 --jobs 2

# The documentation, at http://127.0.0.1:8000/ until Ctrl-C; what is built lies in build/site.
docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict
	$(BIN)/mkdocs serve --strict

bench: $(VENV)/installed
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .venv-python3.* dist build .pytest_cache .mypy_cache .ruff_cache
