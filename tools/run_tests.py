#!/usr/bin/env python3
"""Runs the tests of a build tree and ends with the line "N passed, N failed" (", N skipped" if any).

The exit status is 0 only when at least one test passed and none failed. A test that could not be started counts
as failed; a run of both fast and slow also fails tests that carry no known label, since no run would pick them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

KNOWN_LABELS = {"fast", "slow", "cuda"}


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, default=Path("build"))
    parser.add_argument("--labels", default="fast,slow", help="comma-separated; a test runs if it has one of them")
    parser.add_argument("--filter", default="", help="regular expression on the names of tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one test")
    parser.add_argument("--totals", type=Path,
                        help="file that a line 'passed failed skipped', then the names of failed tests, is added to")
    return parser.parse_args(argv)


def ctest_of(build_dir):
    """Returns the ctest that belongs to the cmake that configured the tree."""
    cache = build_dir / "CMakeCache.txt"
    if not cache.exists():
        sys.exit(f"run_tests.py: {build_dir} is not a configured build tree (no CMakeCache.txt)")
    found = re.search(r"^CMAKE_CTEST_COMMAND:INTERNAL=(.+)$", cache.read_text(), re.MULTILINE)
    return found.group(1) if found else "ctest"


def count(junit):
    """Returns (passed, failed names, skipped) of one JUnit file written by ctest."""
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        status = case.get("status")
        reason = case.find("skipped")
        if status == "run":
            passed += 1
        elif status == "disabled":
            skipped += 1
        elif status == "notrun" and reason is not None and reason.get("message", "").startswith("SKIP_"):
            skipped += 1
        else:
            failed.append(case.get("name"))
    return passed, failed, skipped


def unlabelled(ctest, build_dir, environment):
    """Returns names of tests that no label selects."""
    listing = subprocess.run([ctest, "--test-dir", str(build_dir), "--show-only=json-v1"], env=environment,
                             stdout=subprocess.PIPE, check=True).stdout
    names = []
    for test in json.loads(listing)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        if not KNOWN_LABELS & set(properties.get("LABELS", [])):
            names.append(test["name"])
    return names


def summary(passed, failed, skipped):
    return f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")


def main(argv):
    arguments = parse_arguments(argv)
    ctest = ctest_of(arguments.build_dir)
    # An impossible allocation must fail as it does for users, not end the program.
    environment = {"ASAN_OPTIONS": "allocator_may_return_null=1", "TSAN_OPTIONS": "allocator_may_return_null=1",
                   **os.environ}

    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        command = [ctest, "--test-dir", str(arguments.build_dir), "--output-on-failure", "--output-junit", str(junit),
                   "--timeout", str(arguments.timeout), "--parallel", str(arguments.jobs),
                   "--label-regex", "^(" + arguments.labels.replace(",", "|") + ")$"]
        if arguments.filter:
            command += ["--tests-regex", arguments.filter]
        status = subprocess.run(command, env=environment).returncode
        passed, failed, skipped = count(junit) if junit.exists() else (0, [], 0)
    sys.stdout.flush()

    problems = []
    if status != 0 and not failed:
        failed.append("ctest")
        problems.append(f"ctest itself failed with status {status}")
    complete = {"fast", "slow"} <= set(arguments.labels.split(","))
    if complete and passed + len(failed) + skipped > 0:
        lost = unlabelled(ctest, arguments.build_dir, environment)
    else:
        lost = []
    for name in lost:
        failed.append(name)
        problems.append(f"{name}: has none of the labels {', '.join(sorted(KNOWN_LABELS))}, so it never runs")
    if passed == 0 and not failed:
        problems.append(f"no test ran (labels {arguments.labels})")

    print()
    for name in failed:
        print(f"FAILED {name}")
    for problem in problems:
        print(f"run_tests.py: {problem}")
    if arguments.totals:
        with arguments.totals.open("a") as file:
            file.write(" ".join(map(str, [passed, len(failed), skipped, *failed])) + "\n")
    print(summary(passed, len(failed), skipped))
    return 0 if passed > 0 and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
