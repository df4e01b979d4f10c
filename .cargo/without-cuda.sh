#!/usr/bin/env bash
# without-cuda.sh FOLDER  makes up for the CUDA libraries that the PyTorch in FOLDER is without
#
# PyPI's PyTorch for Linux does not start without 3 GB of libraries, none of which does anything on a machine
# without a GPU: the loader wants them to be there, with their functions. So each one that is missing gets a
# namesake that has these, and ends the process if one is called.
set -euo pipefail
cd "$1"
read -ra compiler <<<"${CXX:-c++}"
users=()
for user in torch/lib/libtorch_{cuda,nvshmem,python}.so; do
    [ ! -e "$user" ] || users+=("$user")
done
known=$(PATH=$PATH:/sbin ldconfig -p; find . -name '*.so*')

missing=()
for library in $(readelf -d "${users[@]}" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u); do
    grep -q "[/[:space:]]${library//./\\.}\( \|$\)" <<<"$known" || missing+=("$library")
done
[ ${#missing[@]} -gt 0 ] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Each as FUNCTION, or FUNCTION@VERSION.
nm -D --undefined-only "${users[@]}" | awk '{ print $2 }' |
    grep -E '^(cublas|cudnn|cufft|cuFile|curand|cusparse|nccl|nvrtc|nvshmem|nvtx)' | sort -u >"$work/functions"
sed 's/\(.*\)@.*/\1/; s/.*/void &(void) { __builtin_trap(); }/' "$work/functions" >"$work/functions.c"
awk -F@ '
    { version = $2 ? $2 : "NONE"; functions[version] = functions[version] $1 "; " }
    END { for (version in functions) print version " { " functions[version] "};" }
' "$work/functions" >"$work/versions"
for library in "${missing[@]}"; do
    "${compiler[@]}" -x c -w -shared -fPIC "-Wl,-soname,$library,--version-script=$work/versions" \
        -o "torch/lib/$library" "$work/functions.c"
done
