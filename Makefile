# make demo   set everything up and run the main job: a server answering click predictions
# make test   set up what is missing and pass the tests
# make check  formatting, types, import rules        make bench  every benchmark, one table
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STEP := $(PYTHON) tools/step
NATIVE_SOURCES := pyproject.toml $(shell find hps/native -name '*.?pp' -o -name CMakeLists.txt)

.PHONY: help setup demo test test-fallbacks test-gpu test-services test-compose test-kube check check-deploy check-native check-aarch64 soak format proto bench bench-peers lock wheels check-wheels audit clean

help:
	@sed -n 's/^# //p' Makefile | head -3

# Locked dependencies first, then this package on top (editable, so sources act at once). Bytecode is compiled now:
# where Python may not write it, as with PYTHONDONTWRITEBYTECODE, each start of a command would compile for up to 1 s.
$(VENV)/.installed-runtime: requirements/runtime.txt $(NATIVE_SOURCES)
	@tools/prepare $(PYTHON)
	@echo "Setting up in $(VENV): four steps, done once, which take one to five minutes."
	@test -x $(BIN)/python || $(STEP) "1/4 Python environment" $(PYTHON) -m venv $(VENV)
	@$(STEP) "2/4 build tools" $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes \
	  -r requirements/build.txt
	@$(STEP) "3/4 dependencies" $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes \
	  --compile-bytecode -r requirements/runtime.txt
	@$(STEP) "4/4 native core" $(BIN)/uv pip install --quiet --python $(BIN)/python \
	  --no-build-isolation --no-deps --editable .
	@$(BIN)/python -m compileall -q hps services
	@$(BIN)/python -c 'import hps.native as n; n.COMPILED or print("No C++ compiler or Python headers: running on the NumPy twins, slower. On Debian and Ubuntu: apt-get install g++ python3-dev, then make clean setup")'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-runtime requirements/dev.txt
	@$(STEP) "tools for tests and checks" $(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes \
	  -r requirements/dev.txt
	@touch $@

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed-runtime
	@$(BIN)/hps demo $(ARGS)

# With PYTHONDONTWRITEBYTECODE, which some machines set, each of the hundreds of processes that tests start would compile
# all that it imports: 1 s each.
# Most tests wait for processes, so one process more than the machine has cores: make test JOBS=1 uses one.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))
test: setup test-services
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --slowest-files 15

# The tests of HTTP again, on the public interface of uvicorn that servers fall back to; see
# services/frontend/http/protocol/README.md. Tests marked private_interface are skipped.
FALLBACKS := HPS__SERVER__HTTP__PROTOCOL=uvicorn HPS__SERVER__ADMIN__PROTOCOL=uvicorn
PROTOCOL_TESTS := $(addprefix tests/unit/services/frontend/,http workers test_shared_memory_protocols.py) \
  $(addprefix tests/integration/,conformance test_clients.py test_hostile_clients.py test_openapi_fuzz.py \
  test_rest_bad_input.py test_rest_clients.py test_rest_docs.py test_rest_lifecycle.py test_rest_repeated.py \
  test_workers.py)
test-fallbacks: setup test-services
	@env -u PYTHONDONTWRITEBYTECODE $(FALLBACKS) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	  --slowest-files 10 $(PROTOCOL_TESTS)

# The tests that need a CUDA device, by an interpreter that has CuPy: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	@$(GPU_PYTHON) -c 'from hps.cuda.loader import cupy; cupy()'
	@$(GPU_PYTHON) -m pytest -m gpu tests/unit/tiers tests/unit/dense tests/unit/cuda \
	  tests/unit/node/test_gpu_caches.py tests/unit/node/test_gpu_scheduler.py tests/unit/node/test_gpu_sharing.py \
	  tests/unit/node/test_gpu_versions.py tests/unit/node/test_gpu_row_formats.py tests/unit/predict/test_device_feed.py tests/contract tests/model \
	  tests/unit/tools/plan/test_gpu_calibration.py tests/integration/test_gpu_switch.py

# The CPU cache's readers in parallel to its writer, those and writers of hps.table's table, fetches in single flight's
# table, the batch scheduler's clients, and messages that may be anything, under sanitizers:
# make check-native SECONDS=600
SECONDS ?= 20
check-native: setup
	@for sanitizer in address,undefined thread; do \
	  echo "-fsanitize=$$sanitizer"; \
	  $(BIN)/cmake -S hps/native -B build/$$sanitizer -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DHPS_PYTHON=OFF -DHPS_STRESS=ON \
	    -DCMAKE_CXX_FLAGS="-g -fsanitize=$$sanitizer -fno-sanitize-recover=all" > /dev/null && \
	  $(BIN)/cmake --build build/$$sanitizer > /dev/null && \
	  build/$$sanitizer/stress $(SECONDS) && build/$$sanitizer/stress_in_flight 10 && \
	  build/$$sanitizer/stress_scheduler 10 && build/$$sanitizer/stress_scored 10 && build/$$sanitizer/fuzz_codec 10 || exit 1; \
	done

# The CPU cache shared by processes, read in parallel to its writer while readers are killed: make soak MINUTES=10
MINUTES ?= 10
soak: setup
	@nice -n 19 $(BIN)/python tests/support/soak_cache.py $$(($(MINUTES) * 60))

# The native core for 64-bit ARM: that it builds and runs, readers in parallel to their writer. An emulator reorders
# memory accesses no more than its host does; cache_layout.hpp explains why the order holds. On Debian
# and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user
check-aarch64: setup
	@$(BIN)/cmake -S hps/native -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_EXE_LINKER_FLAGS=-static -DHPS_PYTHON=OFF -DHPS_STRESS=ON > /dev/null
	@$(BIN)/cmake --build build/aarch64 > /dev/null
	@qemu-aarch64 build/aarch64/stress $(SECONDS)
	@qemu-aarch64 build/aarch64/stress_in_flight 10
	@qemu-aarch64 build/aarch64/stress_scheduler 10
	@qemu-aarch64 build/aarch64/stress_scored 10
	@qemu-aarch64 build/aarch64/fuzz_codec 10

# What the tests use beside the product. What can't be had here is named and its tests skip; in
# continuous integration (CI is set) they fail.
# PyTorch, in the environment of FBGEMM, is a download of 2 GB, Keras with TensorFlow one of 300 MB: only there, or by
# make bench-peers.
test-services: setup
	@for part in perf_analyzer kafka triton kserve $(CHART_TOOLS) $(if $(CI),fbgemm keras); do $(BIN)/python -m benchmarks.peers $$part || echo "Its tests will be skipped."; done
	@for tool in redis-server openssl curl; do command -v $$tool >/dev/null || tools/install $$tool || echo "Its tests will be skipped."; done
	@command -v promtool >/dev/null || tools/install prometheus || echo "Its tests will be skipped."

# What deploys the product, as far as no server is needed: Dockerfile, compose file and chart, alerts and dashboards.
CHART_TOOLS := kubernetes_schemas kube_crds kubeconform helm
check-deploy: setup
	@for part in $(CHART_TOOLS); do $(BIN)/python -m benchmarks.peers $$part || exit 1; done
	@$(BIN)/python -m pytest tests/deploy

# The chart installed, upgraded, rolled back and removed on a Kubernetes API server, which is compiled for it once.
test-kube: setup
	@command -v etcd >/dev/null || tools/install etcd-server
	@for part in $(CHART_TOOLS) kube-apiserver; do $(BIN)/python -m benchmarks.peers $$part || exit 1; done
	@HPS_KUBE=1 $(BIN)/python -m pytest -rs -m kube tests/deploy

# The image and docker-compose.yml, really built and run, in containers by podman: as root, on Debian or Ubuntu.
test-compose: setup
	@tools/containers
	@for part in kafka triton docker-compose; do $(BIN)/python -m benchmarks.peers $$part || exit 1; done
	@HPS_CONTAINERS=1 $(BIN)/python -m pytest -rs -s -m containers tests/deploy

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@find hps -name '*.?pp' -o -name '*.cu*' | xargs $(BIN)/clang-format --dry-run --Werror

format: setup
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .
	@find hps -name '*.?pp' -o -name '*.cu*' | xargs $(BIN)/clang-format -i

# What Python has of hps/v1/*.proto; to be made again after a change of those.
proto: setup
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. hps/v1/*.proto

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

# The servers we are compared with, in environments of their own under .peers, a Redis to measure, and the libraries
# that the C and C++ programs are compiled against. What can't be had is named; its bars stay unmeasured.
bench-peers: setup
	@command -v g++ >/dev/null || tools/install g++ || true
	@for each in rocksdb/db.h:librocksdb-dev hiredis/hiredis.h:libhiredis-dev; do \
	  echo "#include <$${each%:*}>" | g++ -x c++ -E - >/dev/null 2>&1 || \
	    tools/install $${each#*:} || echo "Its bars will stay unmeasured."; \
	done
	@command -v redis-server >/dev/null || tools/install redis-server || echo "Its bars will stay unmeasured."
	@$(BIN)/python -m benchmarks.peers

# Rewrites the locks from pyproject.toml; run it after changing a dependency.
lock: setup
	@for part in audit build wheels runtime otel gpu dev; do tools/lock $$part; done

# Wheels that need no compiler, in dist/wheels, for every glibc from 2.17 on: make wheels ARCHS=x86_64
ARCHS ?= x86_64 aarch64
wheels: setup
	@tools/wheels/build $(ARCHS)

# Those of this machine, installed and run in an empty environment of each Python that is here.
check-wheels:
	@tools/wheels/check

# What is installed, against known vulnerabilities.
audit: setup
	@tools/audit

clean:
	rm -rf $(VENV) build
