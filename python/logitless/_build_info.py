"""A report of the build: which library, kernels, GPUs and frameworks there are, and which of them serve."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from . import _library as c
from ._environment import VARIABLES

_DTYPES = ("bf16", "f16", "f32")
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows to this process."""

    index: int
    name: str
    compute_capability: int  # 10 * major + minor
    kernels: dict[str, str]  # by the dtype of hidden and weight: the kernel that serves it, or the reason why none does


@dataclass(frozen=True)
class Backend:
    """An implementation that serves a framework on a device. name: "native", "portable" or "none"."""

    name: str
    reason: str


@dataclass(frozen=True)
class BuildInfo:
    """All facts of ``build_info()``; ``str()`` of it is the report that ``python -m logitless`` prints."""

    version: str
    library: Path
    library_from: str
    library_problem: str  # why it cannot be loaded; "" if it can
    abi: int  # the version of the C ABI that this package needs
    cpu_kernel: str  # chosen on this machine; "" without the library
    cpu_kernels: dict[str, str]  # best first: why it does not run here, "" if it does
    gpu_kernels: tuple[str, ...]  # in the build, best first; cublas also takes fp32 as three products of bf16
    cuda_build: Optional[str]  # version of CUDA that compiled the GPU kernels; None: built without
    cuda_driver: Optional[str]  # latest version of CUDA that the driver serves; None: no driver
    gpus: tuple[Gpu, ...]
    xla_handlers: bool
    frameworks: dict[str, Optional[str]]  # versions of installed packages
    backends: dict[tuple[str, str], Backend]  # by framework and device
    environment: dict[str, Optional[str]]  # each variable that logitless reads
    unknown_variables: tuple[str, ...]  # set variables LOGITLESS_* that logitless does not read

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def build_info() -> BuildInfo:
    """Returns the facts of this build and machine: the library, its kernels and which of them run here, GPUs, frameworks
    with the backend that serves each, and environment variables.

    ``print(logitless.build_info())`` and ``python -m logitless`` print them. Never raises: it works without the library
    and without a framework. Imports no framework, and creates no context on a GPU.
    """
    problem = c.why_missing()
    loaded = not problem
    absent = "the library does not load" if problem else ""
    cuda_build = _cuda_build(c.library_path()) if loaded else None
    driver, cards = _driver()
    xla = loaded and _has_xla()
    frameworks = {name: _version_of(name) for name in ("torch", "jax", "jaxlib", "numpy")}
    version = c.version() if loaded else _version_of("logitless") or "unknown"
    kernels = c.kernels(runnable=False) if loaded else []
    gpus = tuple(
        Gpu(i, name, capability, {dtype: absent or _gpu_kernel(capability, dtype) for dtype in _DTYPES})
        for i, (name, capability) in enumerate(cards)
    )
    known = [v.name for v in VARIABLES]
    return BuildInfo(
        version=version,
        library=c.library_path(),
        library_from="LOGITLESS_LIBRARY" if os.environ.get("LOGITLESS_LIBRARY") else "the package",
        library_problem=problem,
        abi=c.ABI_VERSION,
        cpu_kernel=_cpu_kernel() if loaded else "",
        cpu_kernels={name: _cpu_refusal(name) for name in kernels},
        gpu_kernels=_gpu_kernels() if cuda_build else (),
        cuda_build=cuda_build,
        cuda_driver=driver,
        gpus=gpus,
        xla_handlers=xla,
        frameworks=frameworks,
        backends=_backends(absent, cuda_build, gpus, xla),
        environment={name: os.environ.get(name) for name in known},
        unknown_variables=tuple(sorted(n for n in os.environ if n.startswith("LOGITLESS_") and n not in known)),
    )


def _version_of(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- The library.


def _refusal(error: Exception) -> str:
    """Returns the reason of a refused kernel, without its name."""
    return re.sub(r"^kernel: \S+ cannot run here: ", "", str(error))


def _cpu_refusal(kernel: str) -> str:
    options, handle = c.new(c.ContextOptions), ctypes.c_void_p()
    options.kernel = kernel.encode()
    try:
        c.check(c.lib.logitless_context_create(ctypes.byref(options), ctypes.byref(handle)))
    except (ValueError, NotImplementedError, c.LogitlessError) as error:
        return _refusal(error)
    c.lib.logitless_context_destroy(handle)
    return ""


def _cpu_kernel() -> str:
    """Returns the kernel of a plain bf16 head on this CPU, or the reason why there is none."""
    try:
        return c.head_kernel(64, 64, 1024, "bf16")
    except (ValueError, NotImplementedError, c.LogitlessError) as error:
        return str(error)


def _gpu_kernel(capability: int, dtype: str) -> str:
    """Returns the kernel that serves a head of common sizes on a GPU of a compute capability, or the refusal."""
    try:
        return c.head_kernel(4096, 4096, 128256, dtype, device="cuda", compute_capability=capability)
    except (ValueError, NotImplementedError, c.LogitlessError) as error:
        return str(error)


def _gpu_kernels() -> tuple[str, ...]:
    """Returns the names of the GPU kernels, best first. A plan for fp32 at 7.5 names all but the last as refused."""
    try:
        text = c.explain(4096, 4096, 128256, "f32", device="cuda", compute_capability=75)
    except (ValueError, NotImplementedError, c.LogitlessError) as error:
        return (str(error),)
    return (*re.findall(r"not kernel (\S+):", text), *re.findall(r", kernel (\S+)", text)[:1])


def _cuda_build(path: Path) -> Optional[str]:
    """Returns the version of CUDA that compiled the library's GPU kernels, from their own text; None: there are none."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = re.search(rb"Cuda compilation tools, release ([0-9.]+)", text)
            if found is None:  # the text is compressed, or there is none
                return "of an unknown version" if text.find(b".nv_fatbin\0") >= 0 else None
            return found[1].decode()
    except (OSError, ValueError):
        return None


def _has_xla() -> bool:
    return hasattr(ctypes.CDLL(str(c.library_path())), "logitless_xla_program_cpu")


# --- The driver.


def _driver() -> tuple[Optional[str], list[tuple[str, int]]]:
    """Returns the CUDA version of the driver, None without one, and name and compute capability of each visible GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, []
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None, []
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return version, []
    found = []
    for index in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        parts = [ctypes.c_int() for _ in _CAPABILITY]
        failed = [cuda.cuDeviceGet(ctypes.byref(device), index), cuda.cuDeviceGetName(name, len(name), device)]
        failed += [cuda.cuDeviceGetAttribute(ctypes.byref(p), k, device) for p, k in zip(parts, _CAPABILITY)]
        if not any(failed):
            found.append((name.value.decode(), 10 * parts[0].value + parts[1].value))
    return version, found


# --- The choice between the library's kernels and a framework's operations.


def _backends(absent: str, cuda_build: Optional[str], gpus: tuple, xla: bool) -> dict[tuple[str, str], Backend]:
    wanted = os.environ.get("LOGITLESS_BACKEND", "")
    found = {}
    for framework in ("torch", "jax"):
        for device in ("cpu", "cuda"):
            refusal = absent
            if not refusal and framework == "jax" and not xla:
                refusal = "the library was built without XLA's headers"
            if not refusal and device == "cuda":
                refusal = "" if cuda_build and gpus else "no GPU here" if cuda_build else "the library was built without CUDA"
            if wanted not in ("", "native", "portable"):
                found[framework, device] = Backend("none", f"LOGITLESS_BACKEND: expected native or portable, got {wanted!r}")
            elif wanted == "portable":
                found[framework, device] = Backend("portable", "LOGITLESS_BACKEND=portable")
            elif refusal:
                found[framework, device] = Backend("none" if wanted else "portable", refusal)
            else:
                found[framework, device] = Backend("native", f"the library has kernels for {device}")
    return found


# --- The text.


def _lines(info: BuildInfo):
    yield f"logitless {info.version}"
    yield f"library: {info.library} (from {info.library_from}), C ABI {info.abi}"
    if info.library_problem:
        yield f"  does not load: {info.library_problem}"
    if info.cpu_kernels:
        yield f"CPU kernel: {info.cpu_kernel}"
        for name, reason in info.cpu_kernels.items():
            yield f"  {name:<18}{reason or 'runs here'}"
    if info.cuda_build:
        yield f"GPU kernels: {', '.join(info.gpu_kernels)} (built with CUDA {info.cuda_build})"
    elif not info.library_problem:
        yield "GPU kernels: none, built without CUDA"
    yield f"GPUs: {len(info.gpus)}, " + (f"driver for CUDA {info.cuda_driver}" if info.cuda_driver else "no driver")
    for gpu in info.gpus:
        served = "; ".join(f"{dtype}: {kernel}" for dtype, kernel in gpu.kernels.items())
        yield f"  {gpu.index}: {gpu.name}, compute capability {gpu.compute_capability / 10}: {served}"
    if not info.library_problem:
        yield f"XLA handlers: {'built in' if info.xla_handlers else 'not built in'}"
    yield "packages: " + ", ".join(f"{name} {version or 'not installed'}" for name, version in info.frameworks.items())
    yield "backends:"
    for (framework, device), backend in info.backends.items():
        yield f"  {framework + ' on ' + device:<18}{backend.name}: {backend.reason}"
    yield "environment:"
    for variable in VARIABLES:
        value = info.environment[variable.name]
        said = f"not set: {variable.unset}" if value is None else repr(value)
        yield f"  {variable.name}: {said} ({variable.meaning})"
    for name in info.unknown_variables:
        yield f"  {name}: not a variable of logitless"
