#!/bin/bash
# Checks that all packages that a build needs are installed: tools/setup.sh [format | aarch64]
# "format" adds the formatter, "aarch64" the cross-compiler. Quick and silent when nothing is missing. Otherwise it installs with apt when root or
# when sudo needs no password, or prints the line to run and exits 1.
set -euo pipefail

# package, or package:command where a command in PATH from any other source will do as well
wanted=(build-essential cmake:cmake ninja-build:ninja ccache:ccache pkg-config:pkg-config python3:python3 python3-venv
        libhwy-dev libeigen3-dev libfmt-dev nlohmann-json3-dev libcli11-dev libgtest-dev libsentencepiece-dev
        libpcre2-dev libutf8proc-dev)
if [[ "${1:-}" == format ]]; then
  wanted+=(clang-format-14:clang-format-14)
elif [[ "${1:-}" == aarch64 ]]; then
  wanted+=(g++-aarch64-linux-gnu:aarch64-linux-gnu-g++ qemu-user-static:qemu-aarch64-static)
elif [[ $# -gt 0 ]]; then
  echo "setup.sh: unknown argument '$1'; expected nothing, 'format' or 'aarch64'" >&2
  exit 2
fi
packages=("${wanted[@]%%:*}")

if ! command -v dpkg-query >/dev/null; then
  echo "setup.sh: no dpkg here, so nothing was checked; logitless needs what Debian calls: ${packages[*]}" >&2
  exit 0
fi

installed=" $(dpkg-query -W -f '${db:Status-Status}:${Package} ' "${packages[@]}" 2>/dev/null || true)"
missing=()
for entry in "${wanted[@]}"; do
  package=${entry%%:*}
  tool=${entry#*:}
  [[ "$installed" == *" installed:$package "* ]] && continue
  [[ "$entry" == *:* ]] && command -v "$tool" >/dev/null && continue
  missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

echo "setup.sh: missing: ${missing[*]}"
if [[ $(id -u) -eq 0 ]]; then
  as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  echo "setup.sh: cannot install without root. Run this, then try again:" >&2
  if command -v sudo >/dev/null; then prefix="sudo "; else prefix=""; fi
  echo "  ${prefix}apt-get update && ${prefix}apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
"${as_root[@]}" apt-get update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
