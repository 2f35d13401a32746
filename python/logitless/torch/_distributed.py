"""DTensor in, local tensors out."""

from __future__ import annotations

import sys

from torch import Tensor


def _is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who has not imported it
    return module is not None and isinstance(t, module.DTensor)


def local(hidden, weight, target, bias) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights (and a bias) that are sharded are gathered, their gradients scattered back; hidden and target that are
    the same everywhere are taken as they are. Other placements are refused by name."""
    if not any(_is_dtensor(t) for t in (hidden, weight, target, bias)):
        return hidden, weight, target, bias
    from torch.distributed.tensor import Partial, Replicate

    def replicated(name, t):
        if not _is_dtensor(t):
            return t
        if any(not isinstance(p, Replicate) for p in t.placements):
            raise NotImplementedError(f"{name}: expected a DTensor placed Replicate, got {t.placements}")
        return t.to_local()

    def gathered(t):
        if not _is_dtensor(t):
            return t
        # Each rank may hold other tokens: its gradient is a part of the sum, unless hidden is the same everywhere.
        part = Replicate() if _is_dtensor(hidden) else Partial()
        return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim).to_local(
            grad_placements=[part] * t.device_mesh.ndim
        )

    return replicated("hidden", hidden), gathered(weight), replicated("target", target), gathered(bias)
