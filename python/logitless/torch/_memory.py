"""Memory of tensors that the library accesses by address: checks of its device and its existence.

``check`` is for named arguments; ``address`` is the last check before a pointer leaves Python.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def _bytes_of(t: Tensor) -> int:
    """Returns the bytes from the start of a tensor's storage to the end of its last element; 0 without elements."""
    if t.is_contiguous():
        return (t.storage_offset() + t.numel()) * t.element_size() if t.numel() else 0
    last = t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size()


def _missing(name: str, t: Tensor) -> ValueError:
    return ValueError(
        f"{name}: its memory, {_bytes_of(t)} bytes, is not there: the storage has {t.untyped_storage().nbytes()}, as FSDP "
        "leaves it between uses (resize_(0)); call within the forward of the module that holds it, or under summon_full_params"
    )


def address(name: str, t: Tensor) -> int:
    """Returns the address of a dense tensor's first element. A tensor that is empty or on the meta device gets a dummy
    address, which is never read. Raises ValueError if its memory is missing."""
    found = t.data_ptr()
    if not found or t.storage_offset():  # a view of a freed storage has an address
        if t.is_meta:
            return 64
        if t.untyped_storage().nbytes() < _bytes_of(t):
            raise _missing(name, t)
        if not found and t.numel():
            raise ValueError(f"{name}: expected a tensor with memory of its own, got one without (a tracer's, or zeros of autograd)")
    return found or 64


def check(name: str, t: Tensor, device: Optional[torch.device] = None, beside: str = "hidden") -> None:
    """Checks that a tensor is dense, has memory, and is on ``device``, that of the argument ``beside`` (None: any
    device).

    Raises TypeError for other layouts and quantised tensors, ValueError otherwise. The message names the argument.
    """
    if t.layout is not torch.strided or t.is_nested or t.is_quantized:
        kind = "quantized" if t.is_quantized else "nested" if t.is_nested else str(t.layout).removeprefix("torch.").strip("_")
        raise TypeError(f"{name}: expected a dense tensor, got a {kind} one")
    if device is not None and t.device != device:
        raise ValueError(f"{name}: expected it on {device}, where {beside} is, got {t.device}")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(t) not in _PLAIN:
        return  # a tracer's tensor or a subclass, without memory to check
    if t.device.type not in ("cpu", "cuda"):
        return  # the library does not access it by address
    if t.numel() == 0 and hasattr(t, "ds_shape"):
        raise ValueError(
            f"{name}: is empty, its {list(t.ds_shape)} being partitioned by DeepSpeed's ZeRO-3; call under "
            f"deepspeed.zero.GatheredParameters({name}), or in the forward of the module that holds it"
        )
    if t.untyped_storage().nbytes() < _bytes_of(t):
        raise _missing(name, t)


def check_number(name: str, t: Tensor, device: torch.device, beside: str = "hidden") -> None:
    """Checks a tensor with a single number, which may also be on the CPU."""
    check(name, t, None if t.device.type == "cpu" else device, beside)
