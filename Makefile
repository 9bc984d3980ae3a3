# Two commands do everything: `make demo` and `make test`. Both set up .venv first if need be.
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
FLAVOUR := $(if $(filter 1,$(GPU)),gpu,$(if $(wildcard .venv/.setup-gpu),gpu,cpu))
STAMP := .venv/.setup-$(FLAVOUR)
BIN := .venv/bin
ANY_PYTHON = $(or $(wildcard $(BIN)/python),python3)

.PHONY: help setup demo test check bench conformance load faults chaos gpu-check cases exactness \
	fuzz soak audit vllm screens lock

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup: $(STAMP) ## Make .venv from locks/cpu.txt (GPU=1: from locks/gpu.txt)

$(STAMP): locks/$(FLAVOUR).txt pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" bash scripts/setup.sh $(FLAVOUR)

demo: setup ## The main job on a real model: fetch, collect, label, train, bench
	$(BIN)/hvd demo

test: setup ## All tests; ARGS="tests/unit -k name" runs some
	$(BIN)/python -m pytest $(ARGS)

check: setup ## Format, lint, types and the layer rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

bench: setup ## Measure every system on the shipped workloads
	$(BIN)/hvd bench

conformance: setup ## Clients that people use against `hvd serve`; ARGS="--seconds 300 --clients 64"
	$(BIN)/python scripts/conformance.py $(ARGS)

load: setup ## 64 clients, each answer checked, beside a bare vLLM; ARGS="--engine torch"
	$(BIN)/python scripts/load.py $(ARGS)

faults: setup ## Break what can break while somebody asks; ARGS="--engine vllm --replicas 1"
	$(BIN)/python scripts/faults.py $(ARGS)

chaos: setup ## Kill the stages' processes at random moments; ARGS="--kills 8" for fewer
	$(BIN)/python -m tests.e2e.chaos $(ARGS)

gpu-check: ## On a CUDA machine, 10 minutes, offline: exactness, speed and acceptance in vLLM, costs; OUT=DIR
	@$(ANY_PYTHON) -m scripts.gpu_check --out $(or $(OUT),out/gpu-check) $(ARGS)

cases: setup ## What users of other systems ran into, held here: tests/cases/README.md
	$(BIN)/python -m pytest tests/cases $(ARGS)

exactness: setup ## Every lossless system against plain decoding: 100,000 tokens, and 50,000 draws
	$(BIN)/python -m tests.exactness $(ARGS)

fuzz: setup ## Ask a served model what nobody would: 150 requests a kind; ARGS="--examples 2000"
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: setup ## 20 minutes of mixed traffic; ARGS="--seconds 600 --report out/soak.md" for less
	$(BIN)/python scripts/soak.py $(ARGS)

audit: setup ## Known holes in the locked packages; asks the OSV database
	[ -x build/audit/bin/pip-audit ] || ($(BIN)/python -m venv build/audit && build/audit/bin/pip install --quiet pip-audit)
	build/audit/bin/pip-audit -s osv -r locks/$(FLAVOUR).txt --no-deps --disable-pip $(ARGS)

vllm: setup ## The plugin in real engines: adapters, shared prefixes, grammars; 10,000 requests
	$(BIN)/python -m pytest -q tests/e2e/vllm_more.py $(ARGS)
	$(BIN)/python scripts/vllm_memory.py

screens: setup ## Take the pictures in docs/screens anew, with Chromium; ARGS="--folder DIR" keeps the runs
	$(BIN)/python -m scripts.screens $(ARGS)

lock: ## Compile the lock files from pyproject.toml (UPGRADE=1: to the newest versions)
	@PYTHON="$(PYTHON)" UPGRADE="$(UPGRADE)" bash scripts/lock.sh
