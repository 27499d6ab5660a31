PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Tell me a story.
SOAK_SEED ?= 1
SOAK_SCHEDULES ?= 200
FUZZ_MINUTES ?= 5
FUZZ_FACTOR ?= 10
# Byte code is made of what is imported, at its first import, also where the environment forbids it (many containers
# do): without it each process takes two seconds of CPU more to start. The build backend is in the environment.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile --no-build-isolation -c constraints.txt
INSTALLED := $(VENV)/.installed
# With what tests, benchmarks and generators need besides.
DEV_INSTALLED := $(VENV)/.dev-installed
# Has torch without CUDA; empty, or out of reach: PyPI's, which is the one for CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
# A test that hangs ends its process, which prints where its threads are, and fails.
PYTEST := $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true -o faulthandler_timeout=1800
RUN_TESTS := $(BIN)/python tools/run_tests.py
SEED ?= 1
SANITIZED := .bench/sanitized-kernels
CRDS := .crds/.installed
CLIENTS := .clients/.installed
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Of the machine with a GPU: its Python, its platforms, and what its image lacks, as bench_gpu.py names it.
GPU_PYTHON ?= 3.12
GPU_PLATFORMS := any $(foreach glibc,17 24 27 28,manylinux_2_$(glibc)_x86_64) manylinux2014_x86_64
GPU_WHEELS ?= annotated-types apache-tvm-ffi grpcio-health-checking==1.74.* grpcio-reflection==1.74.* httptools \
	msgspec nixl-cu13 pydantic pydantic-core pytest-asyncio starlette typing-inspection uvicorn xgrammar
# cpu or cuda.
VARIANT ?= cpu
# pip would retry for each package where it is out of reach.
IS_REACHABLE := import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)
PROTOS := $(wildcard protos/pdserve/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help install run up test test-fast test-flaky mutants test-live test-ci test-gpu test-sanitized clients crds soak fuzz bench bench-edge bench-handoff bench-peers bench-cpu bench-gpu bench-grammars gpu-wheels images test-images protos chart pictures lint format typecheck clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# xgrammar asks for Triton, which only GPUs use; what it needs besides is among the engine's requirements.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@index=; if $(BIN)/python -c '$(IS_REACHABLE)' '$(TORCH_INDEX)/torch/' 2> /dev/null; then \
		index='--extra-index-url $(TORCH_INDEX)'; fi; $(PIP) $$index torch numpy hatchling editables
	@(PYTHONPATH=kernels $(BIN)/python -m pdserve_kernels.cpu.build || \
		echo "the CPU runs on reference kernels, which are several times slower") & \
		$(PIP) -e '.[router,engine]' && $(PIP) --no-deps xgrammar; status=$$?; wait; exit $$status
	@touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@echo "installing what tests need"
	@$(PIP) -e '.[router,worker,dev]'
	@touch $@

install: $(DEV_INSTALLED) ## Make .venv with everything in it, for development too

run: $(INSTALLED) ## Start a stack, send PROMPT="...", print its waterfall, stop
	@$(BIN)/pdserve run --prompt "$(PROMPT)"

up: $(INSTALLED) ## Keep a stack serving until Ctrl-C
	@$(BIN)/pdserve up

test: $(DEV_INSTALLED) ## Run all tests but the soak, and those of images and of Prometheus; what pytest prints goes to .tests
	@$(RUN_TESTS)

test-fast: $(DEV_INSTALLED) ## Run the files of tests that take five seconds or less each
	@$(RUN_TESTS) --fast

test-flaky: $(DEV_INSTALLED) ## Run all N=3 times in random order beside busy cores, and list what failed in any
	@$(RUN_TESTS) --flaky $(or $(N),3)

mutants: $(DEV_INSTALLED) ## Change N=40 places of AREAS, by SEED=1, or those of AGAINST=tests/mutants.json; list what no test notices
	$(BIN)/python tools/mutate.py $(AREAS) --seed $(SEED) --number $(or $(N),40) $(if $(AGAINST),--against $(AGAINST))

test-live: $(DEV_INSTALLED) ## Test dashboards and alerts with a real Prometheus; installs it from Debian if it is missing
	@sh tests/live/install.sh
	@$(RUN_TESTS) live

test-ci: $(DEV_INSTALLED) ## Run make test and make test-live in one; what fails is tried once more, at most three tests
	@sh tests/live/install.sh
	@$(RUN_TESTS) --live --retry

test-gpu: $(DEV_INSTALLED) ## Run the tests that need a GPU, and say on one page what became of them
	$(BIN)/python benchmarks/bench_gpu.py --only kernels,transport,engine,sleep,memory

test-sanitized: $(DEV_INSTALLED) ## Run the C++ kernels' tests under the address and undefined-behaviour sanitizers
	$(BIN)/python -m pdserve_kernels.cpu.build --sanitize --output $(SANITIZED)
	LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
		PDSERVE_KERNELS_DIR=$(CURDIR)/$(SANITIZED) $(PYTEST) --capture=sys \
		tests/kernels/test_cpu_*.py tests/kernels/test_lora.py

$(CRDS): Makefile
	@if command -v npm >/dev/null; then npm install --prefix .crds --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
		@kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 @kubernetes-models/cert-manager@6.0.0 \
		@grafana/schema@11.6.0 ts-json-schema-generator@2.4.0 typescript@5 && touch $@; \
	else echo 'npm is missing: no schemas of operators and of Grafana'; fi

$(CLIENTS): tests/clients/install.sh tests/clients/requirements.txt
	@echo "installing clients into .clients: some minutes, 3 GB"
	@if $(PYTHON) -c '$(IS_REACHABLE)' '$(TORCH_INDEX)/torch/' 2> /dev/null; then \
		export PIP_EXTRA_INDEX_URL='$(TORCH_INDEX)'; fi; sh tests/clients/install.sh $(PYTHON) .clients
	@touch $@

clients: $(DEV_INSTALLED) $(CLIENTS) ## Run OpenAI's SDKs, LangChain, litellm, guidellm, lm-eval, grpc-js and Schemathesis against a stack
	$(PYTEST) -m clients tests/clients

crds: $(CRDS) ## Fetch schemas of operators and of Grafana, without which some tests of the chart are skipped

soak: $(DEV_INSTALLED) ## Run what make test leaves out, then all fault cases and SOAK_SCHEDULES=200 random schedules from SOAK_SEED=1 on
	$(PYTEST) -o faulthandler_timeout=14400 -m 'soak and not interpreted'
	TRITON_INTERPRET=1 $(PYTEST) -o faulthandler_timeout=14400 -m 'soak and interpreted' tests/kernels tests/engine
	PDSERVE_FAULTS=all SOAK_SEED=$(SOAK_SEED) SOAK_SCHEDULES=$(SOAK_SCHEDULES) $(PYTEST) tests/faults/test_matrix.py
	PDSERVE_FAULTS=all PDSERVE_FAULT_RANKS=2 $(PYTEST) tests/faults/test_matrix.py -k 'not random'

fuzz: $(DEV_INSTALLED) ## Try inputs for FUZZ_MINUTES=5, others in every round; prints the seed and the smallest input that fails
	@end=$$(($$(date +%s) + 60 * $(FUZZ_MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
		seed=$${FUZZ_SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
		echo "FUZZ_SEED=$$seed FUZZ_FACTOR=$(FUZZ_FACTOR)"; \
		FUZZ_FACTOR=$(FUZZ_FACTOR) OMP_WAIT_POLICY=passive $(PYTEST) -q --forks 2 \
			--hypothesis-seed=$$seed tests/fuzz || exit 1; \
	done

bench: $(DEV_INSTALLED) ## Run the benchmark of routers; prints tables for benchmarks/RESULTS.md, as all bench-* do
	$(BIN)/python benchmarks/bench_router.py

bench-edge: $(DEV_INSTALLED) ## Run the benchmark of what one client's message does to another's stream
	$(BIN)/python benchmarks/bench_edge.py

bench-handoff: $(DEV_INSTALLED) ## Run the handoff's benchmarks
	$(BIN)/python benchmarks/bench_nixl.py
	$(BIN)/python benchmarks/bench_handoff.py
	$(BIN)/python benchmarks/bench_exact.py

$(PEERS_INSTALLED): benchmarks/peers/install.sh
	@echo "installing vLLM into $(PEERS): a few minutes, 4 GB"
	@sh benchmarks/peers/install.sh $(PYTHON) $(PEERS)
	@touch $@

bench-peers: $(DEV_INSTALLED) $(PEERS_INSTALLED) ## Run our pair of services against vLLM's
	$(BIN)/python benchmarks/bench_pair.py

bench-cpu: $(DEV_INSTALLED) $(PEERS_INSTALLED) ## Run our engine, vLLM and transformers on the CPU in turns, then our servers and vLLM's
	$(BIN)/python benchmarks/bench_cpu.py
	$(BIN)/python benchmarks/bench_cpu.py --served

bench-gpu: $(DEV_INSTALLED) ## Run the tests that need a GPU, kernels, engine, transformers and handoff on this machine's GPU
	$(BIN)/python benchmarks/bench_gpu.py

gpu-wheels: ## Download into .gpu-wheels what a machine with torch and Triton lacks; for bench_gpu.py --wheels .gpu-wheels
	@rm -rf .gpu-wheels
	$(PYTHON) -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: -c constraints.txt \
		--python-version $(GPU_PYTHON) $(addprefix --platform ,$(GPU_PLATFORMS)) -d .gpu-wheels $(GPU_WHEELS)
	@# Half of NIXL's is for experts of a mixture over several machines; nothing here imports it.
	@if command -v zip >/dev/null; then zip -qd .gpu-wheels/nixl_cu1*.whl 'nixl_ep_*'; fi
	@du -sh .gpu-wheels

bench-grammars: $(DEV_INSTALLED) ## Run the benchmark of what grammars cost steps, first tokens and neighbours
	$(BIN)/python benchmarks/bench_grammars.py

protos: $(DEV_INSTALLED) ## Regenerate the code beside the .proto files
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)
	@rm -f protos/pdserve/v1/engine_core_pb2_grpc.py

images: ## Build the images of routers and workers; VARIANT=cuda for GPUs
	DOCKER_BUILDKIT=1 docker build $(BUILD_FLAGS) --target router --tag pdserve-router:$(VERSION) .
	DOCKER_BUILDKIT=1 docker build $(BUILD_FLAGS) --target worker --build-arg VARIANT=$(VARIANT) --tag pdserve-worker:$(VERSION)-$(VARIANT) .

test-images: $(DEV_INSTALLED) ## Build images and test them as containers; installs Docker from Debian, takes 10 minutes
	sh tests/images/install.sh
	$(PYTEST) -m images -rP tests/images

chart: $(DEV_INSTALLED) ## Bring the chart's schema, README and dashboards up to date with the code and its values
	$(BIN)/python tools/update_chart.py
	$(BIN)/python tools/update_dashboards.py

pictures: $(DEV_INSTALLED) ## Take the docs' pictures anew from a running system; needs make test-live's packages; some 5 minutes
	$(BIN)/python tools/take_pictures.py

lint: $(DEV_INSTALLED) ## Check style and, where npm is there, the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npx >/dev/null; then npx --yes @bufbuild/buf@1.75.0 lint; else echo 'npx is missing: buf lint skipped'; fi

format: $(DEV_INSTALLED) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(DEV_INSTALLED) ## Check types
	$(BIN)/mypy

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(PEERS) .bench .tests .run .clients .crds .gpu-wheels .mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
