"""Tests of packaging/Containerfile without building it. Its copied files exist, and the packages of its last stage are
those that the command and the library link. LOGITLESS_CLI names the command; without it the packages are not checked.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "packaging" / "Containerfile"
ARGUMENTS = {"FROM", "COPY", "RUN", "ARG", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
IN_EVERY_IMAGE = {"libc6", "libgcc-s1"}


def instructions():
    """Yields (keyword, argument) in order, with continued lines joined."""
    text = "\n".join(line for line in RECIPE.read_text().split("\n") if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", text).split("\n"):
        if line:
            yield tuple(line.split(None, 1))


def linked(path):
    """Returns the names of its direct dependencies; the others come with the packages of these."""
    listed = subprocess.run(["readelf", "--dynamic", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed))


def found(path):
    """Returns name -> file of all that the loader finds for it."""
    listed = subprocess.run(["ldd", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(re.findall(r"^\s*(\S+) => (\S+)", listed, re.M))


def package_of(path):
    # A package may list /lib where the loader reports /usr/lib, and vice versa.
    other = path[len("/usr") :] if path.startswith("/usr/") else "/usr" + path
    for name in (path, other):
        asked = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return asked.stdout.split(":")[0]
    raise AssertionError(f"{path} is of no package")


class ContainerTest(unittest.TestCase):
    def test_every_instruction_is_known_and_stages_are_named_before_they_are_used(self):
        stages, bases = set(), []
        for keyword, argument in instructions():
            self.assertIn(keyword, ARGUMENTS)
            if keyword == "FROM":
                base, *name = argument.split()
                bases.append(base)
                if name:
                    self.assertEqual(name[0], "AS")
                    stages.add(name[1])
            for stage in re.findall(r"--from=(\S+)", argument):
                self.assertIn(stage, stages)
        # Stages must use one Debian release: libraries differ between releases.
        self.assertEqual(bases, ["debian:12-slim"] * 2)

    def test_what_is_copied_is_there_and_not_left_out(self):
        ignored = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]
        copied = [argument.split() for keyword, argument in instructions() if keyword == "COPY" and "--from" not in argument]
        self.assertTrue(copied)
        for source, _ in copied:
            self.assertTrue((ROOT / source).exists(), source)
        for name in ("CMakeLists.txt", "Makefile", "cmake", "include", "src", "apps", "tools", "examples", "bench"):
            self.assertFalse([pattern for pattern in ignored if fnmatch.fnmatch(name, pattern)], name)
        for name in ("build", "build-asan", ".git"):
            self.assertTrue([pattern for pattern in ignored if fnmatch.fnmatch(name, pattern)], name)

    def test_the_build_is_one_of_the_makefile(self):
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        options = (ROOT / "CMakeLists.txt").read_text()
        (target,) = (re.match(r"make (\S+)", argument)[1] for keyword, argument in instructions() if "make " in argument)
        self.assertIn(target, targets)
        (settings,) = (argument for keyword, argument in instructions() if argument.startswith("CMAKE_ARGS="))
        for name in re.findall(r"-D(\w+)=", settings):
            self.assertRegex(options, rf"(option|set)\({name} ")

    def test_the_last_stage_has_the_packages_that_the_command_links(self):
        command = os.environ.get("LOGITLESS_CLI")
        if not command or not shutil.which("dpkg-query") or 'VERSION_ID="12"' not in Path("/etc/os-release").read_text():
            self.skipTest("needs the command and Debian 12")
        places = found(command)
        if any("asan" in name or "tsan" in name for name in places):
            self.skipTest("a sanitizer's command links more")
        (library,) = (place for name, place in places.items() if name.startswith("liblogitless."))
        packages = set()
        for name in (linked(command) | linked(library)) - {Path(library).name}:
            if name not in places:  # the loader itself
                continue
            packages.add(package_of(places[name]))
        last = [argument for keyword, argument in instructions() if keyword == "RUN" and "apt-get install" in argument][-1]
        named = set(re.search(r"apt-get install (.*?) &&", last)[1].split()) - {"-y", "--no-install-recommends"}
        self.assertEqual(named, packages - IN_EVERY_IMAGE)


if __name__ == "__main__":
    unittest.main()
