# Everything a newcomer and CI run. `make demo` and `make test` work on a machine that has Python 3.11+ and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Each has a Ray, a PostgreSQL and a stack of its own.
TEST_PROCESSES ?= 2
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo test test-unit lint fmt docs bench clean

demo: $(INSTALLED)
	$(BIN)/loop demo

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-unit: $(INSTALLED_DEV)
	$(BIN)/python -m pytest tests/unit

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

fmt: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_DEV)
	$(BIN)/loop docs

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Loopcore needs Python 3.11 or newer, got " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# Installed anew only when what is installed changes; the sources themselves are installed in place.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
