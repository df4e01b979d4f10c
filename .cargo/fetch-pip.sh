#!/usr/bin/env bash
# fetch-pip.sh FILE  writes the wheel of pip to FILE. Python runs it without installing it: PYTHONPATH=FILE python3 -m pip
#
# Debian and Ubuntu ship Python without pip. apt-get can download the package that contains the wheel without root, if the
# lists of packages are in a folder of this script.
set -euo pipefail
file=$1

for command in apt-get dpkg-deb; do
    command -v $command >/dev/null || { echo "pip is missing, and so is $command, which would fetch it: please install pip" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache}/partial
apt=(apt-get -qq -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
# Without root, a hook in Debian's container images fails to empty the system's cache. Its message is shown only if a
# command fails.
{ "${apt[@]}" update && (cd "$work" && "${apt[@]}" download python3-pip-whl); } 2>"$work/errors" ||
    { cat "$work/errors" >&2; exit 1; }
dpkg-deb --extract "$work"/python3-pip-whl_*.deb "$work/package"
cp "$work"/package/usr/share/python-wheels/pip-*.whl "$file"
