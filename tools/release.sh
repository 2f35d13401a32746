#!/bin/bash
# Makes what a release consists of: tools/release.sh FOLDER [PYTHON] [KIND...]
# KINDs: sdist, pure, cpu, cuda; without one all of them, cuda where nvcc is. FOLDER holds them afterwards and nothing
# else of logitless, with SHA256SUMS and NOTES.md: the newest entry of CHANGELOG.md, and the files with their sizes.
# PYTHON is that of tools/wheel.sh. The wheel with GPU kernels has a build tag, such as 1cuda13: pip prefers it, and it
# serves machines without a GPU, too.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: tools/release.sh FOLDER [PYTHON] [sdist] [pure] [cpu] [cuda]}
python=${2:-}
kinds=("${@:3}")
cuda=$({ PATH="$PATH:/usr/local/cuda/bin" nvcc --version 2>/dev/null || true; } | sed -n 's/.*release \([0-9]*\)[.].*/\1/p')
if [[ ${#kinds[@]} -eq 0 ]]; then
  kinds=(sdist pure cpu ${cuda:+cuda})
  [[ $cuda ]] || echo "release.sh: no nvcc here, so there is no wheel with GPU kernels"
fi
version=$(sed -n 's/^project(logitless VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
for kind in "${kinds[@]}"; do
  case $kind in
    cpu) LOGITLESS_CUDA=OFF tools/wheel.sh "$made/cpu" "$python" ;;
    cuda) LOGITLESS_CUDA=ON WHEEL_TAG=1cuda${cuda:?release.sh: cuda needs nvcc} tools/wheel.sh "$made/cuda" "$python" ;;
    pure) LOGITLESS_PURE=1 tools/wheel.sh "$made/pure" "$python" ;;
    sdist) tools/sdist.sh "$made/sdist" "$python" ;;
    *) echo "release.sh: unknown kind '$kind'; expected sdist, pure, cpu or cuda" >&2 && exit 2 ;;
  esac
done

meaning() {
  case $1 in
    *.tar.gz) echo "source archive: pip builds the wheel from it" ;;
    *-none-any.whl) echo "every machine: Python alone, losses in the framework's own operations" ;;
    *cuda*.whl) echo "Linux x86-64 with kernels for the CPU and NVIDIA GPUs" ;;
    *.whl) echo "Linux x86-64 with kernels for the CPU" ;;
  esac
}

{
  echo "# logitless $version"
  awk '/^## \[/ {++entry; next} entry == 1' CHANGELOG.md
  echo "## Files"
  echo
  echo "| file | MiB | for |"
  echo "|---|---:|---|"
  for file in "$made"/*/logitless-*; do
    printf '| `%s` | %.1f | %s |\n' "${file##*/}" "$(stat -c %s "$file" | awk '{print $1 / 1048576}')" "$(meaning "$file")"
  done
} >"$made/NOTES.md"

mkdir -p "$folder"
rm -f "$folder"/logitless-* "$folder/NOTES.md" "$folder/SHA256SUMS"
mv "$made"/*/logitless-* "$made/NOTES.md" "$folder"
(cd "$folder" && sha256sum logitless-* NOTES.md >SHA256SUMS)
sed -n '/^## Files/,$p' "$folder/NOTES.md"
