PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Tell me a story.
SOAK_SEED ?= 1
SOAK_SCHEDULES ?= 200
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
PROTOS := $(wildcard protos/pdserve/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help install run up test test-fast test-gpu soak bench bench-handoff bench-peers protos lint format typecheck clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[router,worker,dev]'
	@touch $@

install: $(INSTALLED) ## Make .venv with everything in it

run: $(INSTALLED) ## Start a stack, send PROMPT="...", print its waterfall, stop
	@$(BIN)/pdserve run --prompt "$(PROMPT)"

up: $(INSTALLED) ## Keep a stack serving until Ctrl-C
	@$(BIN)/pdserve up

test: $(INSTALLED) ## Run all tests but the soak
	$(BIN)/python -m pytest -m 'not soak'

test-fast: $(INSTALLED) ## Run the tests that take under 2 minutes together
	$(BIN)/python -m pytest -m 'not slow and not soak'

test-gpu: $(INSTALLED) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

soak: $(INSTALLED) ## Test the fault tools, then run SOAK_SCHEDULES=200 random schedules from SOAK_SEED=1 on
	$(BIN)/python -m pytest -m soak
	SOAK_SEED=$(SOAK_SEED) SOAK_SCHEDULES=$(SOAK_SCHEDULES) $(BIN)/python -m pytest tests/faults/test_matrix.py -k random

bench: $(INSTALLED) ## Run the benchmarks; prints tables for benchmarks/RESULTS.md
	$(BIN)/python benchmarks/bench_engine.py
	$(BIN)/python benchmarks/bench_router.py

bench-handoff: $(INSTALLED) ## Run the handoff's benchmarks
	$(BIN)/python benchmarks/bench_nixl.py
	$(BIN)/python benchmarks/bench_handoff.py
	$(BIN)/python benchmarks/bench_exact.py

$(PEERS_INSTALLED): benchmarks/peers/install.sh
	@echo "installing vLLM into $(PEERS): a few minutes, 4 GB"
	@sh benchmarks/peers/install.sh $(PYTHON) $(PEERS)
	@touch $@

bench-peers: $(INSTALLED) $(PEERS_INSTALLED) ## Run our pair of services against vLLM's
	$(BIN)/python benchmarks/bench_pair.py

protos: $(INSTALLED) ## Regenerate the code beside the .proto files
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)
	@rm -f protos/pdserve/v1/engine_core_pb2_grpc.py

lint: $(INSTALLED) ## Check style and, where npm is there, the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npx >/dev/null; then npx --yes @bufbuild/buf@1.75.0 lint; else echo 'npx is missing: buf lint skipped'; fi

format: $(INSTALLED) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(INSTALLED) ## Check types
	$(BIN)/mypy

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(PEERS) .bench .run .pytest_cache .mypy_cache .ruff_cache .hypothesis
