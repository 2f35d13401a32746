#!/usr/bin/env python3
"""Checks the arrows between the folders of this tree, and a few habits of its files.

  - a file includes only what LAYERS lets its folder include
  - public headers name no type of namespace cuda
  - CUDA headers appear only in CUDA_FOLDERS, and no other file asks the preprocessor about CUDA
  - headers of templates that take seconds to compile are included by the one file that SLOW_HEADERS names
  - every header is included once (#pragma once; *-inl.h files that Highway reads once for each target have its guard)
  - no file has more than MAX_LINES lines

One line for each violation, FILE:LINE first; the exit status is 1 if there are any.
"""

import argparse
import os
import re
import sys
from pathlib import Path, PurePosixPath

MAX_LINES = 600

PUBLIC = ("include/logitless/",)
# Public headers that a kernel may include: numbers, tensors and shapes, but neither plans nor calls.
PUBLIC_BASE = tuple(f"include/logitless/{name}.h" for name in (
    "bytes", "context", "dtype", "error", "export", "gpu_card", "head_shape", "memory", "parallel", "tensor_file", "tensor_view",
    "version"))
CORE = ("src/core/", *PUBLIC)
BELOW_KERNELS = ("src/math/", "src/core/", *PUBLIC_BASE)
KERNEL_INTERFACE = ("src/kernels/cpu_*.h", "src/kernels/forced_kernel.h", "src/kernels/device/")
# Headers that all kernels of one device share.
CPU_BASE = ("src/kernels/cpu/*", *KERNEL_INTERFACE, *BELOW_KERNELS)
CUDA_BASE = ("src/kernels/cuda/*", "src/kernels/cuda/device/", *KERNEL_INTERFACE, *BELOW_KERNELS)
BELOW_HEAD = (*KERNEL_INTERFACE, "src/comm/", "src/math/", *CORE)
# The layers of src/head (calls, far, plan, cpu and cuda are side by side), and the headers that they share.
HEAD_BASE = ("src/head/*.h", *BELOW_HEAD)
HEAD_DEVICE = ("src/head/schedule/", *HEAD_BASE)
HEAD_PLAN = ("src/head/cpu/layout.h", "src/head/cuda/layout.h", *HEAD_BASE)
HEAD_FAR = ("src/head/plan/", "src/head/cuda/views.h", *HEAD_BASE)
# The entries of operations declare the requirements of each layer, and define none of them: any layer may include them.
OPERATIONS = "src/compiler/ops/op.h"
IR = ("src/compiler/ir/", OPERATIONS, *CORE)
ANALYSIS = ("src/compiler/analysis/", *IR)
# Plans are made for a target, which holds the requirements of its kernels.
TARGET = "src/compiler/target/target.h"
COMPILER_PLAN = ("src/compiler/plan/", TARGET, *ANALYSIS)

# (folder, its allowed includes). The first folder that contains the file decides, so inner folders come first. An entry
# that ends in / is a folder, any other one is a file; * is a wildcard. A file may include its own folder, too.
LAYERS = (
    ("include/logitless/", PUBLIC),
    ("src/json/", ()),
    ("src/core/", ("src/json/", *PUBLIC_BASE)),
    ("src/math/", PUBLIC_BASE),
    ("src/page/", PUBLIC_BASE),
    ("src/kernels/cpu/head/", CPU_BASE),
    ("src/kernels/cpu/far/", ("src/kernels/cpu/head/", *CPU_BASE)),
    ("src/kernels/cpu/tensor/", CPU_BASE),
    ("src/kernels/cuda/device/", (*KERNEL_INTERFACE, *BELOW_KERNELS)),
    ("src/kernels/cuda/head/", CUDA_BASE),
    ("src/kernels/cuda/far/", ("src/kernels/cuda/head/", *CUDA_BASE)),
    ("src/kernels/cuda/tensor/", CUDA_BASE),
    ("src/kernels/cuda/train/", CUDA_BASE),
    ("src/kernels/*/", (*KERNEL_INTERFACE, *BELOW_KERNELS)),
    ("src/kernels/", ("src/kernels/*.h", "src/kernels/device/", "src/kernels/*/register_*.h", *BELOW_KERNELS)),
    ("src/comm/", ("src/kernels/device/", *CORE)),
    ("src/device/", (*KERNEL_INTERFACE, "src/json/", *CORE)),
    ("src/calibration/", ("src/device/card_file.h", *KERNEL_INTERFACE, *CORE)),
    ("src/head/*.h", HEAD_BASE),
    ("src/head/schedule/", HEAD_BASE),
    ("src/head/cpu/", HEAD_DEVICE),
    ("src/head/cuda/", HEAD_DEVICE),
    ("src/head/plan/", HEAD_PLAN),
    ("src/head/far/", HEAD_FAR),
    ("src/head/", BELOW_HEAD),
    ("src/compiler/ir/", (OPERATIONS, *CORE)),
    (OPERATIONS, ("src/compiler/ir/graph.h",)),
    ("src/compiler/ops/", COMPILER_PLAN),
    ("src/compiler/analysis/", IR),
    ("src/compiler/passes/pipeline.*", ("src/compiler/passes/", "src/compiler/choose_chunks.h", *COMPILER_PLAN)),
    ("src/compiler/search/", ("src/compiler/passes/", *COMPILER_PLAN)),
    ("src/compiler/passes/", ANALYSIS),
    ("src/compiler/plan/", (TARGET, *ANALYSIS)),
    (TARGET, ("src/compiler/plan/program.h", *CORE)),
    ("src/compiler/target/", ("src/head/plan/choose.h", "src/head/program_head.h", "src/head/*.h", "src/compiler/exec/cuda/codegen.h", *BELOW_HEAD, "src/compiler/plan/program.h")),
    ("src/compiler/exec/backend.h", ("src/compiler/plan/program.h", *CORE)),
    ("src/compiler/exec/results_done.*", ("src/compiler/exec/results_done.h", "src/compiler/exec/backend.h", "src/compiler/plan/program.h", *CORE)),
    ("src/compiler/exec/head_over_ranks.*", ("src/compiler/exec/head_over_ranks.h", "src/compiler/exec/backend.h", "src/head/", *BELOW_HEAD, *COMPILER_PLAN)),
    ("src/compiler/exec/head.*", ("src/compiler/exec/*.h", "src/head/program_head.h", "src/head/far/", "src/head/plan/choose.h",
                                  *HEAD_BASE, *COMPILER_PLAN)),
    ("src/compiler/exec/frame.*", ("src/compiler/exec/frame.h", "src/compiler/plan/program.h", *CORE)),
    ("src/compiler/exec/*/", ("src/compiler/exec/*.h", "src/compiler/target/*.h", *BELOW_HEAD,
                              *COMPILER_PLAN)),
    ("src/compiler/report/", ("src/json/", "src/page/", "src/compiler/*.h", "src/compiler/exec/backend.h", *COMPILER_PLAN)),
    ("src/compiler/", ("src/compiler/*.h", "src/kernels/forced_kernel.h", "src/kernels/device/gpu_kernels.h", "src/compiler/passes/", "src/compiler/search/",
                       "src/compiler/target/*.h", "src/compiler/exec/backend.h", "src/compiler/exec/results_done.h", "src/compiler/exec/head.h", "src/compiler/exec/head_over_ranks.h", "src/compiler/exec/*/backend.h",
                       *COMPILER_PLAN)),
    ("src/sample/", ("src/head/*.h", *BELOW_HEAD)),
    ("apps/train/", ("src/core/half.h", "src/core/own_files.h", "src/core/printable.h", "src/json/", "src/page/", *PUBLIC)),
    ("src/capi/", ("src/comm/", "src/head/", "src/math/", "src/sample/tensor_roles.h", *CORE)),
    ("src/xla/far_field.cpp", ("src/xla/", "src/head/far/head.h", "src/head/tensor_roles.h", "src/kernels/device/head.h", "src/kernels/device/stream.h", *CORE)),
    ("src/xla/", ("src/head/tensor_roles.h", "src/sample/tensor_roles.h", *CORE)),
    ("src/cli/", ("src/json/", "apps/train/", *PUBLIC)),
    ("examples/", PUBLIC),
    ("bench/device/cuda/", ("src/kernels/cuda/", *BELOW_HEAD)),
    ("bench/device/", (*BELOW_HEAD,)),
    ("bench/", PUBLIC),
)

# Tests and fuzzers may include anything; the other checks apply to them as well.
ROOTS = ("include", "src", "apps", "examples", "bench", "tests", "fuzz", "tools", "cmake")
FREE_FOLDERS = ("tests/", "fuzz/")

CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
HEADERS = {".h", ".cuh"}
TEXT = CODE | {".py", ".sh", ".cmake"}

CUDA_FOLDERS = ("src/kernels/cuda/", "bench/device/cuda/")
CUDA_HEADER = re.compile(r"(cuda|cublas|curand|cudnn|cufft|cusparse|nccl|nvrtc|nvtx)\w*\.h(pp)?$|cuda_\w+|"
                         r"(cute|cutlass|cub|thrust|cuda|cooperative_groups|nvtx3)/|(cooperative_groups|mma)\.h$")
CUDA_QUESTION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef)\b.*CUDA")
# The one test allowed elsewhere: arithmetic for CPU and GPU tests for nvcc.
HOST_DEVICE_QUESTION = re.compile(r"^\s*#\s*(if|ifdef)\b\s*(defined\s*\(?\s*)?__CUDACC__\s*\)?\s*$")

# (first part of the include, the one file of src and apps that includes it). Every further one would instantiate its templates
# again: half a minute for a file under the sanitizers.
SLOW_HEADERS = (("CLI/", "src/cli/options.cpp"), ("nlohmann/", "src/json/json.cpp"))

PUBLIC_CUDA = re.compile(r"\bnamespace cuda\b|\bcuda::")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def resolve(root, file, name):
    """Returns the path below `root` that an include of `name` in `file` reads, or None for a foreign one."""
    for base in (file.parent, *(PurePosixPath(p) for p in ("include", "src", "apps", file.parts[0], "."))):
        path = PurePosixPath(os.path.normpath(base / name))
        if ".." not in path.parts and (root / path).is_file():
            return path
    # A file that does not exist (yet) is still ours when its first folder is.
    first = PurePosixPath(name).parts[0]
    if first == "logitless":
        return PurePosixPath("include") / name
    for base in ("src", "apps"):
        if "/" in name and (root / base / first).is_dir():
            return PurePosixPath(base) / name
    return None


def lies_in(path, pattern):
    """Returns whether the path is the file `pattern`, or below it when `pattern` ends in /."""
    parts, wanted = path.parts, PurePosixPath(pattern).parts
    if pattern.endswith("/"):
        if len(parts) <= len(wanted):
            return False
        parts = parts[: len(wanted)]
    if len(parts) != len(wanted):
        return False
    return all(PurePosixPath(part).match(name) for part, name in zip(parts, wanted))


def layer_of(path):
    """Returns (the folder that decides for this file, its allowed includes), or None without an entry in LAYERS."""
    for folder, allowed in LAYERS:
        if lies_in(path, folder):
            if not folder.endswith("/"):
                return folder, allowed
            own = "/".join(path.parts[: len(PurePosixPath(folder).parts)]) + "/"
            # These folders contain other layers, which may not be included freely.
            return own, allowed if own in ("src/kernels/", "src/compiler/") else (own, *allowed)
    return None


def check_includes(root, path, lines):
    if str(path).startswith(FREE_FOLDERS):
        return
    layer = layer_of(path)
    if layer is None:
        yield 1, "lies in a folder without a row in LAYERS of tools/check_layers.py"
        return
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        name = found.group(2)
        target = resolve(root, path, name)
        if target is None:
            if CUDA_HEADER.match(name) and not str(path).startswith(CUDA_FOLDERS):
                yield number, f"includes the CUDA header {name}; only {'* and '.join(CUDA_FOLDERS)}* may"
        elif not any(lies_in(target, entry) for entry in layer[1]):
            yield number, f"includes {target}; {layer[0]} may include {', '.join(layer[1])}"


def check_slow_headers(path, lines):
    if not str(path).startswith(("src/", "apps/")):
        return
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        for prefix, file in SLOW_HEADERS:
            if found and found.group(2).startswith(prefix) and str(path) != file:
                yield number, f"includes {found.group(2)}, which is slow to compile; only {file} may"


def check_cuda_questions(path, lines):
    if str(path).startswith((*CUDA_FOLDERS, "cmake/")):
        return
    for number, line in enumerate(lines, 1):
        if CUDA_QUESTION.match(line) and not (
                str(path).startswith("src/math/") and HOST_DEVICE_QUESTION.match(line)):
            yield number, f"asks about CUDA: '{line.strip()}'; only {'* and '.join(CUDA_FOLDERS)}* may"


def check_once(path, lines):
    if path.suffix not in HEADERS:
        return
    if path.name.endswith("-inl.h"):
        if not any("HWY_TARGET_TOGGLE" in line for line in lines):
            yield 1, "is a *-inl.h without Highway's guard on HWY_TARGET_TOGGLE"
    elif not any(re.match(r"^\s*#\s*pragma\s+once\b", line) for line in lines):
        yield 1, "has no #pragma once"


def check_public(path, lines):
    if not str(path).startswith("include/"):
        return
    for number, line in enumerate(lines, 1):
        if PUBLIC_CUDA.search(line.partition("//")[0]):
            yield number, f"names what is CUDA's in a public header: '{line.strip()}'"


def check_length(lines):
    if len(lines) > MAX_LINES:
        yield MAX_LINES + 1, f"has {len(lines)} lines; at most {MAX_LINES}"


def files_of(root):
    for folder in ROOTS:
        for directory, names, files in os.walk(root / folder):
            names[:] = sorted(n for n in names if n != "__pycache__")
            for name in sorted(files):
                path = Path(directory, name)
                if path.suffix in TEXT or name == "CMakeLists.txt":
                    yield PurePosixPath(path.relative_to(root).as_posix())


def check_tree(root):
    """Returns ("file:line: text" for each violation, number of files read)."""
    violations, count = [], 0
    for path in files_of(root):
        count += 1
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        problems = list(check_length(lines))
        if path.suffix in CODE:
            problems += check_includes(root, path, lines)
            problems += check_slow_headers(path, lines)
            problems += check_cuda_questions(path, lines)
            problems += check_once(path, lines)
            problems += check_public(path, lines)
        violations += [f"{path}:{number}: {problem}" for number, problem in sorted(problems)]
    return violations, count


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(argv).root
    violations, count = check_tree(root)
    for violation in violations:
        print(violation)
    print(f"layers: {count} files, {len(violations)} violations")
    if count == 0:
        print(f"check_layers.py: no files below {root}", file=sys.stderr)
        return 1
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
