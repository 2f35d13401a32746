"""How .ci/run calls make: where no GPU is, it asks for GPU kernels that are compiled quickly, in the folder of make test alone."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAKE = """#!/bin/bash
for argument in "$@"; do
  case $argument in
    CMAKE_ARGS=*) echo "make $1: ${argument#CMAKE_ARGS=}" ;;
    ARGS=*) totals=${argument##* } ;;
  esac
done
[[ -z ${totals:-} ]] || echo "$PASSED $FAILED 0 $NAMES" >>"$totals"
exit "$FAILED"
"""


class CiRun(unittest.TestCase):
    def run_ci(self, gpu, cmake_args="", failed=0):
        """Returns (status, the make calls that had CMAKE_ARGS, the last line). A failed test is called broken_test."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in (".ci/run", "tools/gpu_here.sh"):
                (root / name).parent.mkdir()
                shutil.copy(ROOT / name, root / name)
            (root / "bin").mkdir()
            (root / "bin/make").write_text(MAKE)
            (root / "bin/make").chmod(0o755)
            environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "GPU_HERE": str(gpu).lower(),
                           "CMAKE_ARGS": cmake_args, "PASSED": "5", "FAILED": str(failed),
                           "NAMES": "broken_test" if failed else ""}
            done = subprocess.run([root / ".ci/run"], env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        self.assertEqual("FAILED broken_test" in lines, bool(failed))
        return done.returncode, [line for line in lines if line.startswith("make ")], lines[-1]

    def test_kernels_are_compiled_quickly_where_none_runs(self):
        fast = "make test: -DLOGITLESS_CUDA_FAST_COMPILE=ON "
        self.assertEqual(self.run_ci(gpu=False), (0, [fast], "19 passed, 0 failed"))
        self.assertEqual(self.run_ci(gpu=False, cmake_args="-DA=B")[1], [fast + "-DA=B"])
        self.assertEqual(self.run_ci(gpu=True, cmake_args="-DA=B")[1], ["make test: -DA=B"])

    def test_other_builds_in_that_folder_compile_them_again(self):
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        release = next(preset for preset in presets if preset["name"] == "release")
        self.assertEqual(release["cacheVariables"]["LOGITLESS_CUDA_FAST_COMPILE"], "OFF")

    def test_a_stage_that_fails(self):
        status, _, last = self.run_ci(gpu=True, failed=1)
        self.assertEqual((status, last), (1, "15 passed, 7 failed"))


if __name__ == "__main__":
    unittest.main()
