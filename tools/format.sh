#!/bin/bash
# Formats all C++ of the tree in place: tools/format.sh
# Lists the files that differ, without changing them: tools/format.sh --check
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh format
formatter=${CLANG_FORMAT:-clang-format-14}  # other versions break lines differently
folders=()
for folder in include src apps tests examples bench fuzz; do [[ -d "$folder" ]] && folders+=("$folder"); done
mapfile -t files < <(find "${folders[@]}" -type f \
  \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | LC_ALL=C sort)

case "${1:-}" in
  "") "$formatter" -i -style=file "${files[@]}" ;;
  --check)
    bad=0
    for file in "${files[@]}"; do
      if ! "$formatter" -style=file "$file" | cmp -s - "$file"; then
        echo "$file: not formatted; 'make format' does it"
        bad=$((bad + 1))
      fi
    done
    echo "format: ${#files[@]} files, $bad to be formatted"
    [[ $bad -eq 0 ]]
    ;;
  *) echo "format.sh: unknown argument '$1'; expected nothing or --check" >&2; exit 2 ;;
esac
