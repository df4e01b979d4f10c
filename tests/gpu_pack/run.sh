#!/usr/bin/env bash
# Tests and measures ddp-mp on this machine's GPU in under eight minutes. Needs python3 with torch 2.11.0 for CUDA 13.
# Writes gpu-results.json and gpu-results.md into the folder named by OUT, or into this one.
#
#   ./run.sh
#   ./run.sh --simulated FOLDER    on the simulated GPU that `make simulated-gpus` builds: tries all but the hardware
set -eu
exec timeout -k 10 "${LIMIT:-480}" "${PYTHON:-python3}" "$(dirname "$0")/measure.py" "$@"
