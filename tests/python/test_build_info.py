"""The report of the build, and its table of environment variables."""

import os
import re
import subprocess
import sys
from pathlib import Path

import logitless
import pytest
from logitless import _build_info, _environment

SOURCE = Path(__file__).resolve().parents[2]
NAME = r"LOGITLESS_[A-Z0-9_]+"


def test_the_table_has_every_variable_that_the_sources_read():
    """A variable is read by its quoted name in C++ and Python."""
    read = set()
    for folder in ("python", "src", "apps", "include"):
        for path in (SOURCE / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and path.name != "_environment.py":
                read |= set(re.findall(rf'"({NAME})"', path.read_text(encoding="utf-8")))
    assert read == {v.name for v in _environment.VARIABLES}
    documents = "".join(p.read_text(encoding="utf-8") for p in (SOURCE / "docs").rglob("*.md"))
    for v in _environment.VARIABLES:
        assert v.name in documents, f"no document has {v.name}"


def test_the_report_says_what_runs_here(monkeypatch):
    monkeypatch.setenv("LOGITLESS_TYPO", "1")
    monkeypatch.setenv("LOGITLESS_GPU_KERNELS", "")
    info = logitless.build_info()
    assert info.version == logitless.version() and info.library == logitless.library_path() and not info.library_problem
    assert [name for name, reason in info.cpu_kernels.items() if not reason] == logitless.kernels()
    assert list(info.cpu_kernels) == logitless.kernels(runnable=False)
    assert info.cpu_kernel in logitless.kernels()
    assert info.backends["torch", "cpu"].name == "native"
    assert info.unknown_variables == ("LOGITLESS_TYPO",)
    if info.cuda_build:
        assert info.gpu_kernels == ("hopper", "hopper_f16", "sm80", "sm86", "cublas")
    text = str(info)
    for expected in (*info.cpu_kernels, *info.cpu_kernels.values(), *info.gpu_kernels, str(info.library), "LOGITLESS_TYPO: not a variable"):
        assert expected in text


def test_gpus_are_shown_with_their_kernels(monkeypatch):
    monkeypatch.delenv("LOGITLESS_GPU_KERNELS", raising=False)
    monkeypatch.setattr(_build_info, "_driver", lambda: ("13.0", [("NVIDIA H200", 90), ("Tesla T4", 75), ("old", 60)]))
    info = logitless.build_info()
    assert info.gpus[0].kernels == {"bf16": "hopper", "f16": "hopper_f16", "f32": "cublas"}
    assert info.gpus[1].kernels["f16"] == "cublas" and "8.0" in info.gpus[1].kernels["bf16"]
    assert "expected 75" in info.gpus[2].kernels["f32"]
    assert "NVIDIA H200, compute capability 9.0: bf16: hopper; f16: hopper_f16; f32: cublas" in str(info)


@pytest.mark.parametrize("environment, expected", [
    ({"LOGITLESS_LIBRARY": "/no.so"}, ["does not load: logitless: cannot load /no.so", "jax on cpu        portable: ", "torch on cpu      portable: "]),
    ({"LOGITLESS_CPU": "abacus"}, ["CPU kernel: LOGITLESS_CPU: 'abacus' is unknown", "LOGITLESS_CPU: 'abacus' ("]),
    ({"LOGITLESS_BACKEND": "portable"}, ["torch on cpu      portable: LOGITLESS_BACKEND=portable"]),
    ({"LOGITLESS_BACKEND": "native", "LOGITLESS_LIBRARY": "/no.so"}, ["jax on cpu        none: the library does not load"]),
    ({"LOGITLESS_BACKEND": "fast"}, ["jax on cpu        none: LOGITLESS_BACKEND: expected native or portable, got 'fast'"]),
])
def test_the_command_prints_and_never_fails(environment, expected):
    """It imports neither PyTorch nor JAX."""
    code = "import sys, runpy; runpy.run_module('logitless', run_name='__main__'); assert not {'torch', 'jax'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    for line in expected:
        assert line in done.stdout


def test_the_page_of_what_is_supported_is_what_its_script_writes():
    environment = {**os.environ, "LOGITLESS_LIBRARY": str(logitless.library_path())}
    done = subprocess.run(
        [sys.executable, SOURCE / "tools/support_matrix.py", "--check"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
