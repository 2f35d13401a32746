#!/bin/bash
# Makes the virtual environment of the Python tests, with this checkout's wheel installed as users install it:
#   tools/python_env.sh FOLDER
# Packages are tests/python/requirements.txt. It is quick when they are there already. The wheel (tools/wheel.sh) is
# built every time, and kept in FOLDER/wheels. Its build folder is beside FOLDER's parent, as deep as the other builds.
# Paths are then the same for ccache (cmake/LogitlessSettings.cmake), and little is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: tools/python_env.sh FOLDER}
python=$folder/bin/python
requirements=tests/python/requirements.txt

if ! cmp -s "$requirements" "$folder/requirements.txt"; then
  rm -rf "$folder"
  python3 -m venv "$folder"
  "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
  cp "$requirements" "$folder/requirements.txt"
fi

LOGITLESS_CUDA=${LOGITLESS_CUDA:-OFF} WHEEL_BUILD=$(dirname "$folder")-python tools/wheel.sh "$folder/wheels" "$python"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$folder"/wheels/logitless-*.whl
