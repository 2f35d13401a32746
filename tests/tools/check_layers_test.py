"""Every rule of tools/check_layers.py fires on a small tree that breaks it, and on nothing else."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_layers  # noqa: E402

# A valid tree: one file for each folder, with the includes that its layer allows.
GOOD = {
    "include/logitless/api.h": '#pragma once\n#include <vector>\n#include "logitless/api.h"\n',
    "include/logitless/dtype.h": "#pragma once\n",
    "include/logitless/plan.h": "#pragma once\n",
    "src/core/check.h": '#pragma once\n#include "logitless/dtype.h"\n#include "core/check.h"\n',
    "src/math/lse.h": '#pragma once\n#if defined(__CUDACC__)\n#endif\n#include "math/lse.h"\n#include <logitless/dtype.h>\n',
    "src/kernels/cpu_head.h": '#pragma once\n#include "logitless/dtype.h"\n#include "core/check.h"\n',
    "src/kernels/registry.cpp": '#include "kernels/cpu_head.h"\n#include "kernels/cpu/register_cpu.h"\n',
    "src/kernels/cpu/register_cpu.h": '#pragma once\n#include "kernels/cpu_head.h"\n#include "math/lse.h"\n',
    "src/kernels/cpu_tensor.h": '#pragma once\n#include "logitless/dtype.h"\n',
    "src/kernels/device/tensor.h": '#pragma once\n#include "logitless/dtype.h"\n',
    "src/kernels/cpu/head/chunk-inl.h": '#if defined(A) == defined(HWY_TARGET_TOGGLE)\n#endif\n#include "kernels/cpu/simd-inl.h"\n',
    "src/kernels/cpu/far/masses-inl.h": '#if defined(A) == defined(HWY_TARGET_TOGGLE)\n#endif\n#include "kernels/cpu/head/chunk-inl.h"\n',
    "src/kernels/cpu/tensor/gemm-inl.h": '#if defined(A) == defined(HWY_TARGET_TOGGLE)\n#endif\n#include "kernels/cpu/simd-inl.h"\n#include "kernels/cpu_tensor.h"\n',
    "src/kernels/cpu/simd_kernels.cpp": '#include "kernels/cpu/far/masses-inl.h"\n#include "kernels/cpu/head/chunk-inl.h"\n',
    "src/kernels/cuda/device/tiles.cuh": "#pragma once\n#include <cuda.h>\n",
    "src/kernels/cuda/head/targets.cuh": '#pragma once\n#include "kernels/cuda/device/tiles.cuh"\n#include "kernels/cuda/device.cuh"\n',
    "src/kernels/cuda/far/rows.cu": '#include "kernels/cuda/head/targets.cuh"\n',
    "src/kernels/cuda/tensor/gemm.cu": '#include <cuda_runtime.h>\n#include "kernels/cuda/device/tiles.cuh"\n#include "kernels/device/tensor.h"\n',
    "src/kernels/cpu/simd-inl.h": "#if defined(A) == defined(HWY_TARGET_TOGGLE)\n#endif\n",
    "src/kernels/cuda/device.cuh": "#pragma once\n#ifdef LOGITLESS_CUDA\n#endif\n#include <cuda_runtime.h>\n#include <cute/tensor.hpp>\n",
    "src/kernels/reference/loops.cpp": '#include "core/check.h"\n#include <cmath>\n',
    "src/head/call.h": '#pragma once\n#include "logitless/plan.h"\n',
    "src/head/head.cpp": '#include "head/call.h"\n#include "head/cpu/engine.h"\n#include "head/far/order.h"\n',
    "src/head/cpu/layout.h": '#pragma once\n#include "kernels/cpu_head.h"\n',
    "src/head/cpu/engine.h": '#pragma once\n#include "head/call.h"\n#include "math/lse.h"\n#include "core/check.h"\n',
    "src/head/cuda/engine.h": '#pragma once\n#include "head/call.h"\n',
    "src/head/plan/choose.h": '#pragma once\n#include "head/cpu/layout.h"\n#include "logitless/plan.h"\n',
    "src/head/far/order.h": '#pragma once\n#include "head/plan/choose.h"\n',
    "src/compiler/ir/graph.h": '#pragma once\n#include "core/check.h"\n',
    "src/compiler/analysis/size.h": '#pragma once\n#include "compiler/ir/graph.h"\n',
    "src/compiler/ir/print.cpp": '#include "compiler/ops/op.h"\n',
    "src/compiler/ops/op.h": '#pragma once\n#include "compiler/ir/graph.h"\n',
    "src/compiler/ops/shape.cpp": '#include "compiler/ops/op.h"\n#include "compiler/analysis/size.h"\n#include "compiler/plan/program.h"\n',
    "src/compiler/passes/fold.h": '#pragma once\n#include "compiler/analysis/size.h"\n#include "compiler/ops/op.h"\n',
    "src/compiler/passes/pipeline.cpp": '#include "compiler/passes/fold.h"\n#include "compiler/plan/program.h"\n#include "compiler/choose_chunks.h"\n',
    "src/compiler/plan/program.h": '#pragma once\n#include "compiler/analysis/size.h"\n',
    "src/compiler/plan/lower.cpp": '#include "compiler/target/target.h"\n#include "compiler/plan/program.h"\n',
    "src/compiler/target/target.h": '#pragma once\n#include "compiler/plan/program.h"\n',
    "src/compiler/target/cpu.h": '#pragma once\n#include "compiler/target/target.h"\n#include "kernels/cpu_head.h"\n',
    "src/compiler/exec/backend.h": '#pragma once\n#include "compiler/plan/program.h"\n',
    "src/compiler/exec/cpu/backend.h": '#pragma once\n#include "compiler/exec/backend.h"\n',
    "src/compiler/exec/cpu/run.h": '#pragma once\n#include "compiler/target/cpu.h"\n#include "kernels/cpu_head.h"\n',
    "src/compiler/exec/head.h": '#pragma once\n#include "compiler/exec/backend.h"\n#include "head/call.h"\n#include "head/far/order.h"\n#include "head/plan/choose.h"\n',
    "src/compiler/exec/cuda/run.h": '#pragma once\n#include "kernels/device/module.h"\n',
    "src/kernels/device/module.h": "#pragma once\n",
    "src/compiler/choose_chunks.h": '#pragma once\n#include "compiler/target/target.h"\n',
    "src/compiler/compiler.cpp": '#include "compiler/passes/fold.h"\n#include "compiler/exec/cpu/backend.h"\n#include "compiler/target/cpu.h"\n',
    "apps/train/trainer.h": "#pragma once\n#include <logitless/api.h>\n",
    "apps/train/trainer.cpp": '#include "train/trainer.h"\n#include "logitless/api.h"\n',
    "src/capi/c_api.cpp": '#include "logitless/api.h"\n#include "core/check.h"\n',
    "src/cli/args.h": "#pragma once\n#include <logitless/api.h>\n",
    "src/cli/main.cpp": '#include "cli/args.h"\n#include "args.h"\n#include "train/trainer.h"\n#include "json/json.h"\n',
    "src/cli/options.cpp": '#include <CLI/CLI.hpp>\n',
    "src/json/json.h": "#pragma once\n",
    "src/json/json.cpp": '#include "json/json.h"\n#include <nlohmann/json.hpp>\n',
    "examples/one.cpp": '#include <logitless/api.h>\n',
    "bench/timing.h": "#pragma once\n",
    "bench/bench_head.cpp": '#include "timing.h"\n#include <logitless/api.h>\n',
    "tests/head/engine_test.cpp": '#include "head/cpu/engine.h"\n#include "kernels/cpu/register_cpu.h"\n#include <cuda_runtime.h>\n',
}


class Tree(unittest.TestCase):
    """Base of tests on one copy of GOOD on disk."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.root = Path(cls.folder.name)
        for name, text in GOOD.items():
            write(cls.root / name, text)

    def check(self, changes):
        """Returns the checker's findings for GOOD with these files changed or added."""
        for name, text in changes.items():
            write(self.root / name, text)
        violations = check_layers.check_tree(self.root)[0]
        for name in changes:
            if name in GOOD:
                write(self.root / name, GOOD[name])
            else:
                (self.root / name).unlink()
        return violations


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Includes(Tree):
    def test_a_tree_in_order_has_no_violation(self):
        self.assertEqual(self.check({}), [])

    # (file, forbidden include)
    FORBIDDEN = (
        ("include/logitless/bad.h", "core/check.h"),
        ("src/core/bad.cpp", "math/lse.h"),
        ("src/core/bad.cpp", "head/cpu/engine.h"),
        ("src/math/bad.cpp", "core/check.h"),
        ("src/json/bad.cpp", "core/check.h"),
        ("src/head/bad.cpp", "json/json.h"),
        ("src/kernels/bad.cpp", "head/cpu/engine.h"),
        ("src/kernels/registry.cpp", "kernels/cpu/simd-inl.h"),
        ("src/kernels/cpu/bad.cpp", "kernels/cuda/device.cuh"),
        ("src/kernels/cpu/head/bad.cpp", "kernels/cpu/far/masses-inl.h"),
        ("src/kernels/cpu/head/bad.cpp", "kernels/cpu/tensor/gemm-inl.h"),
        ("src/kernels/cpu/tensor/bad.cpp", "kernels/cpu/head/chunk-inl.h"),
        ("src/kernels/cpu/far/bad.cpp", "kernels/cpu/tensor/gemm-inl.h"),
        ("src/kernels/cpu/far/bad.cpp", "kernels/cuda/head/targets.cuh"),
        ("src/kernels/cuda/device/bad.cu", "kernels/cuda/head/targets.cuh"),
        ("src/kernels/cuda/tensor/bad.cu", "kernels/cuda/head/targets.cuh"),
        ("src/kernels/cuda/tensor/bad.cu", "kernels/cpu/tensor/gemm-inl.h"),
        ("src/kernels/cuda/bad.cu", "kernels/cpu/register_cpu.h"),
        ("src/kernels/reference/bad.cpp", "kernels/cpu/register_cpu.h"),
        ("src/kernels/cpu/bad.cpp", "head/cpu/engine.h"),
        ("src/head/bad.cpp", "kernels/cpu/register_cpu.h"),
        ("src/head/bad.cpp", "compiler/ir/graph.h"),
        ("src/kernels/bad.h", "logitless/plan.h"),
        ("src/kernels/cpu/bad.cpp", "logitless/plan.h"),
        ("src/core/bad.cpp", "logitless/plan.h"),
        ("src/head/bad.h", "head/plan/choose.h"),
        ("src/head/cpu/bad.cpp", "head/cuda/engine.h"),
        ("src/head/cuda/bad.cpp", "head/cpu/layout.h"),
        ("src/head/cpu/bad.cpp", "head/plan/choose.h"),
        ("src/head/plan/bad.cpp", "head/far/order.h"),
        ("src/head/plan/bad.cpp", "head/cpu/engine.h"),
        ("src/head/far/bad.cpp", "head/cpu/engine.h"),
        ("src/compiler/ir/bad.cpp", "compiler/analysis/size.h"),
        ("src/compiler/ir/bad.cpp", "kernels/cpu_head.h"),
        ("src/compiler/analysis/bad.cpp", "compiler/passes/fold.h"),
        ("src/compiler/ir/bad.cpp", "compiler/ops/families.h"),
        ("src/compiler/ops/op.h", "compiler/plan/program.h"),
        ("src/compiler/ops/bad.cpp", "compiler/exec/cpu/run.h"),
        ("src/compiler/ops/bad.cpp", "kernels/cpu_head.h"),
        ("src/compiler/ops/bad.cpp", "compiler/target/cpu.h"),
        ("src/compiler/passes/bad.cpp", "compiler/plan/program.h"),
        ("src/compiler/passes/bad.cpp", "head/cpu/engine.h"),
        ("src/compiler/passes/pipeline.cpp", "compiler/target/cpu.h"),
        ("src/compiler/plan/bad.cpp", "compiler/exec/backend.h"),
        ("src/compiler/plan/bad.cpp", "compiler/target/cpu.h"),
        ("src/compiler/plan/bad.cpp", "kernels/cpu_head.h"),
        ("src/compiler/plan/bad.cpp", "head/cpu/engine.h"),
        ("src/compiler/target/target.h", "kernels/cpu_head.h"),
        ("src/compiler/target/bad.cpp", "compiler/plan/lower.h"),
        ("src/compiler/target/bad.cpp", "compiler/exec/backend.h"),
        ("src/compiler/exec/cpu/bad.cpp", "compiler/passes/fold.h"),
        ("src/compiler/exec/cpu/bad.cpp", "compiler/exec/cuda/run.h"),
        ("src/compiler/exec/cpu/bad.cpp", "head/cpu/engine.h"),
        ("src/compiler/exec/head.cpp", "head/cpu/engine.h"),
        ("src/device/bad.cpp", "head/call.h"),
        ("src/compiler/exec/cpu/bad.cpp", "kernels/cpu/register_cpu.h"),
        ("src/compiler/bad.cpp", "compiler/exec/cpu/run.h"),
        ("src/compiler/bad.cpp", "kernels/cpu_head.h"),
        ("src/compiler/bad.cpp", "train/trainer.h"),
        ("apps/train/bad.cpp", "kernels/cpu_head.h"),
        ("apps/train/bad.cpp", "core/check.h"),
        ("apps/train/bad.cpp", "head/cpu/engine.h"),
        ("apps/train/bad.cpp", "cli/args.h"),
        ("apps/train/bad.cpp", "compiler/ir/graph.h"),
        ("src/capi/bad.cpp", "kernels/cpu_head.h"),
        ("src/capi/bad.cpp", "cli/args.h"),
        ("src/cli/bad.cpp", "core/check.h"),
        ("examples/bad.cpp", "core/check.h"),
        ("examples/bad.cpp", "train/trainer.h"),
        ("bench/bad.cpp", "head/cpu/engine.h"),
        ("bench/bad.cpp", "train/trainer.h"),
    )

    def test_each_arrow_that_is_not_drawn_is_refused(self):
        for file, name in self.FORBIDDEN:
            with self.subTest(file=file, includes=name):
                violations = self.check({file: f'#pragma once\n#include "{name}"\n'})
                self.assertEqual(len(violations), 1, violations)
                self.assertTrue(violations[0].startswith(f"{file}:2: includes "), violations[0])
                self.assertIn(name, violations[0])

    def test_a_public_header_names_nothing_of_cuda(self):
        for text in ("namespace cuda {\n}\n", "void f(cuda::Stream stream);\n"):
            with self.subTest(text=text):
                self.assertEqual(len(self.check({"include/logitless/bad.h": "#pragma once\n" + text})), 1)

    def test_the_message_says_what_the_layer_may_include(self):
        self.assertEqual(
            self.check({"src/cli/bad.cpp": '#include "core/check.h"\n'}),
            ["src/cli/bad.cpp:1: includes src/core/check.h; src/cli/ may include src/cli/, src/json/, "
             "apps/train/, include/logitless/"])

    def test_neither_angle_brackets_nor_relative_paths_hide_an_include(self):
        for include in ("<core/check.h>", '"../core/check.h"', '"../../src/core/check.h"', '"src/core/check.h"'):
            with self.subTest(include=include):
                self.assertEqual(len(self.check({"src/cli/bad.cpp": f"#  include {include}\n"})), 1)

    def test_headers_that_are_slow_to_compile_have_one_file(self):
        for name, file in (("CLI/App.hpp", "src/cli/bad.cpp"), ("nlohmann/json_fwd.hpp", "apps/train/bad.h"),
                           ("nlohmann/json.hpp", "src/cli/options.cpp")):
            with self.subTest(file=file, includes=name):
                violations = self.check({file: f"#pragma once\n#include <{name}>\n"})
                self.assertEqual(len(violations), 1, violations)
                self.assertTrue(violations[0].startswith(f"{file}:2: includes {name}, which is slow"), violations[0])
        self.assertEqual(self.check({"tests/core/a_test.cpp": "#include <nlohmann/json.hpp>\n"}), [])

    def test_an_include_of_a_missing_file_of_ours_counts(self):
        self.assertEqual(len(self.check({"src/cli/bad.cpp": '#include "head/not_there.h"\n'})), 1)

    def test_a_folder_without_a_row_is_refused(self):
        violations = self.check({"src/extra/new.cpp": "int x;\n"})
        self.assertEqual(len(violations), 1)
        self.assertIn("without a row in LAYERS", violations[0])


class Cuda(Tree):
    def test_cuda_headers_stay_in_their_folders(self):
        for name in ("cuda_runtime.h", "cuda.h", "cuda_bf16.h", "cublasLt.h", "cublas_v2.h", "cute/tensor.hpp",
                     "cutlass/gemm.h", "cub/cub.cuh", "cooperative_groups.h", "nccl.h"):
            for file in ("src/head/bad.cpp", "src/compiler/exec/cpu/bad.cpp", "include/logitless/api2.h", "bench/bad.cpp"):
                with self.subTest(name=name, file=file):
                    violations = self.check({file: f"#pragma once\n#include <{name}>\n"})
                    self.assertEqual(len(violations), 1, violations)
                    self.assertTrue(violations[0].startswith(f"{file}:2: includes the CUDA header {name}"))

    def test_other_headers_are_not_taken_for_cuda(self):
        self.assertEqual(self.check({"src/head/fine.cpp": "#include <cstdio>\n#include <cubature.h>\n#include <mmap.h>\n"}), [])

    def test_only_cuda_folders_ask_about_cuda(self):
        for question in ("#ifdef LOGITLESS_CUDA", "#if defined(USE_CUDA)", "#ifndef __CUDA_ARCH__", "# if LOGITLESS_CUDA > 1",
                         "#elif defined(__CUDACC__)"):
            for file in ("src/head/bad.cpp", "src/math/bad.h", "tests/head/bad_test.cpp"):
                with self.subTest(question=question, file=file):
                    violations = self.check({file: f"#pragma once\n{question}\n#endif\n"})
                    self.assertEqual(len(violations), 1, violations)
                    self.assertTrue(violations[0].startswith(f"{file}:2: asks about CUDA"))

    def test_nvcc_may_be_asked_for_in_math_alone(self):
        self.assertEqual(self.check({"src/math/fine.h": "#pragma once\n#ifdef __CUDACC__\n#endif\n"}), [])
        self.assertEqual(len(self.check({"src/core/bad.h": "#pragma once\n#ifdef __CUDACC__\n#endif\n"})), 1)


class Files(Tree):
    def test_a_header_without_pragma_once(self):
        for file in ("src/core/bad.h", "include/logitless/bad.h", "src/kernels/cuda/bad.cuh", "tests/bad.h"):
            with self.subTest(file=file):
                self.assertEqual(self.check({file: "#ifndef X\n#define X\n#endif\n"}), [f"{file}:1: has no #pragma once"])

    def test_an_inl_header_without_the_guard_of_highway(self):
        violations = self.check({"src/kernels/cpu/bad-inl.h": "#pragma once\n"})
        self.assertEqual(len(violations), 1)
        self.assertIn("HWY_TARGET_TOGGLE", violations[0])

    def test_the_longest_file_and_one_line_more(self):
        for file in ("src/core/long.cpp", "tests/core/long_test.cpp", "tools/long.py", "cmake/Long.cmake", "tests/CMakeLists.txt"):
            with self.subTest(file=file):
                self.assertEqual(self.check({file: "\n" * 600}), [])
                self.assertEqual(self.check({file: "\n" * 601}), [f"{file}:601: has 601 lines; at most 600"])


class CommandLine(unittest.TestCase):
    def run_on(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                write(Path(folder, name), text)
            return subprocess.run([sys.executable, str(ROOT / "tools/check_layers.py"), "--root", folder],
                                  capture_output=True, text=True, check=False)

    def test_status_and_count(self):
        good = self.run_on(GOOD)
        self.assertEqual((good.returncode, good.stdout), (0, f"layers: {len(GOOD)} files, 0 violations\n"))
        bad = self.run_on({**GOOD, "src/core/bad.h": ""})
        self.assertEqual(bad.returncode, 1)
        self.assertEqual(bad.stdout, f"src/core/bad.h:1: has no #pragma once\nlayers: {len(GOOD) + 1} files, 1 violations\n")

    def test_an_empty_tree_is_a_mistake(self):
        self.assertEqual(self.run_on({}).returncode, 1)


if __name__ == "__main__":
    unittest.main()
