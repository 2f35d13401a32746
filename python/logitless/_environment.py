"""The environment variables that logitless reads: the one table, which build_info() and docs/reference/support.md show."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    name: str
    meaning: str
    unset: str  # what an unset variable means


VARIABLES = (
    Variable("LOGITLESS_LIBRARY", "path of the liblogitless that the Python package loads", "the package's own"),
    Variable("LOGITLESS_BACKEND", "native: the library's kernels or an error; portable: the framework's own operations", "native where the library can serve"),
    Variable(
        "LOGITLESS_FUSED_PASSES", "never, always: torch.compile fuses the portable implementation's passes over logits",
        "for large heads where Inductor serves a GPU",
    ),
    Variable("LOGITLESS_CPU", "name of the CPU kernel, also the instruction set of compiled programs", "the best that runs here"),
    Variable("LOGITLESS_GPU_KERNELS", "names of GPU kernels to consider, comma-separated, in order of preference", "all"),
    Variable("LOGITLESS_CACHE", "folder of kernels that NVRTC compiled, and of rates of GPUs; empty: none is stored", "~/.cache/logitless/cubin, or the same in XDG_CACHE_HOME"),
    Variable("LOGITLESS_CALIBRATION", "on, off: plans use the GPU's rates that `logitless calibrate` stored", "on"),
    Variable("LOGITLESS_JOB", "name of a run of `logitless train` on several ranks, equal on all of them", "the launcher's name of the run"),
)
