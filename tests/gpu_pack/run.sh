#!/usr/bin/env bash
# Tests and measures ddp-mp on this machine's GPU in under eight minutes. Needs python3 with torch 2.13.0 for CUDA 13.
# Prints each step, with its command, and goes on after a failure: one try shows everything. Writes gpu-results.json,
# gpu-results.md and gpu-run.log, which is what it prints, into the folder named by OUT, or into this one. Ends with 0 if
# all parts went well.
#
#   ./run.sh
#   ./run.sh --simulated FOLDER    on the simulated GPU that `make simulated-gpus` builds: tries all but the hardware
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
exec > >(tee "${OUT:-$here}/gpu-run.log") 2>&1

# step NAME COMMAND...: says what it does, and how it ended.
step() {
    local name=$1 status=0
    shift
    printf '\n== %s\n$ %s\n' "$name" "$*"
    timeout -k 5 60 "$@" || status=$?
    echo "-- exit status $status"
}

step "the machine" uname -a
step "processor cores, and the most processes and threads" bash -c 'nproc; ulimit -u; cat /sys/fs/cgroup/pids.max'
step "the GPUs and the driver" nvidia-smi
step "how the GPUs are connected" nvidia-smi topo -m
step "which libcuda and NCCL the system has" sh -c 'ldconfig -p | grep -E "libcuda\.so|libnccl"'
step "variables that change CUDA, NCCL or what is loaded" sh -c 'env | grep -E "^(CUDA|NCCL|CUBLAS|PYTORCH|LD_)"'
step "files with which NCCL is set up" sh -c 'cat "${NCCL_CONF_FILE:-$HOME/.nccl.conf}" /etc/nccl.conf'
step "PyTorch" "$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())'

printf '\n== tests and measurements\n'
timeout -k 10 "${LIMIT:-480}" "$python" -u "$here/measure.py" "$@"
status=$?
echo "-- exit status $status"
exit "$status"
