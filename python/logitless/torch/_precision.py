"""Precision of the products of float32 tensors on a GPU: that of the call, or PyTorch's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor

from .._library import PRECISIONS

_LEAST_CAPABILITY = (8, 0)  # of TF32
# Read and write the setting of PyTorch 2.9 and later, which torch.backends.fp32_precision may stand behind.
_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
_setter = getattr(torch._C, "_set_fp32_precision_setter", None)


def autocast_dtype(kind: str) -> Optional[torch.dtype]:
    """Returns the dtype of autocast on a device type; None if it is off, or the device has none."""
    if kind not in ("cpu", "cuda") and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextlib.contextmanager
def products_in(device: torch.device, precision: str) -> Iterator[None]:
    """Sets PyTorch's precision of fp32 products on a GPU, "ieee" or "tf32", which all threads see."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32 if _getter is None else _getter("cuda", "matmul")

    def write(value: Any) -> None:
        if _getter is None:
            matmul.allow_tf32 = value
        else:
            _setter("cuda", "matmul", value)

    if (before in (True, "tf32")) == (precision == "tf32"):
        yield
        return
    write(precision == "tf32" if _getter is None else precision)
    try:
        yield
    finally:
        write(before)


# A traced call takes the result as a constant. PyTorch traces again when the setting changes, as for its own products.
@torch.compiler.assume_constant_result
def torch_has_tf32(device: int) -> bool:
    """Returns whether PyTorch multiplies float32 matrices on this GPU in TF32 (torch.backends.cuda.matmul)."""
    if _getter is not None:
        wanted = _getter("cuda", "matmul") == "tf32"
    else:
        wanted = torch.backends.cuda.matmul.allow_tf32
    return wanted and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def follows_torch(hidden: Tensor, compute: Optional[torch.dtype] = None) -> bool:
    """Returns whether products of a call are in TF32 by PyTorch's setting. compute: the dtype of autocast, or None."""
    if hidden.device.type != "cuda" or (compute or hidden.dtype) != torch.float32:
        return False
    return torch_has_tf32(torch.cuda.current_device() if hidden.device.index is None else hidden.device.index)


def precision_of(given: Any, hidden: Any, weight: Any) -> str:
    """Returns the precision of a call: the given one, or PyTorch's for None. hidden and weight: tensors, or
    None for a module that has none yet."""
    if given is not None and (not isinstance(given, str) or given not in PRECISIONS):
        raise ValueError(f"precision: expected {', '.join(map(repr, PRECISIONS))} or None, got {given!r}")
    if not isinstance(hidden, Tensor):
        return given or "ieee"
    if given not in (None, "ieee") and hidden.dtype == torch.float64:
        raise ValueError(f"precision: {given!r} rounds float32 tensors, hidden is float64")
    if given is not None:
        return given
    kind = hidden.device.type
    compute = None
    if kind == "cuda" and torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    elif isinstance(weight, Tensor):
        compute = torch.float32 if hidden.dtype == torch.float32 else weight.dtype
    return "tf32" if follows_torch(hidden, compute) else "ieee"
