"""The arguments of a chunked function's call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from logitless._autochunk.options import Unsupported
from logitless.torch._autochunk import native

# Arguments of these types are leaves of a call. Flattening others takes as long as launching several kernels.
_LEAVES = frozenset((*native.PLAIN, bool, int, float, str, type(None), torch.dtype, torch.device))


def leaves_of(args: tuple, kwargs: dict) -> tuple[list, tuple]:
    """Returns the leaves of a call's arguments, in pytree's order, and a key of how they are nested."""
    leaves = [*args, *kwargs.values()]
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, (str(spec),)


def check_tensors(tensors: Sequence[torch.Tensor], traced: bool) -> None:
    for t in tensors:
        if not traced and type(t) not in native.PLAIN:
            raise Unsupported(f"autochunk: a {type(t).__name__} among the arguments; expected plain tensors")
        if t.layout is not torch.strided or t.is_quantized:
            kind = "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
            raise Unsupported(f"autochunk: a {kind} tensor among the arguments; expected dense ones")
        if t.device != tensors[0].device:
            raise ValueError(f"autochunk: expected tensors of one device, got {tensors[0].device} and {t.device}")


def layout_of(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes and strides, as ints where a tracer has symbols."""
    return tuple(map(int, t.shape)), tuple(map(int, t.stride()))


def contiguous_strides(t: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of these sizes."""
    strides, step = [], 1
    for size in reversed(layout_of(t)[0]):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fakes_of(tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]) -> list[torch.Tensor]:
    """Returns fake tensors of these sizes and strides, with the dtype and device of the given ones."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [
            torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device) for shape, strides, t in tensors
        ]
