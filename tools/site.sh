#!/bin/bash
# Builds the site of docs/ without a warning: tools/site.sh FOLDER, with the index in FOLDER/index.html.
# FOLDER-tools holds MkDocs (tools/site/requirements.txt, from PyPI). The API is read from the imported packages, so
# PyTorch and JAX are needed: those of FRAMEWORKS, the tests' environment, or else fetched as well. Nothing is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: tools/site.sh FOLDER}
tools=$folder-tools
requirements=tools/site/requirements.txt

fetch() {
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || {
    echo "tools/site.sh: the packages of the site were not found ($*). PyPI, or a mirror that pip knows, must be reachable." >&2
    exit 1
  }
}
if ! cmp -s "$requirements" "$tools/requirements.txt"; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  fetch -r "$requirements"
  cp "$requirements" "$tools/requirements.txt"
fi

site=$("$tools/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"${FRAMEWORKS:-build/python}/bin/python" -c 'import sysconfig, torch, jax; print(sysconfig.get_path("purelib"))' \
  >"$site/frameworks.pth" 2>/dev/null || fetch $(grep -E '^(torch|jax|numpy)\b' tests/python/requirements.txt)

PYTHONPATH=python PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1 "$tools/bin/python" -m mkdocs build --strict \
  --config-file tools/site/mkdocs.yml --site-dir "$PWD/$folder"
echo "$folder/index.html: $(find "$folder" -name '*.html' | wc -l) pages"
