#!/bin/bash
# Makes the virtual environment that the Python tests run in, with this checkout's wheel installed as users install it:
#   tools/python_env.sh FOLDER
# Packages are tests/python/requirements.txt. Quick when they are there already; the wheel is built every time.
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

# As `pip wheel .`, but with the packages of this environment, and with the flags of the other builds for ccache's sake.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
settings=(-C build-dir="$folder/wheel-build" -C cmake.define.LOGITLESS_CUDA="${LOGITLESS_CUDA:-OFF}"
          -C cmake.define.LOGITLESS_XLA=ON -C cmake.define.LOGITLESS_WARNINGS_AS_ERRORS=ON)
if command -v ccache >/dev/null; then
  settings+=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
CMAKE_GENERATOR=Ninja PATH="$PWD/$folder/bin:$PATH" "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --no-build-isolation --wheel-dir "$wheels" "${settings[@]}" .
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/logitless-*.whl
