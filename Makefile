# `make quickstart` and `make test` do all of their own set-up; both need only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

.PHONY: install quickstart test lint types clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stretto needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $@

quickstart: install
	$(BIN)/stretto train recipes/quickstart.toml

test: install lint types
	$(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
