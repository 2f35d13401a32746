#!/bin/bash
# Tries a wheel in a new virtual environment: tools/try_wheel.sh WHEEL [torch]
# It has only numpy, which pip installs for the wheel; with "torch" also PyTorch, in the version of
# tests/python/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=${1:?usage: tools/try_wheel.sh WHEEL [torch]}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
python3 -m venv "$fresh"
install=("$fresh/bin/python" -m pip install --quiet --disable-pip-version-check)

# Runs outside of the checkout and without this shell's variables, so that it finds only a user's libraries.
try() { (cd / && env -i PATH=/usr/bin:/bin "$fresh/bin/python" -I - "$@") <tools/try_wheel.py; }

"${install[@]}" "$wheel"
try
if [[ "${2:-}" == torch ]]; then
  "${install[@]}" "$(grep '^torch==' tests/python/requirements.txt)"
  try torch
fi
