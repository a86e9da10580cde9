# make demo   set everything up and run the main job: a server answering click predictions
# make test   set up what is missing and pass the tests
# make check  formatting, types, import rules        make bench  every benchmark, one table
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := pyproject.toml $(shell find hps/native -name '*.?pp' -o -name CMakeLists.txt)

.PHONY: help setup demo test test-gpu test-services check check-native format bench bench-peers lock clean

help:
	@sed -n 's/^# //p' Makefile | head -3

# Locked dependencies first, then this package on top (editable, so sources act at once).
$(VENV)/.installed-runtime: requirements/runtime.txt $(NATIVE_SOURCES)
	@tools/prepare $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing locked dependencies and building the native core …"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/runtime.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c 'import hps.native as n; n.COMPILED or print("No C++ compiler or Python headers: running on the NumPy twins, slower. On Debian and Ubuntu: apt-get install g++ python3-dev, then make clean setup")'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-runtime requirements/dev.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed-runtime
	@$(BIN)/hps demo $(ARGS)

test: setup test-services
	@$(BIN)/python -m pytest

# The tests that need a CUDA device, by an interpreter that has CuPy: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	@$(GPU_PYTHON) -c 'from hps.cuda.loader import cupy; cupy()'
	@$(GPU_PYTHON) -m pytest -m gpu tests/unit/tiers tests/contract tests/model

# The CPU cache's readers beside its writer under sanitizers: make check-native SECONDS=600
SECONDS ?= 20
check-native: setup
	@for sanitizer in address,undefined thread; do \
	  echo "-fsanitize=$$sanitizer"; \
	  $(BIN)/cmake -S hps/native -B build/$$sanitizer -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DHPS_PYTHON=OFF -DHPS_STRESS=ON \
	    -DCMAKE_CXX_FLAGS="-g -fsanitize=$$sanitizer -fno-sanitize-recover=all" > /dev/null && \
	  $(BIN)/cmake --build build/$$sanitizer > /dev/null && \
	  build/$$sanitizer/stress $(SECONDS) || exit 1; \
	done

# What the tests use beside the product. What can't be had here is named and its tests skip; in
# continuous integration (CI is set) they fail.
test-services: setup
	@$(BIN)/python -m benchmarks.peers perf_analyzer || echo "Its tests will be skipped."
	@for tool in redis-server openssl curl; do command -v $$tool >/dev/null || tools/install $$tool || echo "Its tests will be skipped."; done

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@find hps -name '*.?pp' -o -name '*.cu*' | xargs $(BIN)/clang-format --dry-run --Werror

format: setup
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .
	@find hps -name '*.?pp' -o -name '*.cu*' | xargs $(BIN)/clang-format -i

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

# The servers we are compared with, in environments of their own under .peers.
bench-peers: setup
	@$(BIN)/python -m benchmarks.peers

# Rewrites the locks from pyproject.toml; run it after changing a dependency.
lock: setup
	@for part in build runtime dev; do tools/lock $$part; done

clean:
	rm -rf $(VENV) build
