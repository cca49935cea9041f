# Each target runs one tool; `.venv` is built, and rebuilt when pyproject.toml changes, by the targets that need it.

PYTHON ?= python3
define DEMO_PROMPT
async def fetch(session, url, timeout=None):
    """Fetch a URL and return its text."""
    try:
endef
PROMPT ?= $(DEMO_PROMPT)
export PROMPT
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# What runs models, what benchmarks need beside it, and the tools of whoever works on the code.
RUNS   := $(VENV)/.runs
BENCH  := $(VENV)/.bench
TOOLS  := $(VENV)/.tools
JOBS   ?= 2
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDER ?= $(firstword $(foreach tool,buildah podman docker,$(shell command -v $(tool))))
IMAGE   = $(BUILDER) build -f Containerfile $(if $(PIP_CONF),--secret id=pip$(COMMA)src=$(PIP_CONF))
COMMA  := ,
# Compiled beforehand, they hold up no test.
KERNELS := @$(BIN)/python -c "from specsplit.model.kernels.library import kernel_digest; kernel_digest()"
# A file's tests stay in one process, where they share what they set up; the long files of tests/service come first.
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check checks tools house lint imports format format-check type proto api-page bench-smoke bench bench-load research-test browser-test wheel images locks sbom chaos soak rolling fuzz client-test clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "  %-14s%s\n", $$1, $$2 }'

demo: $(RUNS)  ## Write text with the embedded pair, plain decoding beside it (make demo PROMPT="class Stack:")
	@printf '%s' "$$PROMPT"
	@$(BIN)/specsplit orchestrate --prompt "$$PROMPT" --max-new-tokens 96 --compare

test: $(TOOLS)  ## Run the tests, slow ones left out (about 11 minutes on two idle cores; JOBS=4 uses four)
	$(KERNELS)
	$(PYTEST) -m "not slow"

test-all: $(TOOLS)  ## Run every test over the full product of families, trees and sampling
	$(KERNELS)
	SPECSPLIT_TEST_ALL=1 $(PYTEST)

check: checks test  ## Run CI's checks and tests: format, lint, imports, types, the measures of the house, tests (CI also runs make wheel)

checks: type house lint format-check  ## Run every check but the tests (make -j2 -O checks runs two at a time)

tools: $(TOOLS)  ## Build .venv with all that the other targets need

lint: $(TOOLS) imports  ## Look for mistakes (ruff) and imports across floors (import-linter)
	$(BIN)/ruff check

house: $(TOOLS)  ## Measure sizes, prose, imports and the route of a token against their bars
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.house

imports: $(TOOLS)  ## Check that each file imports only from floors below
	$(BIN)/lint-imports --no-logo

format: $(TOOLS)  ## Format the code
	$(BIN)/ruff format

format-check: $(TOOLS)  ## Check that the code is formatted
	$(BIN)/ruff format --check

type: $(TOOLS)  ## Check the types of the package and of tools
	$(BIN)/pyright --pythonpath $(BIN)/python

proto: $(TOOLS)  ## Generate the messages of specsplit/rpc/pb from proto/
	$(BIN)/python proto/generate.py

api-page: $(TOOLS)  ## Generate docs/api.md from the docstrings
	$(BIN)/python -m tools.api_page

bench-smoke: $(BENCH)  ## Measure speed and acceptance on the embedded pair, one JSON line last
	$(BIN)/python -m benchmarks smoke

bench: $(BENCH)  ## Measure all figures and write their report (25 minutes on two free cores; goes on where it was stopped)
	$(BIN)/python -m benchmarks figures

bench-load: $(BENCH)  ## Put 1 to 16 clients on the embedded pair, beside batched generate (12 minutes), one JSON line last
	$(BIN)/python -m benchmarks load --temperature 0,1 --clients 1,8,16 --new-tokens 48

research-test: $(TOOLS)  ## Run the tests of benchmarks/research: training the pair and the studies (not part of CI)
	$(PIP) --editable '.[research]'
	$(BIN)/python -m pytest -q benchmarks/research/tests

browser-test: $(TOOLS)  ## Run the tests of the gateway's page in a real browser, which has to be installed (not part of CI)
	$(PIP) --editable '.[browser]'
	$(BIN)/python -m pytest -q tests/browser

wheel: $(RUNS)  ## Build dist/*.tar.gz, and of it dist/*.whl, and check that the wheel works where nothing else of ours is
	rm -rf dist
	$(BIN)/python -m tools.wheel dist

images:  ## Build the images with buildah, podman or docker (PIP_CONF=FILE for pip's settings; not part of CI)
	@test -n "$(BUILDER)" || { echo "Images need buildah, podman or docker; install one." >&2; exit 1; }
	$(IMAGE) --build-arg EXTRAS=worker -t specsplit-worker:$(VERSION) .
	$(IMAGE) --build-arg EXTRAS=gateway -t specsplit-gateway:$(VERSION) .
	$(IMAGE) -t specsplit-orchestrator:$(VERSION) .

locks: $(TOOLS)  ## Write the versions and hashes of the images' contents to requirements/
	$(PIP) uv
	$(BIN)/python -m tools.locks

sbom: $(TOOLS)  ## Write dist/specsplit-IMAGE.cdx.json, the CycloneDX list of each image's contents
	$(PIP) cyclonedx-bom
	$(BIN)/python -m tools.locks --sbom dist

client-test: $(TOOLS)  ## Run lm-eval, LangChain, LlamaIndex, guidellm and AIPerf on a gateway (installs them; not part of CI)
	$(BIN)/python -m pytest -q tests/clients

fuzz: $(TOOLS)  ## Send 50,000 fuzzed requests to a gateway, and 20,000 messages a method to each kind of worker (not part of CI)
	SPECSPLIT_TEST_NUM_FUZZED=50000 $(BIN)/python -m pytest -q tests/service/test_gateway.py -k fuzzed
	SPECSPLIT_TEST_NUM_MESSAGES=20000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/service/test_fuzz.py -o log_cli=true -o log_cli_level=INFO

chaos: $(TOOLS)  ## Let faults happen to every part of a service under load (make chaos MINUTES=5; 60 by default; not part of CI)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),60)

soak: $(TOOLS)  ## Put a steady mixed load on a service, and see whether a process grows (make soak MINUTES=5; 40 by default, behind 20 of warm-up; not part of CI)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),40)

rolling: $(TOOLS)  ## Restart every process of a service in turn under load, beginning with the previous commit's (not part of CI)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.rolling --previous $(or $(PREVIOUS),HEAD~1)

clean:  ## Remove the virtual environment, caches and build outputs
	rm -rf $(VENV) .clients build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find specsplit tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

RECENT := import sys; sys.exit(sys.version_info < (3, 11))
# What was left by a first try without pip (Debian's python3-venv), or by an older Python, is built anew.
USABLE := import pip; $(RECENT)
export OLD_PYTHON = SpecSplit needs Python 3.11 or later, and $(PYTHON) is older or missing; name another one: make PYTHON=python3.12 $(MAKECMDGOALS)
define BEGIN_VENV
	@echo "Building $(VENV), which takes a minute or two, once ..." >&2
	@$(BIN)/python -c '$(USABLE)' 2>/dev/null || { \
		$(PYTHON) -c '$(RECENT)' 2>/dev/null || { echo "$$OLD_PYTHON" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; }
endef

$(RUNS): pyproject.toml constraints.txt
	$(BEGIN_VENV)
	$(PIP) --editable '.[worker]'
	@touch $@

$(BENCH): $(RUNS)
	$(PIP) --editable '.[all]'
	@touch $@

# In one installation, which has all that the others would have brought.
$(TOOLS): pyproject.toml constraints.txt
	$(BEGIN_VENV)
	$(PIP) --editable '.[all,dev]'
	@touch $(RUNS) $(BENCH) $@
