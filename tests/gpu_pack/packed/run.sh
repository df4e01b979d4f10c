#!/usr/bin/env bash
# Tests and measures ddp-mp on this machine's GPU in under nine minutes. Needs python3 with the torch that pack.json names,
# for CUDA 13. Prints each step, with its command, and goes on after a failure: one try shows everything. Ends with 0 if all
# parts went well, and within seconds if nothing can run here.
#
# Writes into the folder named by OUT, or into this one, while it runs: gpu-run.log, which is what it prints; gpu-results.json
# and gpu-results.md, which is for people; gpu-losses.jsonl.
#
#   ./run.sh
#   SECONDS_LEFT=100 ./run.sh --parts first,two       some parts, by the beginnings of their names, in 100 s
#   ./run.sh --simulated FOLDER                       on the simulated GPU that `make simulated-gpus` builds
#   PYTHON=/path/to/python ./run.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
left=${SECONDS_LEFT:-520}

# step NAME COMMAND...: says what it does, and how it ended.
step() {
    local name=$1 status=0
    shift
    printf '\n== %s\n$ %s\n' "$name" "$*"
    timeout --foreground -k 5 20 "$@" || status=$?
    echo "-- exit status $status"
}

all() {
    step "the machine" uname -a
    step "processor cores, and the most processes and threads" bash -c 'nproc; ulimit -u; cat /sys/fs/cgroup/pids.max; ip -br addr'
    step "the GPUs and the driver" nvidia-smi
    step "how the GPUs are connected" nvidia-smi topo -m
    step "the state of the GPUs" bash -c 'nvidia-smi -q -d PERFORMANCE,CLOCK,COMPUTE | head -80; nvidia-smi --query-gpu=persistence_mode,compute_mode --format=csv'
    step "which libcuda and NCCL the system has" sh -c 'ldconfig -p | grep -E "libcuda\.so|libnccl"'
    step "variables that change CUDA, NCCL or what is loaded" sh -c 'env | grep -E "^(CUDA|NCCL|CUBLAS|PYTORCH|LD_)"'
    step "files with which NCCL is set up" sh -c 'cat "${NCCL_CONF_FILE:-$HOME/.nccl.conf}" /etc/nccl.conf'

    printf '\n== tests and measurements\n'
    left=$((left - SECONDS))
    timeout --foreground -k 10 $((left + 20)) "$python" -Bu "$here/measure.py" --seconds "$left" "$@"
    local status=$?
    echo "-- exit status $status"
    return "$status"
}

# The last lines are in the log, too: a pipeline ends with its last command.
all "$@" 2>&1 | tee "${OUT:-$here}/gpu-run.log"
exit "${PIPESTATUS[0]}"
