"""Tests that tools/setup.sh installs missing packages as root or through sudo, and otherwise prints the line to run."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools/setup.sh"

# Each fake command adds its name and arguments to the log, and does what the test requests.
DPKG_QUERY = """#!/bin/bash
for package in "${@:4}"; do
  [[ " $MISSING " == *" $package "* ]] || printf 'installed:%s ' "$package"
done
[[ -z "$MISSING" ]]
"""
FAKES = {
    "dpkg-query": DPKG_QUERY,
    "apt-get": '#!/bin/bash\necho "apt-get $*" >>"$LOG"\n',
    "sudo": '#!/bin/bash\n[[ "$SUDO" == yes && "$1" == -n ]] || exit 1\nshift\necho "sudo $*" >>"$LOG"\n"$@"\n',
    "id": '#!/bin/bash\necho "$USER_ID"\n',
    "env": '#!/bin/bash\nexec /usr/bin/env "$@"\n',
    "true": "#!/bin/bash\n",
}


def setup(missing, *arguments, user_id=0, sudo="no", tools=(), without=()):
    """Returns (status, output, log of calls) of setup.sh where these packages are missing."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**FAKES, **{tool: "#!/bin/bash\n" for tool in tools}}.items():
            if name not in without:
                path = Path(folder, name)
                path.write_text(text)
                path.chmod(0o755)
        log = Path(folder, "log")
        environment = {"PATH": folder, "LOG": str(log), "MISSING": " ".join(missing), "USER_ID": str(user_id), "SUDO": sudo}
        result = subprocess.run([str(SCRIPT), *arguments], env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, check=False)
        return result.returncode, result.stdout, log.read_text().splitlines() if log.exists() else []


class Setup(unittest.TestCase):
    def test_nothing_missing_is_silent_and_calls_nothing(self):
        self.assertEqual(setup([]), (0, "", []))
        self.assertEqual(setup([], "format"), (0, "", []))

    def test_root_installs_exactly_what_is_missing(self):
        status, _, log = setup(["libhwy-dev", "libgtest-dev"])
        self.assertEqual(status, 0)
        self.assertEqual(log, ["apt-get update",
                               "apt-get install -y --no-install-recommends libhwy-dev libgtest-dev"])

    def test_sudo_without_a_password_installs(self):
        status, _, log = setup(["libhwy-dev"], user_id=1000, sudo="yes")
        self.assertEqual(status, 0)
        self.assertIn("apt-get update", log)
        self.assertIn("apt-get install -y --no-install-recommends libhwy-dev", log)

    def test_anyone_else_is_told_the_line(self):
        status, output, log = setup(["libhwy-dev", "python3"], user_id=1000)
        self.assertEqual((status, log), (1, []))
        self.assertIn("sudo apt-get update && sudo apt-get install -y --no-install-recommends python3 libhwy-dev\n", output)
        status, output, log = setup(["libhwy-dev"], user_id=1000, without=("sudo",))
        self.assertEqual((status, log), (1, []))
        self.assertIn("  apt-get update && apt-get install -y --no-install-recommends libhwy-dev\n", output)

    def test_a_tool_from_elsewhere_will_do_and_a_library_will_not(self):
        self.assertEqual(setup(["cmake", "ninja-build"], tools=("cmake", "ninja")), (0, "", []))
        self.assertEqual(setup(["libhwy-dev"], user_id=1000, tools=("libhwy-dev",))[0], 1)

    def test_the_formatter_is_wanted_only_where_asked_for(self):
        self.assertEqual(setup(["clang-format-14"])[0], 0)
        self.assertIn("clang-format-14", setup(["clang-format-14"], "format")[2][1])

    def test_an_unknown_argument_is_refused(self):
        self.assertEqual(setup([], "fromat")[0], 2)

    def test_no_dpkg_is_said_and_not_an_error(self):
        status, output, _ = setup([], without=("dpkg-query",))
        self.assertEqual(status, 0)
        self.assertIn("libhwy-dev", output)

    def test_it_is_executable(self):
        self.assertTrue(os.access(SCRIPT, os.X_OK))


if __name__ == "__main__":
    unittest.main()
