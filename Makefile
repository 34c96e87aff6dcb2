# SPDX-License-Identifier: Apache-2.0
#
# The front door. CMake does the work; these are the words to remember:
#
#   make setup        install what is missing, build build/       make SAN=address  build-asan/
#   make demo         a small job on this machine                 make SAN=thread   build-tsan/
#   make check        the quick loop: build/, its quick tests, style; 3 minutes at most
#   make test         all builds, all tests, style                make check-style  style only
#   make bench        measurements                                make clean        remove builds
#   make wheel        the Python package, in dist/             make test-wheel   tries it
#   make release      what would be published, in dist/release: packages, sums, components
#   make test-release installs it: in Ubuntu 20.04, Debian 12, an emulated aarch64; as root
#   make docs         the book: a site with search, in build-docs/book/site
#   make bench-torch  horovod.torch beside torch.distributed: latencies, training speed
#   make test-torch-versions  horovod.torch under older versions of PyTorch (installs them)
#   make test-gpu     PyTorch 2.15 and 2.6 (installs it) on the simulated GPU of tests/gpu
#   make test-gpu-tensorflow  TensorFlow's build for GPUs (installs it) on it
#   make test-dashboard  the job page in a real Chromium (installs it)
#   make pictures     the pictures of that page in docs/img, from real runs
#   make test-tensorflow  the TensorFlow tests on 2.18 and 2.15 (Keras 2), in .venv-tf*
#   make test-spark   horovod.spark on real Spark 4.3 and 3.5, with a cluster of four hosts
#   make test-spark-short  the toy and the Rossmann example on local Spark 4.3
#   make test-tensorflow-asan  its operations under the address sanitizer
#   make fuzz         every parser, SECONDS=600 each
#   make test-long    every test in every build, parsers fuzzed for ten minutes each
#   make test-launchers  ranks under real mpiruns and srun (installs them); ONLY=Debian: fewer
#   make test-rdma    real verbs, in two emulated machines (installs an emulator), some minutes
#   make chaos        faults at random for SECONDS=600, from SEED=1
#   make soak         FAULTS=240 in jobs that train, for SOAK_SECONDS=3600 at most, from SEED=1;
#                     as root
#   make test-images  the images of deploy/docker, built and used; some minutes, as root
#   make test-openpai-image  the image of deploy/openpai, built, and jobs in it; as root
#   make test-cluster the chart on a real Kubernetes made for it; half an hour the first time
.PHONY: all setup demo check test test-long test-launchers bench fuzz chaos clean check-style \
	wheel setup-spark \
	test-spark test-spark-short bench-docs bench-torch test-torch-versions test-wheel

build_of_ := build
build_of_address := build-asan
build_of_thread := build-tsan
BUILD := $(build_of_$(SAN))

all:
	@if [ -z "$(BUILD)" ]; then echo "SAN is \"$(SAN)\": use address or thread"; exit 1; fi
	@tools/build.sh $(BUILD)

setup:
	@tools/setup.sh

demo: setup
	@./build/hvd-bench --demo
	@echo "and the example of examples/c, started by horovodrun:"
	@./build/horovodrun -np 4 ./build/examples/allreduce
	@tools/demo-torch.sh
	@tools/demo-spark.sh

check:
	@tools/test.sh --quick

test:
	@tools/setup.sh --no-build
	@tools/test.sh

test-long:
	@tools/setup.sh --no-build
	@HVD_LONG=1 HVD_FUZZ_SECONDS=600 tools/test.sh

test-launchers: setup
	@tests/foreign_launchers/setup.sh $(ONLY)
	@tests/foreign_launchers/run.py build --only "$(ONLY)"
	@if [ -z "$(ONLY)" ]; then tests/foreign_launchers/test_pai.py build; fi

RDMA ?=

.PHONY: test-rdma
test-rdma: setup
	@tests/rdma/setup.sh
	@tests/rdma/run.sh build $(RDMA)

bench: setup
	@bench/run.sh
	@$(MAKE) --no-print-directory bench-torch

bench-docs: setup
	@bench/docs.sh

bench-torch: setup
	@.venv/bin/python bench/torch_bench.py

test-torch-versions: setup
	@tools/test-torch-versions.sh

.PHONY: test-gpu test-gpu-tensorflow
test-gpu: setup
	@tools/test-gpu.sh

test-gpu-tensorflow: setup
	@tools/test-gpu-tensorflow.sh

.PHONY: test-dashboard pictures
test-dashboard: setup
	@tools/test-dashboard.sh

pictures: setup
	@tools/test-dashboard.sh --pictures

SECONDS := 600
fuzz:
	@tools/setup.sh --no-build
	@tools/build.sh build-fuzz
	@HVD_FUZZ_SECONDS=$(SECONDS) ctest --test-dir build-fuzz --output-on-failure \
		--parallel "$$((2 * $$(nproc)))"

# Which lines the C tests reach.
.PHONY: coverage
coverage:
	@tools/setup.sh --no-build
	@tools/coverage.sh

wheel: setup
	@tools/wheel.sh

test-wheel:
	@tools/test-wheel.sh

.PHONY: docs
docs: setup
	@test -x build-docs/venv/bin/mkdocs || { python3 -m venv build-docs/venv && \
		build-docs/venv/bin/pip install -q --disable-pip-version-check mkdocs-material==9.6.23; }
	@build-docs/venv/bin/python tools/docs.py build-docs/book build

.PHONY: release test-release
release: setup
	@tools/release/release.sh

test-release:
	@tools/release/test-release.sh

setup-spark:
	@tools/setup-spark.sh

test-spark: setup-spark
	@tools/test-spark.sh

# What continuous integration has time for: the toy, and Rossmann from end to end. Submitting it is
# left to test-spark.
test-spark-short: setup-spark
	@tools/test-spark.sh 4.3.0 -- tests/spark/test_examples.py \
		-k "hello or (rossmann and not submitted)"

TENSORFLOWS ?= 2.18.1 2.15.1
.PHONY: test-tensorflow
test-tensorflow: setup
	@tools/setup-tensorflow.sh $(TENSORFLOWS)
	@for version in $(TENSORFLOWS); do \
		echo "== TensorFlow $$version"; \
		PYTHONPATH=$(CURDIR)/build/python .venv-tf$$version/bin/python -m pytest tests/python/tensorflow \
			-k "not pytorch" || exit 1; \
	done

.PHONY: test-images test-cluster
test-images:
	@tests/cluster/images.sh build/images

test-cluster:
	@tests/cluster/run.sh build

.PHONY: test-openpai-image
test-openpai-image: setup
	@tests/openpai/image.sh build/openpai-image


.PHONY: test-tensorflow-asan
test-tensorflow-asan: setup
	@tools/test-tensorflow-asan.sh

SEED := 1
chaos: setup
	@./build/tests/test_chaos --seconds $(SECONDS) --seed $(SEED)

FAULTS := 240
SOAK_SECONDS := 3600
.PHONY: soak
soak: setup
	@python3 tests/soak/soak.py build --faults $(FAULTS) --seconds $(SOAK_SECONDS) --seed $(SEED)

check-style:
	@tools/check-style

clean:
	rm -rf build build-clang build-asan build-tsan build-wheel build-curl* build-openssl* dist \
		build-docs build-release build-plain \
		build-fuzz build-cov
