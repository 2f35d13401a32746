"""Traces ``x[mask]``, whose number of rows depends on values. All rows are kept, and reductions count only those of the
mask. Gradients of the other rows are exactly 0."""

from __future__ import annotations

import math

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode


class MaskRefused(Exception):
    """An operation on ``x[mask]`` without a form. The message names an alternative."""


class Selected:
    """``x[mask]``, represented by all rows of x [N, ...] and mask [N]. zeroed: rows outside of the mask are 0."""

    def __init__(self, rows: torch.Tensor, mask: torch.Tensor, key: tuple, zeroed: bool):
        self.rows, self.mask, self.key, self.zeroed = rows, mask, key, zeroed

    def like(self, rows: torch.Tensor, zeroed: bool = False) -> Selected:
        return Selected(rows, self.mask, self.key, zeroed)

    def clean(self) -> Selected:
        """Returns the rows with zeros outside of the mask. This also stops gradients of those rows, such as 0 * inf."""
        if self.zeroed:
            return self
        mask = self.mask.reshape([-1] + [1] * (self.rows.dim() - 1))
        return self.like(torch.where(mask, self.rows, torch.zeros((), dtype=self.rows.dtype)), True)

    def count(self) -> torch.Tensor:
        """Returns the number of elements, a scalar i64."""
        return self.mask.sum() * math.prod(self.rows.shape[1:])

    # --- the interface of a tensor
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _applied(func, args, kwargs or {})

    def __getattr__(self, name):
        if name in ("dtype", "device", "layout", "is_cuda", "is_sparse", "requires_grad"):
            return getattr(self.rows, name)
        method = getattr(torch.Tensor, name, None)
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"x[mask] has no {name}")
        if not callable(method):
            raise MaskRefused(f"{name} of x[mask], whose size depends on values, has no form; expected it of x")
        return lambda *args, **kwargs: _applied(method, (self, *args), kwargs)

    @property
    def ndim(self) -> int:
        return self.rows.dim()

    @property
    def shape(self) -> Sizes:
        return Sizes(self)

    def __len__(self):
        raise MaskRefused("len(x[mask]) depends on values; expected mask.sum()")

    def __bool__(self):
        raise MaskRefused("a branch on x[mask] depends on values; expected torch.where")

    def __iter__(self):
        raise MaskRefused("x[mask] cannot be gone through row by row; how many there are depends on values")


class Sizes:
    """The shape of x[mask], whose first size is a tensor."""

    def __init__(self, of: Selected):
        self._of = of

    def __len__(self):
        return self._of.ndim

    def __getitem__(self, i):
        sizes = [None, *self._of.rows.shape[1:]]
        got = sizes[i]
        if isinstance(i, slice) and None in got:
            raise MaskRefused("how many rows x[mask] has depends on values; expected sizes of its other dimensions")
        return self._of.mask.sum() if got is None else got

    def __iter__(self):
        return iter(self[i] for i in range(len(self)))


def _operator(name):
    def call(self, *others):
        return _applied(getattr(torch.Tensor, name), (self, *others), {})

    return call


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs matmul lt le gt ge eq ne and or invert getitem
"""
for _name in _OPERATORS.split():
    setattr(Selected, f"__{_name}__", _operator(f"__{_name}__"))
Selected.__hash__ = object.__hash__


# --- creation


class MaskedRows(TorchFunctionMode):
    """A mode in which indexing by a mask returns Selected."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            made = _indexed(*args)
            if made is not None:
                return made
        if func in (torch.masked_select, torch.Tensor.masked_select):
            x, mask = torch.broadcast_tensors(*_two(*args, **kwargs))
            return _selected(x, mask)
        return func(*args, **kwargs)


def _two(input, mask):
    return input, mask


def _indexed(x, index) -> Selected | None:
    mask, *others = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or isinstance(x, Selected):
        return None
    if any(not (o is Ellipsis or (isinstance(o, slice) and o == slice(None))) for o in others):
        return None
    if mask.dim() == 0 or mask.dim() > x.dim() or x.shape[: mask.dim()] != mask.shape:
        return None  # PyTorch raises for it
    return _selected(x, mask)


def _selected(x: torch.Tensor, mask: torch.Tensor) -> Selected:
    key = (mask, mask._version)
    rows = x.reshape([math.prod(mask.shape), *x.shape[mask.dim() :]])
    return Selected(rows, mask.reshape([-1]), key, False).clean()


def _same_mask(a: Selected, b: Selected) -> bool:
    (x, version_x), (y, version_y) = a.key, b.key
    if version_x != version_y or x.numel() != y.numel():
        return False
    if x is y:
        return True
    # Views of one mask: mask.view(-1), for example, makes a new one each time.
    storages = [t.untyped_storage()._cdata for t in (x, y)]
    whole = all(t.is_contiguous() and t.storage_offset() == x.storage_offset() for t in (x, y))
    return whole and storages[0] == storages[1]


# --- operations


def _name_of(func) -> str:
    name = getattr(func, "__name__", str(func))
    return name.strip("_") if name.startswith("__") else name


def _applied(func, args, kwargs):
    name = _name_of(func)
    if name == "get":  # an attribute's getter
        raise MaskRefused(f"{func} of x[mask] has no form")
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Selected)]
    if any(not _same_mask(found[0], other) for other in found):
        raise MaskRefused(f"{name} of rows by two masks has no form; expected one mask, made once, for all of them")
    rule = _RULES.get(name)
    if rule is None:
        raise MaskRefused(
            f"{name} of x[mask], whose size depends on values, has no form; expected a mask over all rows: "
            "torch.where(mask, x, 0)"
        )
    return rule(found[0], func, args, kwargs)


def _rows(tree):
    return pytree.tree_map(lambda leaf: leaf.rows if isinstance(leaf, Selected) else leaf, tree)


def _check_shapes(first: Selected, name: str, args, kwargs) -> None:
    """Checks that operands are rows by the same mask, or broadcast over rows."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Selected):
            fits = leaf.ndim == first.ndim
        else:
            plain = isinstance(leaf, torch.Tensor)
            fits = not plain or leaf.dim() < first.ndim or (leaf.dim() == first.ndim and leaf.shape[0] == 1)
        if not fits:
            sizes = ", ".join(["?", *map(str, first.rows.shape[1:])])
            raise MaskRefused(
                f"{name} of x[mask] [{sizes}] and {list(leaf.shape)} has no form; expected the same mask on both, or "
                "no dimension of rows"
            )


def _elementwise(first, func, args, kwargs):
    _check_shapes(first, _name_of(func), args, kwargs)
    made = first.like(func(*_rows(args), **_rows(kwargs)))
    return made.clean() if made.rows.is_floating_point() else made


def _each(first, func, args, kwargs):
    """Applies a function elementwise that maps 0 to 0, such as a cast."""
    return first.like(func(*_rows(args), **kwargs), first.zeroed)


def _product(first, func, args, kwargs):
    x, *others = args
    if not isinstance(x, Selected) or x.ndim < 2 or any(isinstance(o, Selected) for o in others):
        raise MaskRefused("a product of x[mask] has a form with rows [N, D] on its left; expected F.linear(x[mask], w)")
    if any(isinstance(o, torch.Tensor) and o.dim() > 2 for o in others):
        raise MaskRefused("a product of x[mask] has a form with matrices alone")
    return first.like(func(x.clean().rows, *others, **kwargs))


def _dims(first: Selected, dim) -> list[int]:
    dims = range(first.ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return [d % first.ndim for d in dims]


def _along(first, func, args, kwargs):
    """Applies a function along a dimension other than the rows: x, dim, ..."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    name = _name_of(func)
    if not isinstance(dim, int) or dim % (first.ndim + (name == "unsqueeze")) == 0:
        raise MaskRefused(f"{name} of x[mask] along its rows has no form; expected a dim that is not 0")
    return first.like(func(*_rows(args), **_rows(kwargs)))


def _sum(first, func, args, kwargs):
    return _reduced(first, *args[1:], **kwargs, mean=False)


def _mean(first, func, args, kwargs):
    return _reduced(first, *args[1:], **kwargs, mean=True)


def _reduced(first, dim=None, keepdim=False, *, dtype=None, mean):
    dims = _dims(first, dim)
    if 0 not in dims:
        function = torch.mean if mean else torch.sum
        return first.like(function(first.rows, dims, keepdim, dtype=dtype))
    rows = first.clean().rows
    kept = dtype or (torch.int64 if not rows.is_floating_point() else rows.dtype)
    if not mean:
        return torch.sum(rows, dims, keepdim, dtype=kept)
    if not kept.is_floating_point:
        raise MaskRefused(f"mean of {rows.dtype} has no form; expected floating point, or dtype=")
    wide = torch.float64 if kept == torch.float64 else torch.float32  # rounded once, like mean()
    count = first.mask.sum() * math.prod(rows.shape[d] for d in dims if d != 0)
    return (torch.sum(rows, dims, keepdim, dtype=wide) / count).to(kept)


def _cross_entropy(first, func, args, kwargs):
    given = dict(zip(("input", "target", "weight"), args), **kwargs)
    if len(args) > 3 or not all(isinstance(given.get(k), Selected) for k in ("input", "target")):
        raise MaskRefused("cross_entropy of x[mask] has a form with x[mask] and target[mask], options by their names")
    x, target = given.pop("input"), given.pop("target")
    if target.rows.is_floating_point():
        return _loss(first, func, (x, target), given)
    ignored = torch.full((), given.get("ignore_index", -100), dtype=target.rows.dtype)
    mask = target.mask.reshape([-1] + [1] * (target.ndim - 1))
    made = func(x.rows, torch.where(mask, target.rows, ignored), **given)
    return first.like(made, True) if given.get("reduction", "mean") == "none" else made


def _loss(first, func, args, kwargs):
    """Applies a loss of F with a reduction."""
    name = _name_of(func)
    if len(args) > 2:
        raise MaskRefused(f"{name} of x[mask] has a form with options by their names")
    _check_shapes(first, name, args, kwargs)
    given = {k: v for k, v in _rows(kwargs).items() if k != "reduction"}
    reduction = kwargs.get("reduction", "mean")
    each = first.like(func(*_rows(args), **given, reduction="none")).clean()
    if reduction == "batchmean":
        return _reduced(each, mean=False) / first.mask.sum()
    return each if reduction == "none" else _reduced(each, mean=reduction == "mean")


def _shaped(first, func, args, kwargs):
    """Applies view and reshape if they do not change the shape."""
    sizes = args[1:] if len(args) != 2 or isinstance(args[1], int) else tuple(args[1])
    rest = tuple(first.rows.shape[1:])
    if len(sizes) == first.ndim and isinstance(sizes[0], int) and sizes[0] == -1 and tuple(sizes[1:]) == rest:
        return first
    raise MaskRefused(f"{_name_of(func)} of x[mask] has no form; expected to shape x, and then x[mask]")


def _part(first, func, args, kwargs):
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    head, *rest = index
    plain = all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in rest)
    taken = sum(i is not None and i is not Ellipsis for i in rest)
    behind = head is Ellipsis and taken < first.ndim and None not in rest
    if not plain or not (behind or (isinstance(head, slice) and head == slice(None))):
        raise MaskRefused("an index into the rows of x[mask] has no form; expected x[mask][:, ...]")
    return first.like(first.rows[index], first.zeroed)


def _set_rows(first, func, args, kwargs):
    """Writes x[mask] = values, where the values are rows by the same mask."""
    x, mask, values = args
    if isinstance(x, Selected) or not isinstance(values, Selected):
        raise MaskRefused("writing into x[mask] has no form; expected y = torch.where(mask, value, x)")
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not _same_mask(first, _selected(x, mask)):
        raise MaskRefused("writing y[mask] has a form into x[mask], with one mask, made once, on both sides")
    if values.rows.dtype != x.dtype:
        raise TypeError(f"x[mask] = y[mask]: expected y of {x.dtype}, the dtype of x, got {values.rows.dtype}")
    rows = values.rows.reshape([*mask.shape, *values.rows.shape[1:]])
    kept = mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])
    x.copy_(torch.where(kept, rows, x))


def _same(first, func, args, kwargs):
    return first


def _count(first, func, args, kwargs):
    return first.count()


def _size(first, func, args, kwargs):
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return first.shape if dim is None else first.shape[dim]


def _rank(first, func, args, kwargs):
    return first.ndim


_ELEMENTWISE = """
    abs add and clamp clamp_max clamp_min cos detach div elu eq erf exp expm1 ge gelu gt huber invert isfinite isinf
    isnan le leaky_relu log log1p log2 logical_and logical_not logical_or logsigmoid lt masked_fill maximum minimum mul ne
    neg negative or pow radd rdiv reciprocal relu rmul rpow rsqrt rsub rtruediv sigmoid sign silu sin softplus sqrt
    square sub tanh true_divide truediv where
"""
_RULES = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys("float double half bfloat16 to type long int bool type_as".split(), _each),
    **dict.fromkeys("linear matmul mm".split(), _product),
    **dict.fromkeys("softmax log_softmax logsumexp gather take_along_dim argmax amax cumsum normalize".split(), _along),
    **dict.fromkeys("unsqueeze squeeze".split(), _along),
    **dict.fromkeys("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy".split(), _loss),
    **dict.fromkeys("binary_cross_entropy_with_logits kl_div".split(), _loss),
    **dict.fromkeys("cross_entropy nll_loss".split(), _cross_entropy),
    **dict.fromkeys("view reshape".split(), _shaped),
    "sum": _sum,
    "mean": _mean,
    "getitem": _part,
    "setitem": _set_rows,
    "contiguous": _same,
    "numel": _count,
    "size": _size,
    "dim": _rank,
    "is_floating_point": lambda first, func, args, kwargs: first.rows.is_floating_point(),
}


def check_outputs(outputs) -> None:
    """Checks that no output is x[mask]."""
    for output in outputs:
        if isinstance(output, Selected):
            raise MaskRefused(
                "the function returns x[mask], whose size depends on values; expected a sum or mean of it, or "
                "torch.where(mask, x, 0)"
            )
