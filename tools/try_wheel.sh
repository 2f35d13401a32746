#!/bin/bash
# Tries a wheel where nothing else is: tools/try_wheel.sh WHEEL [torch]
# In a virtual environment of its own with what pip installs for it, numpy; with "torch" then with PyTorch, too, in the
# version of tests/python/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=${1:?usage: tools/try_wheel.sh WHEEL [torch]}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
python3 -m venv "$fresh"
install=("$fresh/bin/python" -m pip install --quiet --disable-pip-version-check)

# Outside of the checkout, and without this shell's variables: no library is found that a stranger would not find.
try() { (cd / && env -i PATH=/usr/bin:/bin "$fresh/bin/python" -I - "$@") <tools/try_wheel.py; }

"${install[@]}" "$wheel"
try
if [[ "${2:-}" == torch ]]; then
  "${install[@]}" "$(grep '^torch==' tests/python/requirements.txt)"
  try torch
fi
