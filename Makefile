# Octavo. `make demo` trains a small Llama in FP8; `make test` runs the tests. `make help` lists the rest.

VENV ?= .venv
# The Python to make the virtual environment with; without one, the first that is new enough.
PYTHON ?=
DEMO ?= runs/demo
# SYSTEM_TORCH=1 takes PyTorch from the machine's own Python: an offline machine, a CUDA container.
SYSTEM_TORCH ?=

# RECORD=FILE.json writes which checks of docs/reference/capabilities.md passed; .ci/run compares it with tests/checked.
RECORD ?=
RECORDED := $(if $(RECORD),--record $(abspath $(RECORD)))

# LATEST=1 lets `make clients` take the newest versions instead of the pinned ones.
LATEST ?=
CLIENTS := accelerate datasets diffusers lightning peft transformers trl
# DeepSpeed imports PyTorch while it is installed. torchtitan wants an older datasets than TRL, but runs with TRL's.
DEEPSPEED := $(if $(LATEST),deepspeed,$(shell sed -n 's/^deepspeed = \["\(.*\)"\].*/\1/p' pyproject.toml))
TITAN := $(if $(LATEST),torchtitan,$(shell sed -n 's/^titan = \["\(.*\)"\].*/\1/p' pyproject.toml))
MEGATRON := $(if $(LATEST),megatron-core,$(shell sed -n 's/^megatron = \["\(.*\)"\].*/\1/p' pyproject.toml))
NEMO := $(shell sed -n 's/^nemo = \["\(.*\)"\].*/\1/p' pyproject.toml)
TITAN_NEEDS := einops spmd_types==0.2.3 tensorboard torch_checkpointing torchdata tyro

BIN := $(VENV)/bin
ifneq ($(filter-out 0,$(SYSTEM_TORCH)),)
VENV_FLAGS := --system-site-packages
else
PIP_FLAGS := -c constraints.txt
endif
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test latest clients apart alone kernels older lint format types layers tables docs site sdist wheel check wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/installed ## train a small Llama in FP8 and its BF16 baseline on real text
	$(BIN)/octavo train --preset demo --out $(DEMO) --overwrite

test: $(VENV)/installed-dev ## run every test but those of other libraries
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder --budget 420 --ignore=tests/integrations $(RECORDED)

latest: ## the tests with the newest PyTorch, in an environment of its own, for the doctor's list
	$(MAKE) test VENV=$(VENV)-latest PIP_FLAGS='--upgrade --upgrade-strategy eager'
	$(VENV)-latest/bin/python .ci/tested.py

clients: $(VENV)/installed-dev ## the training loops of others, at pinned versions; LATEST=1: at the newest ones
	@$(PIP_INSTALL) -e '.[dev,clients,tasks]'
	$(if $(LATEST),@$(PIP_INSTALL) --upgrade $(CLIENTS))
	@$(PIP_INSTALL) setuptools $(TITAN_NEEDS)
	@$(PIP_INSTALL) --upgrade --no-build-isolation '$(DEEPSPEED)'
	@$(PIP_INSTALL) --upgrade --no-deps '$(TITAN)' '$(MEGATRON)'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations tests/lab/evaluation/test_tasks.py \
		tests/bench/test_downstream.py $(RECORDED)

# Each wants other versions than the rest. What they ask for and do not import (an old PyTorch, CUDA) is left out.
apart: ## NeMo Automodel and Colossal-AI, each in an environment of its own; before a release
	$(MAKE) alone VENV=$(VENV)-nemo NAME=nemo WANTS='$(NEMO) transformers==5.18.0 torchao==0.18.0 triton==3.8.0'
	$(MAKE) alone VENV=$(VENV)-colossalai NAME=colossalai WANTS='colossalai==0.5.0 bitsandbytes einops galore_torch peft'

alone: $(VENV)/installed-dev
	@$(PIP_INSTALL) --no-deps $(WANTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_$(NAME).py --record apart

kernels: $(VENV)/installed-dev ## compile every Triton kernel for an H200, without one
	PYTHONOPTIMIZE=1 PYTHONPATH=tests/kernels/triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p compile_only \
		--assert=plain --numprocesses auto --maxprocesses 8 tests/kernels/triton

INTEGER = $(patsubst %,tests/kernels/triton/test_%.py,gemm grouped_gemm decode quantize activation)
older: $(VENV)/installed-dev ## compile the INT8 kernels for Ampere (RTX 30: 8.6) and Ada
	for target in 8.0 8.6 8.9; do OCTAVO_COMPILE_FOR=$$target PYTHONOPTIMIZE=1 PYTHONPATH=tests/kernels/triton OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -p compile_only --assert=plain $(INTEGER) \
		-k "integer or exact_sums or rotated or decoded" || exit 1; done

lint: $(VENV)/installed-dev ## ruff and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(VENV)/installed-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev ## mypy, strict
	$(BIN)/mypy

layers: $(VENV)/installed-dev ## imports point down
	$(BIN)/lint-imports

tables: $(VENV)/installed-dev ## write the generated tables and pictures of README and docs again
	$(BIN)/octavo bench tables
	$(BIN)/octavo bench pictures

docs: $(VENV)/installed-dev ## the generated tables are current, the examples run
	$(BIN)/octavo bench tables --check
	$(BIN)/octavo bench pictures --check
	$(BIN)/python -m pytest tests/test_docs.py tests/test_readme.py

site: $(VENV)/installed-dev ## build the documentation into site/; links are strict, its search works from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python .ci/site.py

sdist: $(VENV)/installed-dev ## build the sdist: it has all files of the clone, its demo trains, its tests pass
	$(BIN)/python .ci/release.py

wheel: $(VENV)/installed-dev ## build the wheel, check it, and train ten steps with it in bare environments
	$(BIN)/python .ci/wheel.py

check: lint types layers test kernels site sdist wheel ## what .ci/run runs besides the clients

wheels: $(VENV)/installed ## wheels/: what an offline machine with its own PyTorch needs beside it
	$(BIN)/python -m pip download --quiet --dest wheels hatchling editables cyclopts jinja2 numpy rich safetensors plotly starlette uvicorn

clean: ## remove the virtual environment and the caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "octavo: installing into $(VENV) (the first time this downloads PyTorch)"
	@$(PIP_INSTALL) -e '.[dashboard]'
	@touch $@

$(VENV)/installed-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "octavo: installing into $(VENV), with the tools for tests (the first time this downloads PyTorch)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/installed $@

$(BIN)/python:
	@python=$$(sh .ci/find-python $(PYTHON)) || exit 1; \
	"$$python" -m venv $(VENV_FLAGS) $(VENV) || { rm -rf $(VENV); \
	echo "octavo: '$$python -m venv' does not work here. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	test -z "$(VENV_FLAGS)" || sh .ci/see-packages "$$python" $(VENV) || { rm -rf $(VENV); exit 1; }
