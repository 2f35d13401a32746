"""The pure wheel (LOGITLESS_PURE=1): its contents, and what runs from it without the library."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys, scikit_build_core.build as build; print(build.get_requires_for_build_wheel(), build.build_wheel(sys.argv[1]))"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("LOGITLESS_", "PYTHON"))}


def run(*command, **environment):
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**ENVIRONMENT, **environment}, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    built = run("-c", BUILD, folder, LOGITLESS_PURE="1")
    assert built.returncode == 0, built.stderr
    assert built.stdout.splitlines()[-1].startswith("[] ")  # no headers of jaxlib
    (found,) = folder.iterdir()
    assert found.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(found)


def test_it_holds_the_package_and_nothing_else(wheel):
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = ROOT / "python"
    assert held == {p.relative_to(package).as_posix() for s in ("py", "pyi", "typed") for p in package.rglob(f"*.{s}")}
    (tags,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in tags and "Tag: py3-none-any" in tags


CALLS = """
import sys, runpy; sys.path.insert(0, sys.argv[1])
runpy.run_module("logitless", run_name="__main__")
import logitless, torch
from torch.autograd import grad
from logitless.torch import autochunk, backend, linear_cross_entropy, linear_sample, losses
assert logitless.__file__.startswith(sys.argv[1]) and logitless.__version__ == logitless.build_info().version
torch.manual_seed(0)
hidden, weight = torch.randn(64, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
target = torch.randint(0, 500, (64,))
found = linear_cross_entropy(hidden, weight, target)
wanted = torch.nn.functional.cross_entropy(hidden @ weight.t(), target)
assert abs(found - wanted) <= 1e-5 * wanted, (found, wanted)
for ours, theirs in zip(grad(found, (hidden, weight)), grad(wanted, (hidden, weight))):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
loss = losses.forward_kl_loss(hidden, weight, hidden.detach(), 2 * weight.detach())
z = hidden @ weight.t()
wanted = torch.nn.functional.kl_div(z.log_softmax(-1), (2 * z).softmax(-1).detach(), reduction="batchmean")
assert abs(loss - wanted) <= 1e-5 * wanted, (loss, wanted)
for ours, theirs in zip(grad(loss, (hidden, weight)), grad(wanted, (hidden, weight))):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
assert linear_sample(hidden, weight, temperature=0).tokens.equal(z.argmax(-1))
assert linear_sample(hidden, weight, top_k=9, seed=1).tokens.shape == (64,)
assert backend(hidden).name == "portable"
for call, named in ((lambda: logitless.explain(4, 8, 16), "explain"), (logitless.kernels, "logitless_kernel_count"),
                    (lambda: logitless.Program("x"), "logitless_program_compile"),
                    (lambda: autochunk(lambda x: x.exp().sum())(hidden), "autochunk")):
    try:
        call()
    except ImportError as error:
        assert str(error).startswith(f"{named}: needs the native library. logitless: this package is pure Python"), error
    else:
        raise AssertionError(f"{named} ran")
"""


def test_it_runs_without_the_library_and_names_what_needs_it(wheel, tmp_path):
    pytest.importorskip("torch")
    wheel.extractall(tmp_path)
    done = run("-I", "-c", CALLS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not load: logitless: this package is pure Python" in done.stdout
    assert "torch on cpu      portable: the library does not load" in done.stdout
