# Needs Python 3.11 or newer and make. Whichever target comes first makes .venv.
#
#   make run                               train: three clusters learn to translate dates
#   make run ARGS="federation.rounds=3"    the same with options
#   make test                              all tests;  ARGS="-k link" for some of them
#   make test-faults                       faults at every point, for ten minutes
#   make test-thorough                     more cases and examples of each property
#   make check                             lint, format, strict types, who imports whom, pages
#   make docs                              the documentation site, in build/docs
#   make reproduce ARGS="fig04"            a figure of the paper, from reproduction/
#   make clean                             remove .venv and caches

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Else each of the tests' workers and processes would compile all modules for itself.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-faults test-thorough check lint types docs compiled reproduce env clean

run: $(STAMP)
	$(BIN)/collapipe run $(ARGS)

# A module's tests run in one of three processes: what they share is made once.
WORKERS := -n 3 --dist loadscope --no-loadscope-reorder

test: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# In one process: memory and handles are counted.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -n 0 -m faults --timeout 1200 $(ARGS)

test-thorough: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) --timeout 1200 -m "thorough or not thorough" \
		--hypothesis-profile thorough $(ARGS)

check: lint types docs
	$(BIN)/python -m pytest -qq tests/test_architecture.py

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

# A broken link fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# All tests are collected, which compiles what they import.
compiled: $(STAMP)
	$(BIN)/python -m pytest -qq --collect-only > /dev/null

reproduce: $(STAMP)
	$(BIN)/python -m reproduction $(ARGS)

env: $(STAMP)

# Compiled when imported first: of all that is installed tests need a tenth.
$(STAMP): $(BIN)/pip pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a few minutes the first time"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

# --clear: an environment without pip is what a failed attempt left behind. --upgrade-deps: the pip
# that comes with Python 3.11 takes twice the processor time to choose packages.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	"error: CollaPipe needs Python 3.11 or newer, $(PYTHON) is %d.%d; add PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv --clear --upgrade-deps $(VENV)

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
