# make run and make test need nothing but git, make and apt: each installs what is missing first (tools/setup.sh).
# BUILD=folder, JOBS=n, CMAKE_ARGS='-D...' reach tools/build.sh; ARGS='...' reaches what is run.
BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
export JOBS CMAKE_ARGS CMAKE

.DEFAULT_GOAL := help
.PHONY: run test build format check-format layers comments asan tsan aarch64 bench install wheel sdist docs release clean help

run: ## build the command and train a small GPT on this machine's headers (ARGS: see ARGS=--help)
	@BUILD=$(BUILD) tools/run.sh $(ARGS)

test: ## build everything and run all tests; ends with "N passed, N failed" (ARGS: see tools/run_tests.py)
	@BUILD=$(BUILD) tools/build.sh release
	@tools/run_tests.py --build-dir $(BUILD) --labels fast,slow,cuda $(ARGS)

build: ## build the library, the command, the tests, the examples and the benchmarks
	@BUILD=$(BUILD) tools/build.sh release

format: ## format the C++ in place
	@tools/format.sh

check-format: ## name the files that are not formatted
	@tools/format.sh --check

layers: ## check who includes whom, file lengths, include guards
	@tools/setup.sh
	@tools/check_layers.py

comments: ## check the comments, and the terms of code and documents
	@tools/check_comments.py

asan: ## fast tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@BUILD=$(BUILD)-asan tools/build.sh asan tests_fast
	@tools/run_tests.py --build-dir $(BUILD)-asan --labels fast $(ARGS)

tsan: ## tests of threads under ThreadSanitizer
	@BUILD=$(BUILD)-tsan tools/build.sh tsan tests_threads
	@tools/under_tsan.sh tools/run_tests.py --build-dir $(BUILD)-tsan --labels threads $(ARGS)

aarch64: ## cross-compile for aarch64 and run tests of the kernels by qemu
	@BUILD=$(BUILD)-aarch64 ARGS="$(ARGS)" tools/aarch64.sh

bench: ## build and run the benchmarks (ARGS: see build/bench/bench_head --help)
	@BUILD=$(BUILD) tools/build.sh release benchmarks
	@set -e; found=0; for program in $(BUILD)/bench/bench_*; do \
	  if [ -f $$program ] && [ -x $$program ]; then found=1; echo "== $$program $(ARGS)"; $$program $(ARGS); fi; \
	done; [ $$found = 1 ] || { echo "no benchmarks were built" >&2; exit 1; }

install: ## install below PREFIX (default /usr/local), staged below DESTDIR
	@BUILD=$(BUILD) tools/build.sh release installed
	@DESTDIR=$(DESTDIR) $$(sed -n 's/^CMAKE_COMMAND:INTERNAL=//p' $(BUILD)/CMakeCache.txt) --install $(BUILD) --prefix $(PREFIX)

wheel: ## build the Python package in build/dist: a manylinux wheel, tried in fresh environments, and the pure one
	@WHEEL_BUILD=$(BUILD)-wheel tools/wheel.sh $(BUILD)/dist
	@LOGITLESS_PURE=1 WHEEL_BUILD=$(BUILD)-wheel tools/wheel.sh $(BUILD)/dist

sdist: ## make the source distribution in build/dist, from which pip builds the wheel
	@WHEEL_BUILD=$(BUILD)-wheel tools/sdist.sh $(BUILD)/dist

release: ## make sdist, wheels (pure, for the CPU, with GPU kernels where nvcc is), checksums and notes in build/release
	@WHEEL_BUILD=$(BUILD)-wheel tools/release.sh $(BUILD)/release

docs: ## build the site of docs/ in build/site, without a warning
	@FRAMEWORKS=$${FRAMEWORKS:-$(BUILD)/python} tools/site.sh $(BUILD)/site

clean: ## remove the build folders of this Makefile
	rm -rf $(BUILD) $(BUILD)-cpu $(BUILD)-asan $(BUILD)-tsan $(BUILD)-aarch64 $(BUILD)-wheel $(BUILD)-wheel-tools $(BUILD)-python

help: ## this text
	@echo "logitless: make TARGET"
	@sed -n 's/^\([a-z-]*\): ## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
