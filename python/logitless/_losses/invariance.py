"""Heads whose results of a token have the same bits whatever the other tokens of the call: ``batch_invariant``."""

from __future__ import annotations

from typing import NamedTuple

from .. import _library as c
from .options import Framework

# cuBLAS, in the other kernels of a GPU, chooses the order of its sums by the number of tokens.
_GPU_KERNELS = ("hopper", "hopper_f16", "sm80", "sm86")
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

# Reasons why a framework's own operations compute a call that the library has kernels for.
DIVIDED_LOGITS = "they divide logits by a temperature for each token, with a bias or softcap, or in 16 bits beyond a CPU's kernels"
QUANTIZED = "they may multiply by a quantised weight, block by block"


class Computation(NamedTuple):
    """The computation of a call's head."""

    own: str = ""  # the reason why the framework's own operations may be part of it; "": kernels alone
    gpu_kernel: str = ""  # its kernel on a GPU; "" on a CPU
    sharded: str = ""  # the reason why the bits over a sharded vocabulary may depend on the batch; "": they do not


def gpu_kernel(dim: int, vocab: int, dtype: str, capability: int) -> str:
    """Returns the name of the kernel of a head on a GPU of compute capability ``capability`` (10 major + minor), for any
    number of tokens. dtype: of the products, by the framework's name."""
    return c.head_kernel(256, dim, vocab, _DTYPES[dtype], device="cuda", compute_capability=capability)


def check(framework: Framework, found: Computation) -> None:
    """Raises NotImplementedError for a computation whose bits may depend on the batch."""
    if found.own:
        raise NotImplementedError(
            f"batch_invariant: expected the library's kernels, got {framework.name}'s own operations: {found.own}"
        )
    if found.gpu_kernel and found.gpu_kernel not in _GPU_KERNELS:
        raise NotImplementedError(
            f"batch_invariant: expected a kernel among {', '.join(_GPU_KERNELS)}, got {found.gpu_kernel}, whose sums "
            "depend on the number of tokens; 16-bit hidden states and weight take one from compute capability 8.0 on"
        )
    if found.sharded:
        raise NotImplementedError(f"batch_invariant: expected a whole vocabulary, got a sharded one, {found.sharded}")
