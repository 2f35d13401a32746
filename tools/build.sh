#!/bin/bash
# Configures and builds one preset of CMakePresets.json: tools/build.sh PRESET [TARGET...]
# BUILD names another build folder, CMAKE_ARGS adds to the configuration, JOBS limits the parallel compilations.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?usage: tools/build.sh PRESET [TARGET...]}
shift
tools/setup.sh

# The first cmake in PATH that is new enough, or else Debian's.
find_cmake() {
  local candidate version
  for candidate in ${CMAKE:-} $(type -ap cmake) /usr/bin/cmake; do
    version=$("$candidate" --version 2>/dev/null | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p') || continue
    set -- $version
    if [[ $# -eq 2 ]] && (( $1 > 3 || ($1 == 3 && $2 >= 25) )); then
      echo "$candidate"
      return
    fi
  done
  echo "build.sh: no cmake >= 3.25 found" >&2
  return 1
}
cmake=$(find_cmake)

if [[ "$preset" == release ]]; then build=${BUILD:-build}; else build=${BUILD:-build-$preset}; fi
jobs=${JOBS:-$(nproc)}
targets=()
[[ $# -gt 0 ]] && targets=(--target "$@")

# Configuring again is quick and notices new folders. Its output is shown only when it fails or comes first.
if [[ -f "$build/build.ninja" ]]; then
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  "$cmake" --preset "$preset" -B "$build" ${CMAKE_ARGS:-} >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
else
  "$cmake" --preset "$preset" -B "$build" ${CMAKE_ARGS:-}
fi
"$cmake" --build "$build" --parallel "$jobs" "${targets[@]}"
