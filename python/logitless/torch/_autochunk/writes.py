"""Traces writes into parts of a tensor, such as ``logits[:, ids] = -inf``, as new values of the whole tensor."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

_OPERATORS = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ipow__": "pow"}
# Methods that write in place whose functional form has another name or arguments. Random numbers are left alone.
_VALUES = {
    "zero_": lambda x: torch.zeros_like(x),
    "fill_": lambda x, value: torch.full_like(x, value) if not isinstance(value, torch.Tensor) else value,
    "copy_": lambda x, source, non_blocking=False: source,
}
# Methods that write in place and whose functional form has their name and arguments. Those that change the view itself
# (``t_``, ``squeeze_``, ``requires_grad_``) and random numbers are not.
_METHODS = """
    abs acos acosh add addcdiv addcmul arctan asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min clip copysign cos cosh cumprod cumsum digamma div divide eq erf erfc erfinv exp exp2 expm1 floor
    floor_divide fmod frac ge gt hypot index_add index_copy index_fill index_put ldexp le lerp lgamma log log10 log1p log2
    logical_and logical_not logical_or logical_xor logit lt masked_fill masked_scatter mul multiply nan_to_num ne neg negative
    pow reciprocal relu remainder round rsqrt scatter scatter_add scatter_reduce sigmoid sign sin sinh sqrt square sub subtract
    tan tanh tril triu true_divide trunc xlogy
"""
_FUNCTIONAL = {f"{name}_": name for name in _METHODS.split()} | _OPERATORS


class Writes(TorchFunctionMode):
    """Replaces a write into a part of a tensor by a write of the whole tensor. Views of it that are read later are
    taken again."""

    def __init__(self):
        super().__init__()
        self._written: list[torch.Tensor] = []
        # Diagonals of examples of torch.func.vmap, which know no base: the view, its base and the arguments.
        self._diagonals: list[tuple[torch.Tensor, torch.Tensor, tuple]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._written and name != "__get__":  # of an attribute
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._renewed, (args, kwargs))
        target = args[0] if args else None
        if isinstance(target, torch.Tensor):
            if name == "diagonal" and not kwargs and torch._C._functorch.is_batchedtensor(target):
                self._diagonals.append((func(*args), target, args[1:]))
                return self._diagonals[-1][0]
            if name == "__setitem__":
                return None if self._set_item(*args) else func(*args, **kwargs)
            if name == "fill_diagonal_" and self._fill_diagonal(*args, **kwargs):
                return target
            if (name in _FUNCTIONAL or name in _VALUES) and "out" not in kwargs:
                for view, base, where in self._diagonals:
                    if view is target:
                        return self._write_diagonal(base, where, _values(name, view, args[1:], kwargs))
                made = self._write(name, target, args[1:], kwargs) if target._is_view() else None
                if made is not None:
                    return made
        return func(*args, **kwargs)

    def _renewed(self, x: torch.Tensor) -> torch.Tensor:
        if not x._is_view() or not any(x._base is t for t in self._written):
            return x
        place = place_of(x._base, x)
        return x if place is None else place.get(x._base)

    def _replace(self, base: torch.Tensor, values: torch.Tensor) -> None:
        base.copy_(values)
        if not any(base is t for t in self._written):
            self._written.append(base)

    def _set_item(self, x: torch.Tensor, index, value) -> bool:
        """Returns whether x[index] = value was done: not where it writes the whole tensor, by indices."""
        index = _normalized(index, x.device)
        if index is None:
            return False
        basic, tensors = [], []
        for i in index:
            if not isinstance(i, torch.Tensor) or (i.dim() == 0 and i.dtype != torch.bool):
                basic.append(i)
                continue
            basic += [slice(None)] * (i.dim() if i.dtype == torch.bool else 1)
            tensors.append(i)
        if any(isinstance(i, torch.Tensor) for i in basic) or (tensors and any(i is None for i in basic)):
            return False
        base, part = (x._base if x._is_view() else x), x[tuple(basic)]
        if part.shape == base.shape and not x._is_view() and tensors:
            return False
        if part.numel() == 0:
            return True
        place = place_of(base, part)
        if place is None:
            return False
        if not isinstance(value, torch.Tensor):  # a number of the program, and no constant tensor
            value = torch.full((), value, dtype=x.dtype, device=x.device)
        if not tensors:
            while value.dim() > part.dim() and value.shape[0] == 1:
                value = value[0]
            self._replace(base, place.put(base, value))
            return True
        if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
            return False
        # Integers have removed dimensions, so indices move to the front of what is left.
        indices: list[torch.Tensor | None] = []
        for i in index:
            if isinstance(i, torch.Tensor) and (i.dim() > 0 or i.dtype == torch.bool):
                indices.append(i)
            elif isinstance(i, slice):
                indices.append(None)
        self._replace(base, place.put(base, torch.ops.aten.index_put(part, indices, value.to(x.device, x.dtype))))
        return True

    def _fill_diagonal(self, x: torch.Tensor, fill_value: float, wrap: bool = False) -> bool:
        return x.dim() == 2 and not wrap and self._write("fill_", x.diagonal(), (fill_value,), {}) is not None

    def _write(self, name: str, view: torch.Tensor, args: Sequence, kwargs: dict) -> torch.Tensor | None:
        """Writes into a view and returns a new one, or None if it has no form here."""
        base = view._base
        place = place_of(base, view)
        if view.numel() == 0 or place is None:
            return view if view.numel() == 0 else None
        self._replace(base, place.put(base, _values(name, view, args, kwargs)))
        return place.get(base)

    def _write_diagonal(self, base: torch.Tensor, where: Sequence, values: torch.Tensor) -> torch.Tensor:
        """Writes into a diagonal of an example of vmap and returns a new view of it."""
        part = base.diagonal(*where)
        base.copy_(torch.diagonal_scatter(base, values.to(base.dtype).expand(part.shape), *where))
        self._diagonals.append((base.diagonal(*where), base, where))
        return self._diagonals[-1][0]


def _values(name: str, x: torch.Tensor, args: Sequence, kwargs: dict) -> torch.Tensor:
    """Returns what a method that writes in place would make of x."""
    if name in _VALUES:
        return _VALUES[name](x, *args, **kwargs)
    return getattr(torch.Tensor, _FUNCTIONAL[name])(x, *args, **kwargs)


@dataclass(frozen=True)
class Place:
    """A view's place in its base tensor: a slice along each dimension, then a permutation and a reshape."""

    slices: tuple[tuple[int, int, int, int], ...]  # (dimension, begin, end, step), those that are not whole
    sizes: tuple[int, ...]  # of the slices
    order: tuple[int, ...]  # dimensions of the tensor in the order of the view's
    shape: tuple[int, ...]  # the view's

    def get(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the view of x."""
        for dim, begin, end, step in self.slices:
            x = torch.ops.aten.slice(x, dim, begin, end, step)
        return x.permute(self.order).view(self.shape)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns x with these values in the view's elements."""
        inverse = [self.order.index(d) for d in range(len(self.order))]
        values = values.to(x.device, x.dtype).expand(self.shape).reshape([self.sizes[d] for d in self.order]).permute(inverse)
        parts = [x]
        for dim, begin, end, step in self.slices[:-1]:
            parts.append(torch.ops.aten.slice(parts[-1], dim, begin, end, step))
        for part, (dim, begin, end, step) in zip(reversed(parts), reversed(self.slices)):
            values = torch.slice_scatter(part, values, dim, begin, end, step)
        return values


@dataclass(frozen=True)
class Reshaped:
    """The place of a view that has all elements in order."""

    shape: tuple[int, ...]

    def get(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.shape)

    def put(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.to(x.device, x.dtype).expand(self.shape).reshape(x.shape)


def _normalized(index, device: torch.device) -> tuple | None:
    """Returns an index as a tuple whose sequences and arrays are tensors; None where it holds anything else than those,
    integers, slices, None and an ellipsis."""
    found = []
    for i in index if isinstance(index, tuple) else (index,):
        if isinstance(i, (list, tuple, range)) or type(i).__module__ == "numpy" and getattr(i, "ndim", 0):
            i = torch.as_tensor(list(i) if isinstance(i, range) else i, device=device)
        if not isinstance(i, torch.Tensor) and hasattr(i, "__index__") and not isinstance(i, bool):
            i = operator.index(i)
        if isinstance(i, bool) or not (i is None or i is Ellipsis or isinstance(i, (int, slice, torch.Tensor))):
            return None
        found.append(i)
    return tuple(found)


def place_of(base: torch.Tensor, view: torch.Tensor) -> Place | Reshaped | Diagonal | None:
    """Returns the place of a view of the base; None for one that is neither slices nor a part of a diagonal."""
    return slices_of(base, view) or diagonal_of(base, view)


def slices_of(base: torch.Tensor, view: torch.Tensor) -> Place | Reshaped | None:
    """Returns the place of a view of the base that is slices of its dimensions; None of another."""
    if view.dtype != base.dtype or (view.numel() == 0 and base.numel() > 0):
        return None
    if view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous():
        return Reshaped(tuple(view.shape))
    offset = view.storage_offset() - base.storage_offset()
    wide = [d for d in range(base.dim()) if base.shape[d] > 1 and base.stride(d) > 0]
    first = [0] * base.dim()
    for d in sorted(wide, key=base.stride, reverse=True):
        first[d], offset = divmod(offset, base.stride(d))
    if offset != 0 or any(first[d] < 0 or first[d] >= base.shape[d] for d in wide):
        return None
    of_base: dict[int, tuple[int, int]] = {}  # dimension of the base: (dimension of the view, step)
    for v in range(view.dim()):
        if view.shape[v] <= 1:
            continue
        fits = [
            d
            for d in wide
            if d not in of_base
            and view.stride(v) > 0
            and view.stride(v) % base.stride(d) == 0
            and first[d] + (view.shape[v] - 1) * (view.stride(v) // base.stride(d)) < base.shape[d]
        ]
        if not fits:
            return None
        d = max(fits, key=base.stride)
        of_base[d] = (v, view.stride(v) // base.stride(d))
    slices, sizes = [], []
    for d in range(base.dim()):
        v, step = of_base.get(d, (-1, 1))
        count = view.shape[v] if d in of_base else 1
        sizes.append(count)
        if count < base.shape[d]:
            slices.append((d, first[d], first[d] + (count - 1) * step + 1, step))
    rest = [d for d in range(base.dim()) if d not in of_base]
    order = [*rest, *sorted(of_base, key=lambda d: of_base[d][0])]
    return Place(tuple(slices), tuple(sizes), tuple(order), tuple(view.shape))


@dataclass(frozen=True)
class Diagonal:
    """The place of a view within the diagonal of a part of its base tensor."""

    part: Place | Reshaped
    dims: tuple[int, int]  # of the part
    inner: Place | Reshaped  # in the diagonal

    def get(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.get(self.part.get(x).diagonal(0, *self.dims))

    def put(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        part = self.part.get(x)
        values = self.inner.put(part.diagonal(0, *self.dims), values)
        return self.part.put(x, torch.diagonal_scatter(part, values, 0, *self.dims))


def diagonal_of(base: torch.Tensor, view: torch.Tensor) -> Diagonal | None:
    """Returns the place of a view whose last dimension steps along two dimensions of the base at once; else None."""
    if view.dtype != base.dtype or view.dim() == 0 or view.numel() == 0:
        return None
    offset, first = view.storage_offset() - base.storage_offset(), [0] * base.dim()
    for d in sorted((d for d in range(base.dim()) if base.stride(d) > 0), key=base.stride, reverse=True):
        first[d], offset = divmod(offset, base.stride(d))
    for dims in itertools.combinations(range(base.dim()), 2):
        if view.stride(-1) != base.stride(dims[0]) + base.stride(dims[1]):
            continue
        part = base
        for d in dims:
            part = part[(slice(None),) * d + (slice(first[d], first[d] + view.shape[-1]),)]
        diagonal = part.diagonal(0, *dims)
        outer, inner = slices_of(base, part), slices_of(diagonal, view)
        if diagonal.shape[-1] == view.shape[-1] and outer is not None and inner is not None:
            return Diagonal(outer, dims, inner)
    return None
