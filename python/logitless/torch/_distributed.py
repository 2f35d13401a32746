"""DTensor in, local tensors out."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def _is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who has not imported it
    return module is not None and isinstance(t, module.DTensor)


class _Share(torch.autograd.Function):
    """The tensor itself; of its gradient one part in ``ranks``."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.ranks, None


def local(hidden, weight, target, bias) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights (and a bias) that are sharded are gathered, their gradients scattered back; hidden and target that are
    the same everywhere are taken as they are. Other placements are refused by name.

    A weight's gradient is the mean over the ranks of its mesh of what each rank's loss gives, as FSDP has it: where a
    plain hidden holds other tokens on each rank that is data parallelism; where it is the same on all of them (tensor
    parallelism) the mean is what each of them has."""
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
        mesh = t.device_mesh
        same = _is_dtensor(hidden)
        whole = t.redistribute(placements=[Replicate()] * mesh.ndim).to_local(
            grad_placements=[Replicate() if same else Partial()] * mesh.ndim
        )
        return whole if same or not whole.requires_grad else _Share.apply(whole, mesh.size())

    return replicated("hidden", hidden), gathered(weight), replicated("target", target), gathered(bias)
