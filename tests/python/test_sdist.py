"""The source distribution (tools/sdist.sh): its contents, and a wheel's build that is configured from it alone."""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r"project\(logitless VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
BUILDS = {".o", ".so", ".a", ".ninja", ".whl", ".gz", ".pyc", ".cubin"}


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copies the files of the checkout that git knows, and adds build outputs; the checkout may have more."""
    copy = tmp_path_factory.mktemp("copy")
    for entry in ROOT.iterdir():
        if entry.name == ".git" or entry.name.startswith("build"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(entry, copy)
    for stray in ("build/src/liblogitless.so", "build-wheel/CMakeCache.txt", "python/logitless/__pycache__/a.pyc"):
        (copy / stray).parent.mkdir(parents=True, exist_ok=True)
        (copy / stray).write_text("of a build")
    (copy / "PKG-INFO").unlink(missing_ok=True)  # the checkout may be such an archive itself
    if shutil.which("git"):
        run("git", "init", "--quiet", copy)
        run("git", "-C", copy, "add", "--all")
    return copy


@pytest.fixture(scope="module")
def unpacked(checkout, tmp_path_factory):
    """Returns the folder that its archive unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    run(checkout / "tools/sdist.sh", folder, sys.executable)
    assert [path.name for path in folder.iterdir()] == [f"logitless-{VERSION}.tar.gz"]
    with tarfile.open(folder / f"logitless-{VERSION}.tar.gz") as archive:
        names = archive.getnames()
        assert all(name.startswith(f"logitless-{VERSION}/") and ".." not in name for name in names)
        archive.extractall(folder)
    return folder / f"logitless-{VERSION}"


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_holds_the_tree_and_nothing_of_a_build(unpacked):
    held = files(unpacked)
    for folder in ("cmake", "include", "src", "apps", "python", "tests", "examples", "bench", "tools", "docs"):
        # Caches of tools (__pycache__, .hypothesis, .pytest_cache) are excluded.
        wanted = {f"{folder}/{name}" for name in files(ROOT / folder) if not re.search(r"(^|/)(__pycache__|\.)", name)}
        assert wanted and wanted <= held, sorted(wanted - held)
    single = {"CMakeLists.txt", "pyproject.toml", "README.md", "PKG-INFO", "Makefile", "packaging/Containerfile"}
    assert single <= held
    strange = [n for n in held if n.startswith("build") or "__pycache__" in n or Path(n).suffix in BUILDS]
    assert not strange


def test_its_version_is_that_of_cmake(unpacked):
    assert f"\nVersion: {VERSION}\n" in (unpacked / "PKG-INFO").read_text()
    numbers = re.findall(r"LOGITLESS_VERSION_\w+ (\d+)", (unpacked / "include/logitless/version.h").read_text())
    assert VERSION == ".".join(numbers[:3])


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_a_file_that_git_does_not_know_is_refused(checkout, unpacked, tmp_path):
    stray = checkout / "src" / "scratch.cpp"
    stray.write_text("of somebody's")
    command = [checkout / "tools/sdist.sh", tmp_path / "made", sys.executable]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    stray.unlink()
    assert made.returncode == 1 and not (tmp_path / "made").exists()
    assert "git does not know (add, ignore or remove it): src/scratch.cpp" in made.stderr


def test_a_wheels_build_is_configured_from_it(unpacked, tmp_path):
    settings = tomllib.loads((unpacked / "pyproject.toml").read_text())["tool"]["scikit-build"]
    defines = [f"-D{name}={value}" for name, value in settings["cmake"]["define"].items()]
    run("cmake", "-S", unpacked, "-B", tmp_path, "-G", "Ninja", "-DLOGITLESS_CUDA=OFF", "-DLOGITLESS_XLA=OFF", *defines)
    # Every file that is to be compiled is there, and one is compiled.
    listed = run("ninja", "-C", tmp_path, "-n", "-v", "logitless")
    sources = set(re.findall(r" -c (\S+)", listed))
    assert len(sources) > 100
    assert all(Path(source).is_file() and Path(source).is_relative_to(unpacked) for source in sources)
    (version,) = (source for source in sources if source.endswith("src/core/version.cpp"))
    run("ninja", "-C", tmp_path, f"{version}^")


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_a_release_has_checksums_and_the_newest_entry_of_the_changelog(checkout, tmp_path):
    (tmp_path / "logitless-0.0.9.tar.gz").write_text("of the last release")
    run(checkout / "tools/release.sh", tmp_path, sys.executable, "sdist", "pure")
    archives = {f"logitless-{VERSION}.tar.gz", f"logitless-{VERSION}-py3-none-any.whl"}
    assert {path.name for path in tmp_path.iterdir()} == {*archives, "NOTES.md", "SHA256SUMS"}
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert sums == {n: hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in (*archives, "NOTES.md")}
    notes = (tmp_path / "NOTES.md").read_text()
    entry = re.split(r"^## \[.*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert notes.startswith(f"# logitless {VERSION}\n") and entry.strip() in notes
    assert all(re.search(rf"^\| `{name}` \| \d+\.\d \| \w", notes, re.MULTILINE) for name in archives)


def test_the_hosted_workflow_runs_what_there_is():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {".ci/run", "make release", "make docs"} <= set(commands)
    targets = re.findall(r"^([a-z0-9-]+): ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands if command.startswith("make ")} <= set(targets)
