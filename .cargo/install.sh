#!/usr/bin/env bash
# install.sh PROGRAM FOLDER  installs the program and its completions below FOLDER
set -euo pipefail
program=$1 folder=$2 share=$2/share

install -D "$program" "$folder/bin/ddp-mp"
mkdir -p "$share"/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
"$folder/bin/ddp-mp" completions bash >"$share/bash-completion/completions/ddp-mp"
"$folder/bin/ddp-mp" completions zsh >"$share/zsh/site-functions/_ddp-mp"
"$folder/bin/ddp-mp" completions fish >"$share/fish/vendor_completions.d/ddp-mp.fish"

if [[ $folder/ == "${HOME-/nowhere}"/* ]]; then exit; fi # for one user only
# Debian's adduser makes home folders that only their owner can enter.
libtorch=$(ldd "$program" | awk '$1 == "libtorch_cpu.so" && $3 ~ "/" { print $3 }')
libtorch=$(dirname "$(realpath "${libtorch:-/}")")
while [ "$libtorch" != / ]; do
    if [[ $(stat --format=%A "$libtorch") != *[xt] ]]; then
        echo "Other users cannot enter $libtorch, so the program does not start for them: it loads libtorch from there." >&2
        exit
    fi
    libtorch=$(dirname "$libtorch")
done
