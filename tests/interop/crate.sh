#!/usr/bin/env bash
# crate.sh PROGRAM TARGET  packs the crates, and tries what is in them from the projects that PROGRAM writes
#
# The projects and the crates are built in the target folder TARGET, with the profile of the clone, whose dependencies are
# there. So only these crates are built again, once, and the engine without optimization: nothing is measured here.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$(realpath "$1")
export CARGO_TARGET_DIR=$2
[ -n "${LIBTORCH:-}${LIBTORCH_USE_PYTORCH:-}" ] || export LIBTORCH=$PWD/.libtorch/torch
clone=$PWD
die() { echo "crate: $*" >&2; exit 1; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rm -f "$CARGO_TARGET_DIR"/package/ddp-mp*.crate
# In the order in which they would be published: a crate finds the others in the clone until they are.
cargo package --package ddp-mp-compare --package ddp-mp-engine --package ddp-mp-views --package ddp-mp --no-verify --allow-dirty --locked
for packed in "$CARGO_TARGET_DIR"/package/ddp-mp*.crate; do
    bytes=$(stat -c %s "$packed")
    [ "$bytes" -lt 10000000 ] || die "$packed has $bytes bytes; crates.io takes 10 MB: exclude more in Cargo.toml"
    echo "crate: $packed has $bytes bytes"
    tar -xzf "$packed" -C "$folder"
done
sed -n '/^\[profile/,/^$/p' Cargo.toml >"$folder/profile.toml"
cargo=(cargo --offline --config "$folder/profile.toml" --config profile.release.opt-level=0)
version=$(cargo pkgid --package ddp-mp | sed 's/.*[#@]//')
crate=$folder/ddp-mp-$version

# new_project NAME [FLAG...]  writes a project, and builds and tests it; the crate is built for the first one
new_project() {
    local name=$1
    "$program" new "$folder/$name" --path "$crate" "${@:2}"
    cp "$crate/Cargo.lock" "$folder/$name"
    # Not published yet: the packed ones.
    printf '\n[patch.crates-io]\n' >>"$folder/$name/Cargo.toml"
    for other in compare engine views; do
        printf 'ddp-mp-%s = { path = "%s" }\n' "$other" "$folder/ddp-mp-$other-$version" >>"$folder/$name/Cargo.toml"
    done
    cd "$folder/$name"
    cargo fmt --check
    "${cargo[@]}" build --release
    "${cargo[@]}" test --release
}
# Nothing of this shell's environment: the program finds libtorch by itself.
run() { env -i "$CARGO_TARGET_DIR/release/$@"; }

new_project my-run
# The crate's own program as well, which has the same library.
"${cargo[@]}" build --release --package ddp-mp --bins
output=$(run my-run --nproc-per-node=2 2>&1)
echo "$output"
echo "$output" | awk '/^ddp-mp: epoch / { if (first == "") first = $NF; last = $NF } END { exit !(last < first / 2) }' ||
    die "the project has not learned"
# Stopped, resumed and killed, and resumed again: it ends with the parameters of a run that nothing has happened to.
hash() { sed -n 's/.*parameters \([0-9a-f]*\)$/\1/p'; }
undisturbed=$(run my-run --nproc-per-node=2 --config=run.toml --checkpoint-dir=undisturbed 2>&1 | hash)
run my-run --nproc-per-node=2 --config=run.toml --max-steps=100
code=0
run my-run --nproc-per-node=2 --config=run.toml --save-every=50 --inject-fault=kill:rank=1,at=step,step=300 || code=$?
[ "$code" != 0 ] || die "the project has survived a fault that was to kill it"
output=$(run my-run --nproc-per-node=2 --config=run.toml --report=report.html 2>&1)
echo "$output"
resumed=$(echo "$output" | hash)
[ -n "$resumed" ] && [ "$resumed" = "$undisturbed" ] ||
    die "the resumed run has the parameters '$resumed', the undisturbed one '$undisturbed'"
[ -s report.html ] || die "the project has written no report"
code=0
run my-run --batch-sise=8 || code=$?
[ "$code" = 2 ] || die "the project has ended with $code after an argument that it does not know"

new_project my-digits --template=digits-cnn
output=$(run my-digits --nproc-per-node=2 --max-epochs=2 2>&1)
echo "$output"
echo "$output" | grep -q "validation after epoch 1: .* accuracy .* top3" || die "the digits have no accuracy"

new_project my-text --template=gpt
run my-text --nproc-per-node=2 --config=run.toml --max-steps=20
run my-text sample --checkpoint=run --num-tokens=40

env -i "$CARGO_TARGET_DIR/release/ddp-mp" --max-epochs=2 --batch-size=32
# Its place in the target folder is the clone's again.
(cd "$clone" && cargo build --release --quiet)
