# Builds with the libtorch that `make libtorch` fetches into .libtorch/, or with your own where
# LIBTORCH or LIBTORCH_USE_PYTORCH is set. All of it is built in release mode: libtorch's bindings
# take minutes to compile, and so they are compiled once.
LIBTORCH_VERSION = 2.13.0
# The newest PyTorch that the program was tried beside.
NEWEST_TORCH = 2.15.0
ARGS = --max-epochs=2 --batch-size=32

PROGRAM = $(or $(CARGO_TARGET_DIR),target)/release/ddp-mp

# The PyTorch that checks and `make compare` use. Another one gets a folder of its own: make parity TORCH=2.15.0
TORCH = $(LIBTORCH_VERSION)
OTHER_TORCH = $(if $(filter-out $(LIBTORCH_VERSION),$(TORCH)),-$(TORCH))
PYTHON_FOLDER = .python$(OTHER_TORCH)
PYTORCH_FOLDER = .pytorch$(OTHER_TORCH)

# Where `make simulated-gpus` builds.
SIMULATED_GPUS = $(or $(CARGO_TARGET_DIR),target)/simulated_gpus

# The crate of `make loom`, which needs no libtorch.
LOOM = --locked --manifest-path tests/loom/Cargo.toml --target-dir $(or $(CARGO_TARGET_DIR),target)/loom

# What builds the book. It is built into .tools/, once, and without optimization: that is sooner, and fast enough.
MDBOOK = 0.5.4

# What checks the dependencies. It is built into .tools/, once.
CARGO_DENY = 0.20.2

# An empty LIBTORCH is none.
ifeq ($(LIBTORCH),)
unexport LIBTORCH
endif

# Where libtorch's include/ and lib/ are.
LIBTORCH_OF_PYTHON = import os, torch; print(os.path.dirname(torch.__file__))
LIBTORCH_FOLDER = $(or $(LIBTORCH),$(if $(LIBTORCH_USE_PYTORCH),$(shell python3 -c '$(LIBTORCH_OF_PYTHON)'),.libtorch/torch))

# Every target with a description.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST))) cargo
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

build: cargo libtorch ## build the program
	@[ -e $(PROGRAM) ] || echo "Building ddp-mp; the first time takes less than 4 minutes on two cores." >&2
	cargo build --release --bin ddp-mp

run: build ## build and run the demo; its flags: make run ARGS="--help"
	@cargo run --release --quiet -- $(ARGS)

test: build ## build and run the tests, with some cases of each kind
	python3 -B tests/run.py

test-all: build ## run every case of all tests
	python3 -B tests/run.py --all

# The modules of tests/ whose ranks are threads of the test program.
FAST_TESTS = c10d callbacks collectives data engine functional gradients groups messages optim outputs parity properties source_pages tidy

test-fast: cargo libtorch ## run the unit tests, and the tests that do not start the program: under a minute after a change
	python3 -B tests/run.py --fast $(addsuffix ::,$(FAST_TESTS))

# The oldest pair in the range of Cargo.toml.
OLDEST_TCH = 0.24.0
OLDEST_LIBTORCH = 2.11.0

# The libtorch of the machine that `make gpu-pack` is for, and the tch that is for it.
GPU_TORCH = 2.11.0
GPU_TCH = 0.24.0

# The copy of the clone that is built with libtorch $(1). It keeps what it has built and fetched.
copy_for = $(or $(CARGO_TARGET_DIR),target)/torch-$(1)

# Makes the copy for libtorch $(1), with tch $(2), or brings it up to date. What has changed gets the time of the copy: with
# its own, cargo would take a file that was changed during a build for built.
define make_copy
@mkdir -p $(copy_for)/target
git ls-files >$(copy_for)/target/tracked
xargs -d '\n' cp --update --parents --preserve=mode --target-directory=$(copy_for) <$(copy_for)/target/tracked
cd $(copy_for) && find . -type f ! -path './target/*' ! -path './.libtorch/*' ! -path './.python/*' -printf '%P\n' \
    | { grep -vxFf target/tracked || true; } | xargs -rd '\n' rm
cd $(copy_for) && cargo update --quiet --precise $(2) tch
@[ -e $(copy_for)/target/release ] || [ ! -e $(BUILT)/.fingerprint ] || $(copy_dependencies)
endef

# What the clone has compiled of the dependencies serves the copy, too. The fingerprints come first: cargo writes each after
# the files that it is of, and may compile meanwhile. If a file goes away, the copy compiles all itself.
BUILT = $(or $(CARGO_TARGET_DIR),target)/release
PARTIAL = $(copy_for)/target/release.partial
copy_dependencies = { rm -rf $(PARTIAL) && mkdir -p $(PARTIAL)/deps && \
    cp -a $(BUILT)/.fingerprint $(BUILT)/build $(PARTIAL) && \
    cp -a $(BUILT)/deps/*.rlib $(BUILT)/deps/*.rmeta $(BUILT)/deps/*.d $(BUILT)/deps/*.so $(PARTIAL)/deps && \
    mv -T $(PARTIAL) $(copy_for)/target/release; } || true

# Makes targets in the copy for libtorch $(1). The copy is no repository, so it is told the commit.
COMMIT = $(shell git describe --always --exclude='*' --abbrev=12 --dirty=-modified)
in_copy = cd $(copy_for) && env -u CARGO_TARGET_DIR -u LIBTORCH_USE_PYTORCH DDP_MP_COMMIT=$(COMMIT) \
    $(MAKE) LIBTORCH= LIBTORCH_VERSION=$(1)

test-oldest: cargo ## build and test a copy in target/torch-2.11.0 with the oldest tch and libtorch of the range in Cargo.toml
	$(call make_copy,$(OLDEST_LIBTORCH),$(OLDEST_TCH))
	+$(call in_copy,$(OLDEST_LIBTORCH)) test

test-newest: ## try the newest PyTorch: its values beside the recorded ones, and its torchrun with this program
	$(MAKE) parity TORCH=$(NEWEST_TORCH)
	$(MAKE) test-launchers TORCH=$(NEWEST_TORCH)

test-gpus: build simulated-gpus ## run the tests of the GPU path on simulated GPUs
	cargo test --release --no-run --test tests --test gpus
	SIM_GPUS=2 LD_LIBRARY_PATH=$(abspath $(SIMULATED_GPUS)) cargo test --release --test tests cuda::
	SIMULATED_GPUS=$(abspath $(SIMULATED_GPUS)) cargo test --release --test gpus

loom: cargo ## try every order in which ranks can take turns (loom), and look for races (thread sanitizer)
	cargo test --release $(LOOM) --features loom -- --nocapture
	cargo test --release $(LOOM)
	@export RUSTUP_AUTO_INSTALL=0; \
	if ! ls "$$(rustc +nightly --print target-libdir 2>&1)"/librustc-nightly_rt.tsan.a >/dev/null 2>&1; \
	then echo "skipped: the thread sanitizer, which takes a nightly Rust: rustup toolchain install nightly"; \
	else \
	    export RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer"; \
	    export TSAN_OPTIONS="suppressions=$(CURDIR)/tests/loom/sanitizer.supp"; \
	    set -x; cargo +nightly test $(LOOM) --target "$$(rustc +nightly --print host-tuple)" races; \
	fi

check: cargo libtorch ## formatting, lints and documentation, warnings being errors, and the tests of the scripts in Python
	cargo fmt --check
	cargo clippy --release --all-targets -- -D warnings
	cargo clippy --release --test gpus -- -D warnings
	cargo fmt --check --manifest-path tests/loom/Cargo.toml
	cargo clippy --release $(LOOM) --all-targets -- -D warnings
	cargo clippy --release $(LOOM) --all-targets --features loom -- -D warnings
	LIBTORCH=/nowhere RUSTDOCFLAGS="-D warnings" cargo doc --release --no-deps --package ddp-mp-compare --package ddp-mp-engine --package ddp-mp-views --package ddp-mp --features ddp-mp/doc-only # as docs.rs does
	python3 -B -m unittest discover --start-directory benches
	python3 -B -m unittest discover --start-directory tests/gpu_pack

lint: python ## have hadolint read the Dockerfile
	$(PYTHON_FOLDER)/bin/hadolint Dockerfile

deny: cargo ## check the licences, sources and security advisories of all dependencies with cargo-deny, which it builds into .tools/
	@.tools/bin/cargo-deny --version 2>/dev/null | grep -qx "cargo-deny $(CARGO_DENY)" || \
	    cargo install cargo-deny --locked --version $(CARGO_DENY) --root .tools
	.tools/bin/cargo-deny check licenses bans sources
	@if .tools/bin/cargo-deny fetch db; then .tools/bin/cargo-deny check advisories; \
	else echo "skipped: the security advisories, whose database cannot be fetched, for the reason above"; fi

docs: cargo ## build the book with mdBook, which it builds into .tools/, and check the links of all Markdown files
	@.tools/bin/mdbook --version 2>/dev/null | grep -qx "mdbook v$(MDBOOK)" || \
	    CARGO_PROFILE_RELEASE_OPT_LEVEL=0 cargo install mdbook --locked --version $(MDBOOK) --root .tools \
	        --no-default-features --features search
	python3 docs/pictures.py --check
	.tools/bin/mdbook build docs
	python3 tests/interop/links.py docs/book

crate: cargo libtorch ## pack the crate, and try it from projects that `ddp-mp new` writes
	cargo build --release
	tests/interop/crate.sh $(PROGRAM) $(abspath $(or $(CARGO_TARGET_DIR),target))

# `make install` puts bin/ddp-mp, and in share/ the completions, below PREFIX. A DESTDIR is put in front.
PREFIX = $(HOME)/.local

# Only the owner of the clone builds in it: the owner could not replace files of root under sudo.
install: $(shell [ ! -O Makefile ] || echo build) ## install the program and its completions; elsewhere: make install PREFIX=/usr/local
	@[ -e $(PROGRAM) ] || { echo "$(PROGRAM) is missing, and only the owner of this folder builds it: run 'make build' as the owner first (with the same CARGO_TARGET_DIR)." >&2; exit 1; }
	.cargo/install.sh $(PROGRAM) "$(DESTDIR)$$(realpath -ms "$(PREFIX)")"

wheel: build ## build a Python wheel of the program into dist/
	python3 python/wheel.py dist $(PROGRAM) $(LIBTORCH_FOLDER)

test-wheel: wheel python simulated-gpus ## install the wheel into an environment of its own, move .libtorch/ away, and use it
	$(PYTHON_FOLDER)/bin/python tests/interop/wheel.py dist/ddp_mp-*.whl $(PROGRAM) $(LIBTORCH_FOLDER) $(SIMULATED_GPUS)

record-wheel: cargo ## build the small Python wheel, for loops of PyTorch, into dist/: without libtorch
	python3 python/wheel.py dist

# The PyTorch versions that `make test-record-wheel` tries. It fetches each that is not there.
VERSIONS = $(LIBTORCH_VERSION)
folder_of = .python$(addprefix -,$(filter-out $(LIBTORCH_VERSION),$(1)))

test-record-wheel: record-wheel ## install the small wheel beside PyTorch, and use it; beside others: VERSIONS="2.4.0 2.11.0 2.13.0 2.15.0"
	@$(foreach version,$(VERSIONS),.cargo/fetch-libtorch.sh $(version) python $(call folder_of,$(version)) &&) true
	python3 -B tests/interop/record_wheel.py dist/ddp_mp_record-*.whl $(foreach version,$(VERSIONS),$(call folder_of,$(version))/bin/python)

# All libraries, so that it has what `cargo build` has compiled. The wheels have one that needs no libtorch to build.
native: cargo libtorch ## build the native library of the Python package into python/ddp_mp, for the checks that use it in the clone
	cargo build --release --workspace --lib
	install -m 644 $(dir $(PROGRAM))libddp_mp_native.so python/ddp_mp

parity: python ## compare the recorded values with those of PyTorch; of another one: make parity TORCH=2.15.0
	$(PYTHON_FOLDER)/bin/python tests/parity/record.py --check

safetensors: cargo python ## have PyTorch read the program's models and the program PyTorch's
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/safetensors_both_ways.py $(PROGRAM)

tensorboard: cargo python ## have TensorBoard read the program's files
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/tensorboard_reads.py $(PROGRAM)

prometheus: cargo python ## have a parser of Prometheus read the file of a run
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/prometheus_reads.py $(PROGRAM)

test-launchers: cargo python simulated-gpus ## run with torchrun, mpirun, Slurm and several hosts, as far as they are there; with the torchrun of another PyTorch alone: TORCH=2.15.0
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/launchers/launchers.py $(PROGRAM) $(SIMULATED_GPUS) $(if $(OTHER_TORCH),torchrun)

report: cargo python ## open the report of a run in Chromium, and try all of it
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/report_page.py $(PROGRAM)

records: cargo python native ## record PyTorch loops and wrong ports of one, and compare them with each other and with the program
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/records.py $(PROGRAM)
	$(PYTHON_FOLDER)/bin/python tests/interop/real_loops.py
	$(PYTHON_FOLDER)/bin/python tests/interop/known_mistakes.py

record-limits: cargo python native ## try whether ddp-mp-diff --rtol tells rounding from mistakes
	$(PYTHON_FOLDER)/bin/python tests/interop/close_or_far.py

page: cargo libtorch ## make the pictures of assets/ anew: with tmux the live view, with Chromium the page of a run
	cargo build --release
	python3 docs/record_live.py $(PROGRAM) assets/live.svg
	cd assets && CUDA_VISIBLE_DEVICES= $(abspath $(PROGRAM)) --nproc-per-node=4 --max-epochs=4 --inject-fault=slow=50ms:rank=2,at=step --report=report.html
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1860 --screenshot=assets/report.png assets/report.html

trace: cargo python ## have Perfetto's trace processor, in Chromium, read the traces of runs
	cargo build --release
	$(PYTHON_FOLDER)/bin/python tests/interop/trace_in_perfetto.py $(PROGRAM)

live: cargo libtorch ## drive the live view in tmux
	cargo build --release
	python3 tests/interop/live.py $(PROGRAM)
	python3 docs/record_live.py $(PROGRAM) $(dir $(PROGRAM))live.svg # as `make page` does, so that it works when needed

mutated: cargo libtorch ## try inputs and command lines that were changed at random; more: make mutated COUNT=20000 SEED=2
	cargo build --release
	INPUTS=$(or $(COUNT),1000) SEED=$(or $(SEED),1) cargo test --release --test tests -- mutated:: flags::random

mixed: cargo python ## have ranks in Rust and ranks of PyTorch in one group
	cargo build --release --example mixed_rank
	$(PYTHON_FOLDER)/bin/python tests/interop/mixed_world.py $(dir $(PROGRAM))examples/mixed_rank

compare: cargo libtorch ## measure beside PyTorch, which it fetches into .pytorch/, and Open MPI (another PyTorch: TORCH=2.15.0), and what DDP costs on one rank
	@.cargo/fetch-libtorch.sh $(TORCH) pytorch $(PYTORCH_FOLDER)
	cargo build --release
	$(PYTORCH_FOLDER)/bin/python benches/compare.py $(PROGRAM)
	$(PYTORCH_FOLDER)/bin/python -B benches/compare_all_reduce.py $(PROGRAM)
	cargo bench --quiet --bench ddp_cost

simulated-cluster: cargo libtorch ## measure two hosts, as network namespaces, beside what bench step --simulate-cluster says
	cargo build --release
	python3 benches/simulated_cluster.py $(PROGRAM)

simulated-gpus: libtorch ## build the simulated GPUs (tests/simulated_gpus) into target/simulated_gpus, and check them
	tests/simulated_gpus/build.sh "$(LIBTORCH_FOLDER)" $(SIMULATED_GPUS)
	$(abspath $(SIMULATED_GPUS))/checks

GPU_PACK = $(or $(CARGO_TARGET_DIR),target)/gpu-pack

# An NCCL that lets ranks share a GPU.
GPU_NCCL = $(or $(CARGO_TARGET_DIR),target)/nccl/libnccl.so.2.xz

$(GPU_NCCL): tests/gpu_pack/nccl.py tests/gpu_pack/prune_fatbin.py
	@mkdir -p $(@D)
	python3 -B $< $@

gpu-pack: cargo $(GPU_NCCL) ## build a folder, target/gpu-pack, for a machine with a GPU and torch 2.11; for another torch: GPU_TORCH=2.13.0 GPU_TCH=0.26.0
	$(call make_copy,$(GPU_TORCH),$(GPU_TCH))
	+$(call in_copy,$(GPU_TORCH)) gpu-pack-here GPU_PACK=$(abspath $(GPU_PACK)) GPU_NCCL=$(abspath $(GPU_NCCL))

# In the copy.
.PHONY: gpu-pack-here
gpu-pack-here: cargo libtorch
	cargo build --release --bin ddp-mp
	cargo test --release --no-run --test tests --test gpus --message-format=json >target/test-programs.json
	python3 -B tests/gpu_pack/pack.py $(GPU_PACK) $(PROGRAM) $(GPU_NCCL) <target/test-programs.json

test-gpu-pack: gpu-pack ## try the folder of gpu-pack: without a GPU, killed, and on a simulated GPU
	+$(call in_copy,$(GPU_TORCH)) python simulated-gpus
	python3 -B tests/gpu_pack/rehearse.py $(GPU_PACK) $(call copy_for,$(GPU_TORCH))/target/simulated_gpus $(call copy_for,$(GPU_TORCH))/.python/bin/python

python: libtorch ## put a Python with PyTorch for the CPU, TensorBoard and Selenium into .python/, for the checks that need them
	@.cargo/fetch-libtorch.sh $(TORCH) python $(PYTHON_FOLDER)

libtorch: ## fetch libtorch if need be; for a GPU or not: make libtorch LIBTORCH_SET=cuda (or cpu)
	@.cargo/fetch-libtorch.sh $(LIBTORCH_VERSION) $(LIBTORCH_SET)

RUST = $(shell sed -n 's/^rust-version = "1\.\([0-9]*\)"$$/\1/p' Cargo.toml)

cargo:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs" >&2; exit 1; }
	@rustc --version | awk -F '[ .]' '$$2 == 1 && $$3 < $(RUST) { exit 1 }' || \
	    { echo "$$(rustc --version) is too old: ddp-mp needs Rust 1.$(RUST) (rustup update stable)" >&2; exit 1; }
