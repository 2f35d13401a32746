"""The choice between the library's kernels and PyTorch's own operations."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import _library as c
from . import _portable_fused

_LEAST_CAPABILITY = {torch.bfloat16: (8, 0)}  # of other dtypes: 7.5


class Backend(NamedTuple):
    """An implementation of the head, and the reason for it."""

    name: str  # "native": kernels of the library; "portable": PyTorch's own operations
    reason: str


def backend(tensor: Tensor) -> Backend:
    """Returns the implementation that serves a head whose hidden state is this tensor, and why.

    The library's kernels serve float32, bfloat16 and float16 on CPUs and on NVIDIA GPUs of compute capability 7.5 or
    more (bfloat16: 8.0), where the library loads. PyTorch's own operations serve all others: float64, MPS, XPU, ROCm,
    NPU, XLA, older GPUs. The environment's ``LOGITLESS_BACKEND=portable`` takes the latter everywhere; it is read at each call.
    ``LOGITLESS_BACKEND=native`` raises the library's error where it does not load; it does not change devices and
    dtypes without kernels.

    Raises ValueError for another value of ``LOGITLESS_BACKEND``.
    """
    device = tensor.device
    reason = why_portable(device.type, device.index, tensor.dtype)
    if reason and not _portable_fused.why_not(device):
        reason += "; torch.compile fuses its passes over the logits of large heads"
    return Backend("portable", reason) if reason else Backend("native", f"the library has kernels for {device.type}")


# A traced call takes the result as a constant.
@torch.compiler.assume_constant_result
def why_portable(kind: str, index: Optional[int], dtype: torch.dtype) -> str:
    """Returns the reason why PyTorch's own operations serve tensors of a device and dtype; empty if the library's
    kernels do."""
    wanted = os.environ.get("LOGITLESS_BACKEND", "")
    if wanted not in ("", "native", "portable"):
        raise ValueError(f"LOGITLESS_BACKEND: expected native or portable, got {wanted!r}")
    if wanted == "portable":
        return "LOGITLESS_BACKEND=portable"
    if dtype == torch.float64:
        return "the library has no kernels for float64"
    return _device_refusal(kind, index, dtype) or ("" if wanted else _library_refusal(kind, index))


@functools.cache
def _device_refusal(kind: str, index: Optional[int], dtype: torch.dtype) -> str:
    """Returns the reason why no kernels of the library are for a device and dtype; empty if some are."""
    device = torch.device(kind, index)
    if device.type not in ("cpu", "cuda"):
        return f"the library has kernels for cpu and cuda, the device is {device.type}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "the library has kernels for NVIDIA's GPUs, the device is one of ROCm"
    if device.type == "cuda":
        (major, minor), name = _LEAST_CAPABILITY.get(dtype, (7, 5)), str(dtype).removeprefix("torch.")
        if torch.cuda.get_device_capability(device) < (major, minor):
            return f"the library has kernels of {name} for compute capability {major}.{minor} or more, {device} has less"
    return ""


@functools.cache
def _library_refusal(kind: str, index: Optional[int]) -> str:
    """Returns the reason why the library cannot run on a device; empty if it can."""
    missing = c.why_missing()
    if missing or kind == "cpu":
        return missing
    try:
        index = torch.cuda.current_device() if index is None else index
        c.context(c.DEVICE_CUDA, index, torch.cuda.current_stream(index).cuda_stream)
    except (NotImplementedError, c.LogitlessError) as error:  # a build without CUDA
        return str(error)
    return ""


def is_native(tensor: Tensor) -> bool:
    """Returns whether the library's kernels serve a tensor."""
    device = tensor.device
    return not why_portable(device.type, device.index, tensor.dtype)
