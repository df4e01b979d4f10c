#!/usr/bin/env bash
# fetch-libtorch.sh VERSION [cpu|cuda]        puts libtorch, out of PyTorch's wheels, into .libtorch/
# fetch-libtorch.sh VERSION python [FOLDER]   puts a Python with PyTorch for the CPU into .python/
# fetch-libtorch.sh VERSION pytorch [FOLDER]  puts a whole PyTorch with its own Python into .pytorch/
#
# With a FOLDER, "python" and "pytorch" put it there instead: for a version other than that of .libtorch.
#
# "cpu" is the torch wheel and the two libraries without which it does not load; "cuda" has all that
# torch depends on. Without either, an NVIDIA driver decides. What is complete is not fetched again,
# and whoever has set LIBTORCH or LIBTORCH_USE_PYTORCH keeps their own libtorch. "python" takes what is in
# .libtorch, where that is for the same Python.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1 set=${2:-}
# The CUDA libraries that the torch wheel needs.
case $version in
2.[45].*) cuda=(nvidia-cuda-runtime-cu12==12.1.105 nvidia-cuda-cupti-cu12==12.1.105) ;;
2.1[1-3].*) cuda=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85) ;;
*) cuda=(nvidia-cuda-runtime==13.2.* nvidia-cuda-cupti==13.2.*) ;;
esac
cpu_wheels=("torch==$version" "${cuda[@]}")

die() { echo "libtorch: $*" >&2; exit 1; }

# need PACKAGE COMMAND...: PACKAGE is missing where COMMAND fails.
missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ ! -e /etc/debian_version ] || ! command -v apt-get >/dev/null; then
        die "please install ${missing[*]} (the names are Debian's)"
    elif [ "$(id -u)" != 0 ]; then
        die "please install what is missing: sudo apt-get install ${missing[*]}"
    fi
    echo "libtorch: installing ${missing[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -yqq --no-install-recommends "${missing[@]}"; } </dev/null >/dev/null ||
        die "apt-get could not install ${missing[*]}, for the reason above"
}

# A virtual environment may lack a module: then the system's Python is used.
find_python() { # find_python ARGUMENTS: the first Python that runs with them
    for python in python3 /usr/bin/python3; do
        "$python" "$@" >/dev/null 2>&1 && return
    done
    return 1
}

# In the background, so that a signal is acted upon at once.
run() { "$@" & child=$!; wait "$child" && child=; }

read -ra compiler <<<"${CXX:-c++}"
case $set in
pytorch)
    folder=${3:-.pytorch}
    has_python=(-c 'import ensurepip, venv') python_package=python3-venv
    is_complete() { [ -e "$folder/complete-$version" ]; }
    ;;
python)
    folder=${3:-.python}
    has_python=(-c 'import ensurepip, venv') python_package=python3-venv
    need g++ "${compiler[@]}" --version
    wanted=$(echo "torch==$version" && cat tests/requirements.txt tests/requirements-of-torch.txt)
    is_complete() { [ "$(cat "$folder/complete" 2>/dev/null)" = "$wanted" ]; }
    ;;
cpu | cuda | '')
    need g++ "${compiler[@]}" --version
    if [ -n "${LIBTORCH+x}${LIBTORCH_USE_PYTORCH+x}" ]; then
        install_missing
        exit
    fi
    arch=$(uname -m)
    case $(uname -s)-$arch-$(getconf GNU_LIBC_VERSION 2>/dev/null) in
    Linux-x86_64-glibc* | Linux-aarch64-glibc*) ;;
    *) die "wheels are for Linux with glibc on x86_64 or aarch64: elsewhere set LIBTORCH to a libtorch $version" ;;
    esac
    accepted=$set
    if [ -z "$set" ]; then
        set=cpu accepted='cpu|cuda' # the larger set does for a machine without a GPU, too
        libraries=$(PATH=$PATH:/sbin ldconfig -p 2>/dev/null || true)
        if [ -e /dev/nvidiactl ] || [[ $libraries == *libcuda.so.1* ]]; then
            set=cuda accepted=cuda
        fi
    fi
    has_python=(--version) python_package=python3
    is_complete() {
        [ -e .libtorch/torch/lib/libtorch_cpu.so ] &&
            [[ $(cat .libtorch/complete 2>/dev/null) =~ ^"torch $version $arch "($accepted)$ ]]
    }
    ;;
*) die "the set is cpu or cuda, not '$set'" ;;
esac

# One run at a time: a second run waits for the first, and then finds everything in place. The kernel releases the lock
# when the last process that holds it ends. A partial download that is found under the lock is left by a killed run.
exec 9<.cargo
if [ ${#missing[@]} -eq 0 ] && is_complete; then
    if flock -n 9; then rm -rf .libtorch.partial.*; fi
    exit
fi
flock -n 9 || { echo "libtorch: waiting for another run that fetches it" >&2; flock 9; }
rm -rf .libtorch.partial.*
is_complete || need "$python_package" find_python "${has_python[@]}"
install_missing
if is_complete; then exit; fi
find_python "${has_python[@]}" || die "no python3 here runs '${has_python[*]}'"

partial=$(mktemp -d .libtorch.partial.XXXXXX) child=
trap '{ [ -z "$child" ] || kill "$child" && wait "$child"; } 2>/dev/null || true; rm -rf "$partial"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Of the user's settings for pip, those that say where to install or what are not meant for this.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PLATFORM PIP_PYTHON_VERSION PIP_ABI PIP_CONSTRAINT PIP_NO_BINARY
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_REQUIRE_HASHES=0 PIP_DRY_RUN=0 PIP_NO_DEPS=0
export PYTHONUNBUFFERED=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
TMPDIR=$PWD/$partial/tmp && mkdir "$TMPDIR" && export TMPDIR

failed="pip could not fetch it, for the reason above"
if [ "$set" = pytorch ]; then
    echo "libtorch: fetching PyTorch $version (about 3 GB) into $folder" >&2
    run "$python" -m venv --clear "$folder" || die "could not make a virtual environment in $folder"
    run "$folder/bin/python" -m pip install "torch==$version" numpy || die "$failed"
    touch "$folder/complete-$version"
    exit
fi

if [ "$set" = python ]; then
    run "$python" -m venv --clear "$folder" || die "could not make a virtual environment in $folder"
    python=$folder/bin/python
    # Before torch, whose CUDA libraries pip would miss.
    run "$python" -m pip install --quiet -r tests/requirements.txt || die "$failed"
    read -r packages suffix < <("$python" -c 'from sysconfig import *
print(get_path("purelib"), get_config_var("EXT_SUFFIX"))')
    if [ -e ".libtorch/torch/_C$suffix" ] && [[ $(cat .libtorch/complete) == "torch $version "* ]]; then
        # As links, which take no space, and outlive a new .libtorch.
        cp -al .libtorch/. "$packages" 2>/dev/null || cp -a --remove-destination .libtorch/. "$packages"
    else
        echo "libtorch: fetching torch $version for this Python (about 530 MB) into $folder" >&2
        run "$python" -m pip install --quiet --no-deps "${cpu_wheels[@]}" || die "$failed"
    fi
    # With dependencies, pip would fetch torch's CUDA libraries.
    run "$python" -m pip install --quiet --no-deps -r tests/requirements-of-torch.txt || die "$failed"
    run .cargo/without-cuda.sh "$packages" || die "could not make up for CUDA's libraries in $folder"
    # Compiles what will be imported each time.
    PYTHONDONTWRITEBYTECODE='' run "$python" -c 'import torch.distributed.run, tensorboard' ||
        die "PyTorch does not run in $folder, for the reason above"
    echo "$wanted" >"$folder/complete"
    exit
fi

# Debian's Python has no pip. pip's wheel runs without being installed.
if ! find_python -m pip --version; then
    python=python3
    run .cargo/fetch-pip.sh "$partial/pip.whl" ||
        die "could not fetch pip, for the reason above: please install it (Debian: python3-pip)"
    export PYTHONPATH=$PWD/$partial/pip.whl
fi

# The wheels are chosen for the Python that runs pip, if there are any for it, so that .python can have them; for
# libtorch all are the same.
minor=$("$python" -c 'import sys; print(sys.version_info[1])')
if [ "$minor" -lt 10 ] || [ "$minor" -gt 14 ]; then minor=12; fi
pip=("$python" -m pip install --target "$partial/new" --prefix= --no-compile --only-binary=:all:
    --python-version "3.$minor" --implementation cp --platform "manylinux2014_$arch")
for glibc in {17..28}; do pip+=(--platform "manylinux_2_${glibc}_$arch"); done
if [ "$set" = cpu ]; then
    echo "libtorch: fetching torch $version for the CPU (about 530 MB) into .libtorch" >&2
    run "${pip[@]}" --no-deps "${cpu_wheels[@]}" || die "$failed"
else
    echo "libtorch: fetching torch $version with CUDA (about 3 GB) into .libtorch" >&2
    run "${pip[@]}" "torch==$version" || die "$failed"
fi
echo "torch $version $arch $set" >"$partial/new/complete"
[ ! -e .libtorch ] || mv .libtorch "$partial/old"
mv -T "$partial/new" .libtorch
