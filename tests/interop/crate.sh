#!/usr/bin/env bash
# crate.sh PROGRAM TARGET  packs the crate, and tries what is in it from a project that PROGRAM writes
#
# The project and the crate are built in the target folder TARGET, whose dependencies are those of the clone. So only
# this crate is built again.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$(realpath "$1")
export CARGO_TARGET_DIR=$2
[ -n "${LIBTORCH:-}${LIBTORCH_USE_PYTORCH:-}" ] || export LIBTORCH=$PWD/.libtorch/torch
clone=$PWD
die() { echo "crate: $*" >&2; exit 1; }

cargo package --package ddp-mp --no-verify --allow-dirty --locked
packed=$(ls -t "$CARGO_TARGET_DIR"/package/ddp-mp-*.crate | head -1)
bytes=$(stat -c %s "$packed")
[ "$bytes" -lt 10000000 ] || die "$packed has $bytes bytes; crates.io takes 10 MB: exclude more in Cargo.toml"
echo "crate: $packed has $bytes bytes"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tar -xzf "$packed" -C "$folder"
crate=$folder/$(basename "$packed" .crate)
"$program" new "$folder/my-run" --path "$crate"
cp "$crate/Cargo.lock" "$folder/my-run"
cd "$folder/my-run"
cargo fmt --check
# The program of the crate, its library and the project at once.
cargo build --release --offline --package ddp-mp --package my-run --bins
cargo test --release --offline
cd "$folder"
output=$(env -i "$CARGO_TARGET_DIR/release/my-run")
echo "$output"
echo "$output" | awk '/^epoch/ { if (first == "") first = $NF; last = $NF } END { exit !(last < first / 2) }' ||
    die "the project has not learned"
code=0
env -i "$CARGO_TARGET_DIR/release/my-run" --batch-size=8 || code=$?
[ "$code" = 2 ] || die "the project has ended with $code after an argument that it does not know"
env -i "$CARGO_TARGET_DIR/release/ddp-mp" --max-epochs=2 --batch-size=32
# Its place in the target folder is the clone's again.
(cd "$clone" && cargo build --release --quiet)
