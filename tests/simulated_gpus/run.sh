#!/bin/sh
# run.sh OUT GPUS COMMAND...: runs COMMAND on a machine with GPUS simulated GPUs. OUT is the folder of build.sh.
set -eu
[ $# -ge 3 ] || { echo "usage: run.sh OUT GPUS COMMAND..." >&2; exit 2; }
out=$(cd "$1" && pwd) gpus=$2
shift 2
SIM_GPUS=$gpus LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$@"
