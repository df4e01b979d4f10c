#!/bin/sh
# build.sh LIBTORCH OUT: builds the stand-ins into the folder OUT, as far as they are older than their sources.
# LIBTORCH is the libtorch that the program is linked with: a folder with include/ and lib/.
set -eu
[ $# = 2 ] || { echo "usage: build.sh LIBTORCH OUT" >&2; exit 2; }
mkdir -p "$2"
torch=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
# One build at a time in a folder.
exec 9>"$out/.lock"
flock 9
unset MAKEFLAGS MFLAGS MAKELEVEL
exec make --silent --no-print-directory -C "$(dirname "$0")" -j "$(nproc)" LIBTORCH="$torch" OUT="$out" 9>&9
