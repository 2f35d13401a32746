#!/bin/bash
# Makes the source distribution, from which pip builds the wheel without a checkout: tools/sdist.sh FOLDER [PYTHON]
# FOLDER holds it afterwards, and no other of logitless. It contains git's files and nothing else. Files that git neither
# knows nor ignores are refused by name. PYTHON has scikit-build-core; without it that is fetched (beside the tools of
# tools/wheel.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: tools/sdist.sh FOLDER [PYTHON]}
python=${2:-}
if [[ -z $python ]]; then
  tools/setup.sh
  tools=${WHEEL_BUILD:-build-wheel}-tools
  python=$tools/bin/python
  "$python" -c "import scikit_build_core" 2>/dev/null || {
    python3 -m venv "$tools"
    "$python" -m pip install --quiet --disable-pip-version-check "scikit-build-core>=0.11"
  }
fi

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
log=$made/sdist.log
"$python" -c "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])" "$made" >"$log" 2>&1 || {
  cat "$log" >&2
  exit 1
}
archive=$(echo "$made"/logitless-*.tar.gz)

if [[ $(git rev-parse --show-toplevel 2>/dev/null) == "$PWD" ]]; then
  tar -tzf "$archive" | sed 's|^[^/]*/||' | grep -v '^PKG-INFO$' | LC_ALL=C sort >"$made/held"
  git ls-files | LC_ALL=C sort >"$made/known"
  if ! diff "$made/held" "$made/known" >"$log"; then
    sed -n 's|^< |sdist.sh: git does not know (add, ignore or remove it): |p; s|^> |sdist.sh: is not in the archive: |p' "$log" >&2
    exit 1
  fi
fi

mkdir -p "$folder"
rm -f "$folder"/logitless-*.tar.gz
mv "$archive" "$folder"
echo "$folder/${archive##*/}: pip install builds it with what README.md names"
