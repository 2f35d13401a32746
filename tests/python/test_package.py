"""The package without a framework: the contents of the wheel, and its description of the library."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import logitless
import pytest
from logitless import _library as c
from logitless._cache import ThreadCache


def test_the_wheel_has_the_library_and_types():
    folder = Path(logitless.__file__).parent
    assert logitless.library_path() == folder / "lib" / "liblogitless.so" or "LOGITLESS_LIBRARY" in os.environ
    assert (folder / "py.typed").exists()
    assert logitless.__version__ == logitless.version() and logitless.version().count(".") == 2


def test_importing_it_imports_no_framework():
    code = "import logitless, sys; print(sorted({'torch', 'jax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_kernels():
    assert "scalar" in logitless.kernels() and set(logitless.kernels()) <= set(logitless.kernels(runnable=False))


def test_explain():
    text = logitless.explain(4096, 512, 32000, "bf16", memory_budget="64MiB")
    assert "4096 tokens x 32000 vocabulary entries x 512 (bf16)" in text and "not recompute" in text
    assert "what bf16 leaves of the sums of d_weight" in text
    # Gradients of float16 stay in fp32 until the loss scale is multiplied in.
    assert "of the sums of d_weight" not in logitless.explain(4096, 512, 32000, "f16", memory_budget="64MiB")
    assert "forward" in logitless.explain(10, 8, 30, gradients=False)
    with pytest.raises(ValueError, match="dtype: expected one of f32, bf16, f16, got 'f8'"):
        logitless.explain(10, 8, 30, "f8")
    with pytest.raises(ValueError, match="below the least plan"):
        logitless.explain(4096, 512, 32000, memory_budget=1000)


def test_a_plan_in_256_mib_on_every_kernel(monkeypatch):
    """Llama-3-8B's head, and the JAX package's small one, which takes no more with a budget than without."""
    for kernel in logitless.kernels():
        monkeypatch.setenv("LOGITLESS_CPU", kernel)
        monkeypatch.setattr(c, "_contexts", ThreadCache(64))  # their kernel is that of their first use
        for threads in (1, 2, 16):
            for dtype in ("bf16", *(("f16", "f32") if takes_all_dtypes(kernel) else ())):
                large = logitless.explain(8192, 4096, 128256, dtype, threads=threads, memory_budget="256MiB")
                assert workspace_mib(large) <= 256.0, (kernel, large)
            dtype = "f32" if takes_all_dtypes(kernel) else "bf16"
            small = logitless.explain(1024, 64, 8192, dtype, threads=threads, memory_budget="256MiB")
            default = logitless.explain(1024, 64, 8192, dtype, threads=threads)
            assert workspace_mib(small) <= workspace_mib(default) < 32.0, (kernel, small)
    monkeypatch.delenv("LOGITLESS_CPU")
    monkeypatch.setattr(c, "_contexts", ThreadCache(64))
    assert workspace_mib(logitless.explain(8192, 4096, 128256, device="cuda", memory_budget="256MiB")) <= 256.0


def test_contexts_of_many_thread_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(c, "_contexts", ThreadCache(4))
    first = c.context(threads=1)
    for threads in range(2, 8):
        assert c.context(threads=threads) is c.context(threads=threads)
        assert c.context(threads=1) is first and len(c._contexts) <= 4


def takes_all_dtypes(kernel: str) -> bool:
    try:
        logitless.explain(10, 8, 30, "f32", threads=1)
    except NotImplementedError as error:
        assert f"kernel {kernel}: multiplies bf16 alone" in str(error)
        return False
    return True


def workspace_mib(text: str) -> float:
    number, unit = re.search(r"workspace ([0-9.]+) ([KMG]iB)", text).groups()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]


def test_explain_for_a_gpu_that_is_not_here(monkeypatch):
    """Budgets are met, kernels are those of the capability, and a workspace is that of the GPU's own plans."""
    sizes = (8192, 4096, 128256)
    hopper = logitless.explain(*sizes, device="cuda", memory_budget="512MiB")
    assert "kernel hopper" in hopper and hopper == logitless.explain(*sizes, device="cuda", memory_budget="512MiB", compute_capability=90)
    assert "kernel sm80" in logitless.explain(*sizes, device="cuda", compute_capability=80)
    assert "kernel sm86" in logitless.explain(*sizes, device="cuda", compute_capability=89)
    assert "kernel cublas" in logitless.explain(*sizes, "f32", device="cuda")
    assert hopper != logitless.explain(*sizes, memory_budget="512MiB")
    assert hopper == logitless.explain(*sizes, device="cuda", memory_budget="512MiB", card="H200")
    assert logitless.explain(*sizes, device="cuda", card="A100") == logitless.explain(*sizes, device="cuda", compute_capability=80)
    monkeypatch.setenv("LOGITLESS_GPU_KERNELS", "cublas")
    listed = logitless.explain(*sizes, device="cuda")
    assert "kernel cublas" in listed and "hopper: is not in LOGITLESS_GPU_KERNELS=cublas" in listed
    monkeypatch.setenv("LOGITLESS_GPU_KERNELS", "abacus")
    with pytest.raises(ValueError, match="LOGITLESS_GPU_KERNELS: 'abacus' is unknown; expected a comma-separated list of hopper, "):
        logitless.explain(*sizes, device="cuda")
    monkeypatch.delenv("LOGITLESS_GPU_KERNELS")
    for wrong, message in (
        ({"device": "gpu"}, "device: expected cpu or cuda, got 'gpu'"),
        ({"device": "cuda", "threads": 2}, "threads: expected 0 beside device cuda, got 2"),
        ({"device": "cuda", "compute_capability": 9}, "compute_capability: expected 75 to 999, got 9"),
        ({"device": "cuda", "card": "abacus"}, "card: 'abacus' is unknown; expected one of T4, "),
        ({"device": "cuda", "card": "A100", "compute_capability": 90}, "compute_capability: expected 0 or the card's 80, got 90"),
        ({"card": "A100"}, "card: expected none beside device cpu, got 'A100'"),
        ({"device": "cuda", "memory_budget": 1000}, "below the least plan"),
    ):
        with pytest.raises(ValueError, match=message):
            logitless.explain(*sizes, **wrong)


# Libraries that every system has which a manylinux tag admits (PEP 600).
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6",
          "ld-linux-x86-64.so.2"}


@pytest.mark.skipif("LOGITLESS_LIBRARY" in os.environ, reason="another library than the wheel's")
def test_the_wheel_has_inside_what_a_system_may_lack():
    wheel = importlib.metadata.distribution("logitless")
    tag = re.search(r"^Tag: (.*)$", wheel.read_text("WHEEL"), re.MULTILINE).group(1)
    assert re.fullmatch(r"py3-none-manylinux_2_\d+_x86_64", tag)
    libraries = [wheel.locate_file(file) for file in wheel.files if ".so" in file.name]
    assert libraries
    for library in libraries:
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        assert needed <= SYSTEM | {other.name for other in libraries}, library
