#!/usr/bin/env bash
# install.sh PROGRAM LIBTORCH FOLDER  installs the program, its manual pages and completions below FOLDER
#
# The program loads libtorch from the folder LIBTORCH.
set -euo pipefail
program=$1 libtorch=$(realpath "$2") folder=$3 share=$3/share

install -D "$program" "$folder/bin/ddp-mp"
"$folder/bin/ddp-mp" man "$share/man/man1"
mkdir -p "$share"/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
"$folder/bin/ddp-mp" completions bash >"$share/bash-completion/completions/ddp-mp"
"$folder/bin/ddp-mp" completions zsh >"$share/zsh/site-functions/_ddp-mp"
"$folder/bin/ddp-mp" completions fish >"$share/fish/vendor_completions.d/ddp-mp.fish"

if [[ $folder/ == "$HOME"/* ]]; then exit; fi # for one user only
# Debian's adduser makes home folders that only their owner can enter.
while [ "$libtorch" != / ]; do
    if [[ $(stat --format=%A "$libtorch") != *[xt] ]]; then
        echo "Other users cannot enter $libtorch, so the program does not start for them: it loads libtorch from there." >&2
        exit
    fi
    libtorch=$(dirname "$libtorch")
done
