"""tools/run.sh builds GPU kernels where there is a GPU, or where somebody asks for them; make install builds what it installs."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BUILD = """#!/bin/bash
echo "$BUILD $* ${CMAKE_ARGS:-}"
mkdir -p "$BUILD/src/cli"
printf '#!/bin/bash\\necho "$@"\\n' >"$BUILD/src/cli/logitless"
chmod +x "$BUILD/src/cli/logitless"
"""

# A make that runs this test exports its own options and variables.
EXPORTED_BY_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "BUILD", "PREFIX", "DESTDIR")


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "tools").mkdir()
        for script in ("tools/run.sh", "tools/gpu_here.sh"):
            shutil.copy(ROOT / script, self.root / script)
        shutil.copy(ROOT / "Makefile", self.root / "Makefile")
        self.write("tools/build.sh", BUILD)

    def write(self, name, text):
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def make(self, *arguments, gpu=False, **variables):
        """Returns the arguments of tools/build.sh and of the command, a line each."""
        outer = {name: text for name, text in os.environ.items() if name not in EXPORTED_BY_MAKE}
        environment = {**outer, "CUDACXX": "nvcc", "GPU_HERE": str(gpu).lower(), "CMAKE_ARGS": "", **variables}
        done = subprocess.run(["make", *arguments], cwd=self.root, env=environment, capture_output=True, text=True, check=True)
        return [line.strip() for line in done.stdout.splitlines() if not line.startswith("no GPU here: ")]

    def test_without_a_gpu_the_command_is_built_for_the_cpu_in_a_folder_of_its_own(self):
        built = ["build-cpu release src/cli/logitless  -DLOGITLESS_CUDA=OFF", "train --steps 3"]
        for _ in range(2):
            self.assertEqual(self.make("run", "ARGS=--steps 3"), built)
        self.assertEqual(self.make("run", "BUILD=b")[0], "b-cpu release src/cli/logitless  -DLOGITLESS_CUDA=OFF")

    def test_gpu_kernels_where_a_gpu_is_or_somebody_asks(self):
        self.assertEqual(self.make("run", gpu=True), ["build release src/cli/logitless", "train"])
        for value in ("ON", "OFF"):
            asked = f"-DLOGITLESS_CUDA={value}"
            self.assertEqual(self.make("run", f"CMAKE_ARGS={asked}"), [f"build release src/cli/logitless {asked}", "train"])

    def test_a_command_that_is_there_is_used(self):
        self.make("run", gpu=True)
        self.assertEqual(self.make("run"), ["build release src/cli/logitless", "train"])

    def test_install_builds_what_it_installs(self):
        self.write("cmake", "#!/bin/bash\n")
        (self.root / "build").mkdir()
        (self.root / "build/CMakeCache.txt").write_text(f"CMAKE_COMMAND:INTERNAL={self.root}/cmake\n")
        self.assertEqual(self.make("install"), ["build release installed"])


if __name__ == "__main__":
    unittest.main()
