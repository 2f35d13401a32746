"""Traces F.one_hot as a scatter with checked classes. PyTorch's own, traced without values, becomes a comparison."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class OneHot(TorchFunctionMode):
    """Replaces F.one_hot with a known number of classes by a scatter."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = _one_hot(*args, **(kwargs or {})) if func is torch.nn.functional.one_hot else None
        return func(*args, **(kwargs or {})) if made is None else made


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or num_classes <= 0:
        return None
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)
