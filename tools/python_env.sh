#!/bin/bash
# Makes the virtual environment that the Python tests run in, with this checkout's wheel installed as users install it:
#   tools/python_env.sh FOLDER
# Packages are tests/python/requirements.txt. Quick when they are there already; the wheel (tools/wheel.sh) is built
# every time, and kept in FOLDER/wheels. Its build stands beside the folder that FOLDER is in, as deep as the other
# builds: paths are the same for ccache then (cmake/LogitlessSettings.cmake), and little is compiled.
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
