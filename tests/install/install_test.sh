#!/bin/bash
# One step of the test of an installation: install_test.sh STEP BUILD_DIR SOURCE_DIR WORK_DIR CMAKE CXX
# `install` runs first and leaves WORK_DIR/prefix to the others.
set -euo pipefail

step=$1 build=$2 source=$3 work=$4 cmake=$5 cxx=$6
prefix=$work/prefix

fail() {
  echo "install_test: $*" >&2
  exit 1
}

library() {
  find "$prefix" -name 'liblogitless.so' | grep . || fail "no liblogitless.so below $prefix"
}

case $step in
  # Installs below one prefix and moves it to another: nothing may remember the first.
  install)
    rm -rf "$work"
    mkdir -p "$work"
    "$cmake" --install "$build" --prefix "$work/staging" >"$work/install.log" || fail "$(cat "$work/install.log")"
    mv "$work/staging" "$prefix"
    [[ -f $prefix/include/logitless/logitless.h ]] || fail "logitless.h is not installed"
    [[ -z $(find "$prefix" -name '*.a' -o -name '*_internal*') ]] || fail "internals are installed"
    if grep -rIlE "$work/staging|$source|$build" "$prefix"; then fail "these files name a folder of the build"; fi
    ;;

  # The package config must be sufficient: finding any library that logitless is built with is forbidden.
  cmake)
    hide=()
    for package in hwy fmt nlohmann_json Threads; do hide+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"); done
    rm -rf "$work/cmake"
    "$cmake" -S "$source/examples/consumer" -B "$work/cmake" -DCMAKE_CXX_COMPILER="$cxx" \
      -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF "${hide[@]}"
    grep -q "^logitless_DIR:PATH=$prefix/" "$work/cmake/CMakeCache.txt" || fail "another logitless was found"
    "$cmake" --build "$work/cmake"
    "$work/cmake/consumer"
    ;;

  # Plain compiler and pkg-config.
  pkg-config)
    pc=$(dirname "$(find "$prefix" -name logitless.pc | grep . || fail "no logitless.pc")")
    export PKG_CONFIG_PATH=$pc
    mkdir -p "$work/pkg-config"
    read -ra flags <<<"$(pkg-config --cflags --libs logitless)"
    [[ ${flags[*]} != *hwy* && ${flags[*]} != *pthread* ]] || fail "private libraries leak: ${flags[*]}"
    "$cxx" -std=c++20 -Wall -Wextra -Werror "$source/examples/consumer/consumer.cpp" "${flags[@]}" \
      -o "$work/pkg-config/consumer"
    # Its flags are sufficient to run it, too: the loader does not know the prefix.
    env -u LD_LIBRARY_PATH "$work/pkg-config/consumer"
    ;;

  # The target of `make install` covers all that is installed, and builds nothing else.
  built)
    [[ -f $build/build.ninja ]] || exit 0
    inputs=$(ninja -C "$build" -t inputs installed)
    grep -qE '^src/liblogitless\.so' <<<"$inputs" || fail "the library is not of target installed"
    [[ ! -e $prefix/bin/logitless ]] || grep -qx src/cli/logitless <<<"$inputs" || fail "nor is the command"
    if grep -E '^(tests|bench|examples|fuzz)/' <<<"$inputs"; then fail "these are built for target installed"; fi
    ;;

  # Checks the version in the file's name, and that only our symbols and the standard library's are exported.
  symbols)
    so=$(library)
    version=$(PKG_CONFIG_PATH=$(dirname "$so")/pkgconfig pkg-config --modversion logitless)
    objdump -p "$so" | grep "SONAME *liblogitless.so.${version%%.*}$" >/dev/null || fail "SONAME is not liblogitless.so.${version%%.*}"
    [[ $(readlink -f "$so") == */liblogitless.so.$version ]] || fail "$so is not a link to liblogitless.so.$version"
    nm -D --defined-only -C "$so" | cut -d' ' -f3- >"$work/symbols"
    grep -q 'logitless::cross_entropy(' "$work/symbols" || fail "cross_entropy is not exported"
    foreign=$(grep -vE '^(typeinfo (name )?for |vtable for |VTT for |guard variable for )?(logitless::|logitless_|std::|__gnu_cxx::)' \
      "$work/symbols" | grep -vE '^[^(]*\b(std|__gnu_cxx)::' || true)
    [[ -z $foreign ]] || fail "exported but not ours: $foreign"
    private=$(grep -E 'hwy|nlohmann|fmt::|CLI::|logitless::(cpu|reference|internal)' "$work/symbols" || true)
    [[ -z $private ]] || fail "private symbols are exported: $private"
    ;;

  # Checks that the installed command finds the installed library.
  command)
    env -u LD_LIBRARY_PATH "$prefix/bin/logitless" --help >"$work/help.txt" || fail "logitless --help failed"
    [[ -s $work/help.txt ]] || fail "logitless --help says nothing"
    ldd "$prefix/bin/logitless" | grep "liblogitless.so.* => $prefix/" >/dev/null || fail "the command uses another liblogitless"
    ;;

  *) fail "unknown step '$step'" ;;
esac
