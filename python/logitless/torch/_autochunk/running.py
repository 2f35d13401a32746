"""Running products and extremes, and products: in programs of the library; as PyTorch's own operations elsewhere.

PyTorch's gradient of cumprod looks for zeros among values, or takes an operation for each element. Here it is a linear
recurrence, which needs neither."""

from __future__ import annotations

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from logitless._autochunk.externs import Call
from logitless._autochunk.integers import turned
from logitless.torch._autochunk.aten import axis_of, handles
from logitless.torch._autochunk.dtypes import DTYPES

# Operations that stand for it in traces. They define shapes alone and never run. recurrence: y[k] = a[k] y[k + 1] +
# b[k] along dim, from the last element on, which is b's.
torch.library.define("logitless::cumprod", "(Tensor x, int dim) -> Tensor")
torch.library.define("logitless::recurrence", "(Tensor a, Tensor b, int dim) -> Tensor")


@torch.library.register_fake("logitless::cumprod")
def _(x, dim):
    return x.new_empty(x.shape)


@torch.library.register_fake("logitless::recurrence")
def _(a, b, dim):
    return b.new_empty(b.shape)


def _setup(ctx, inputs, output):
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def _backward(ctx, cotangent):
    x, made = ctx.saved_tensors
    dim, size = ctx.dim, x.shape[ctx.dim]
    if size < 2:
        return cotangent, None
    one = torch.ones_like(x.narrow(dim, 0, 1))
    after = torch.cat((x.narrow(dim, 1, size - 1), one), dim)
    before = torch.cat((one, made.narrow(dim, 0, size - 1)), dim)
    return torch.ops.logitless.recurrence(after, cotangent, dim) * before, None


torch.library.register_autograd("logitless::cumprod", _backward, setup_context=_setup)


class OneCumprod(TorchFunctionMode):
    """Replaces cumprod of floats by the operation above, whose gradient needs no values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = _cumprod(*args, **kwargs) if func in (torch.cumprod, torch.Tensor.cumprod) else None
        return func(*args, **kwargs) if made is None else made


def _cumprod(input, dim, *, dtype=None, out=None):
    """Returns the running product by the operation above, or None if it cannot express the arguments."""
    x = input if dtype is None else input.to(dtype)
    plain = out is None and isinstance(dim, int) and x.dim() > 0 and -x.dim() <= dim < x.dim()
    if not plain or x.dtype not in DTYPES[:4] or peek_interpreter_stack() is not None:
        return None
    return torch.ops.logitless.cumprod(x, dim % x.dim())


# --- lowering


def _check_native(w, what, x):
    if not w.native:
        raise w.refuse(f"{what} of {x.dtype} are PyTorch's own for executor='python'")


def _others(x, axis, operands):
    """Returns the dimensions along which rows are independent."""
    return [[d] * (operands + 1) for d in range(x.rank) if d != axis and x.shape[d] > 1]


@handles("cumprod")
def _running_product(w, out, x, dim, dtype=None):
    axis, own = axis_of(dim, x.rank), w.op.startswith("logitless")
    if own and not w.native:
        name = "aten.cumprod.default"
        call = Call(name, f"{name} {axis}", lambda texts, read: f"torch.ops.{name}({texts[0]}, {axis})")
        return w.extern(call, [x], out.dtype, out.shape, 0, _others(x, axis, 1))
    if not DTYPES.floating(out.dtype):
        raise w.refuse(f"running products of {out.dtype} have no form in a tensor program")
    _check_native(w, "running products", x)
    return w.scan("cumprod", w.cast(x, out.dtype), axis) if x.rank else w.cast(x, out.dtype)


@handles("recurrence")
def _recurrence(w, out, a, b, dim):
    if w.native:
        _check_native(w, "running products", b)
        return w.recurrence(a, b, dim, reverse=True)
    helper = "_recurrence"
    call = Call(
        "aten.cumprod.backward",
        f"{helper} {dim}",
        lambda texts, read: f"{helper}({', '.join(texts)}, {dim})",
        helper=helper,
    )
    return w.extern(call, [a, b], out.dtype, out.shape, 0, _others(b, dim, 2))


@handles("prod")
def _product(w, out, x, dim=None, keep=False, dtype=None):
    if not w.native or not DTYPES.floating(out.dtype):
        raise w.refuse(f"products of {out.dtype} are PyTorch's own, and for executor='python'")
    dims = list(range(x.rank)) if dim is None else [axis_of(dim, x.rank)]
    x = w.cast(x, DTYPES.wide(out.dtype))
    return w.cast(w.reduce("reduce_product", x, dims, keep) if x.rank else x, out.dtype)


@handles("cummax", "cummin")
def _running_extreme(w, out, x, dim):
    """Returns running extremes, and the index of the last element that is equal to each. A NaN stays."""
    _check_native(w, "running extremes", x)
    if x.rank == 0:
        return x, w.number(0, torch.int64)
    axis, least = axis_of(dim, x.rank), w.op.startswith("aten.cummin")
    v = w.cast(x, torch.int32) if x.dtype == torch.bool else x
    v = turned(w, v) if least else v
    top = w.scan("cummax", v, axis)
    hit = w.map("logical_or", [w.map("eq", [v, top], torch.bool), w.map("ne", [v, v], torch.bool)], torch.bool)
    places = w.map("select", [hit, w.iota(v.shape, axis), w.number(0, torch.int64)], torch.int64)
    index = w.scan("cummax", places, axis)
    w.bounds[index.name] = 0, max(v.shape[axis] - 1, 0)
    return w.cast(turned(w, top) if least else top, x.dtype), index
