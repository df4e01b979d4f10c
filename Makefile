# Builds with the libtorch that `make libtorch` fetches into .libtorch/, or with your own where
# LIBTORCH or LIBTORCH_USE_PYTORCH is set. All of it is built in release mode: libtorch's bindings
# take minutes to compile, and so they are compiled once.
TORCH = 2.11.0
ARGS = --max-epochs=2 --batch-size=32

# An empty LIBTORCH is none.
ifeq ($(LIBTORCH),)
unexport LIBTORCH
endif

.PHONY: help run test check install parity compare libtorch cargo
help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

run: cargo libtorch ## build and run the demo; its flags: make run ARGS="--help"
	cargo build --release
	@cargo run --release --quiet -- $(ARGS)

test: cargo libtorch ## build and run the tests
	cargo test --release

check: cargo libtorch ## formatting, lints and documentation, warnings being errors
	cargo fmt --check
	cargo clippy --release --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --release --no-deps

install: cargo libtorch ## install the program with cargo
	cargo install --locked --path .

parity: ## compare the recorded values with those of PyTorch, which it fetches into .pytorch/
	@.cargo/fetch-libtorch.sh $(TORCH) pytorch
	.pytorch/bin/python tests/parity/record.py --check

compare: cargo libtorch ## measure the demo beside PyTorch's, which it fetches into .pytorch/
	@.cargo/fetch-libtorch.sh $(TORCH) pytorch
	cargo build --release
	.pytorch/bin/python tests/peers/compare.py $(or $(CARGO_TARGET_DIR),target)/release/ddp-mp

libtorch: ## fetch libtorch if need be; for a GPU or not: make libtorch LIBTORCH_SET=cuda (or cpu)
	@.cargo/fetch-libtorch.sh $(TORCH) $(LIBTORCH_SET)

cargo:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs" >&2; exit 1; }
