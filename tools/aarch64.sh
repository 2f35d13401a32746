#!/bin/bash
# Cross-compiles for aarch64 and runs tests by qemu: tools/aarch64.sh [TARGET...] (default: the tests of the kernels)
# BUILD names the build folder (build-aarch64). It holds Debian's arm64 packages below sysroot/; the system's own
# architectures stay as they are. Ends as tools/run_tests.py does, whose options ARGS gives.
set -euo pipefail
cd "$(dirname "$0")/.."

build=$(realpath -m "${BUILD:-build-aarch64}")
sysroot=$build/sysroot
targets=("$@")
[[ $# -gt 0 ]] || targets=(head_cases_test head_gradients_test kernel_test math_tests tensor_kernels_test)

tools/setup.sh aarch64
if [[ ! -d $sysroot/usr ]]; then
  mkdir -p "$sysroot.new/debs/partial" "$build/lists/partial"
  apt=(apt-get -qq -o APT::Architectures=amd64,arm64 -o "Dir::State::Lists=$build/lists" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$sysroot.new/debs" && "${apt[@]}" download libhwy-dev:arm64 libhwy1:arm64 libgtest-dev:arm64 \
    libeigen3-dev:all nlohmann-json3-dev:all)
  for package in "$sysroot.new"/debs/*.deb; do dpkg -x "$package" "$sysroot.new"; done
  rm -rf "$sysroot" "$sysroot.new/debs" "$build/lists"
  mv "$sysroot.new" "$sysroot"
fi
export BUILD=$build
CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64-linux-gnu.cmake -DLOGITLESS_SYSROOT=$sysroot -DLOGITLESS_CUDA=OFF
  -DLOGITLESS_XLA=OFF -DLOGITLESS_BUILD_CLI=OFF -DLOGITLESS_BUILD_BENCH=OFF -DLOGITLESS_BUILD_EXAMPLES=OFF ${CMAKE_ARGS:-}" \
  tools/build.sh release logitless "${targets[@]}"
names=$(IFS='|' && echo "${targets[*]}")
exec tools/run_tests.py --build-dir "$build" --labels fast --filter "^($names)\." ${ARGS:-}
