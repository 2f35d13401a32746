"""Products of 16-bit matrices with results in fp32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def has_wide_products(device: str, dtype: torch.dtype) -> bool:
    """Returns whether a device multiplies 16-bit matrices with a result in fp32."""
    try:
        one = torch.ones((16, 16), dtype=dtype, device=device)
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError, TypeError):
        return False


@functools.cache
def has_wide_sums(device: str, dtype: torch.dtype) -> bool:
    """Returns whether a device adds such a product to a matrix in fp32, in place."""
    try:
        one, total = torch.ones((16, 16), dtype=dtype, device=device), torch.ones((16, 16), device=device)
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
        return True
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of 16-bit matrices in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def add_wide_product(total: Tensor, a: Tensor, b: Tensor, block: int) -> None:
    """Adds the product of 16-bit matrices to one in fp32. block: rows of it that may exist at a time, where the device does
    not add in place."""
    if has_wide_sums(a.device.type, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    for first in range(0, a.shape[0], block):
        total[first : first + block] += wide_product(a[first : first + block], b)
