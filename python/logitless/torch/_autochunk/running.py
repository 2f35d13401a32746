"""Running products, extremes and log-sum-exps, and products: in programs of the library; as PyTorch's own operations
elsewhere.

PyTorch's gradient of cumprod looks for zeros among values, or takes an operation for each element. Here it is a linear
recurrence, which needs neither. Its gradient of logcumsumexp takes the logarithms of an upstream gradient's positive and
negative parts. Here one that is a known number has one part."""

from __future__ import annotations

import math

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from logitless._autochunk.externs import Call
from logitless._autochunk.integers import turned
from logitless.torch._autochunk.aten import axis_of, handles
from logitless.torch._autochunk.dtypes import DTYPES

# Operations that stand for it in traces. They define shapes alone and never run. recurrence: y[k] = a[k] y[k + 1] +
# b[k] along dim, from the last element on, which is b's. y of logcumsumexp_backward: the running log-sum-exps.
torch.library.define("logitless::cumprod", "(Tensor x, int dim) -> Tensor")
torch.library.define("logitless::recurrence", "(Tensor a, Tensor b, int dim) -> Tensor")
torch.library.define("logitless::logcumsumexp", "(Tensor x, int dim) -> Tensor")
torch.library.define("logitless::logcumsumexp_backward", "(Tensor g, Tensor x, Tensor y, int dim) -> Tensor")


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
    before = torch.cat((torch.ones_like(x.narrow(dim, 0, 1)), made.narrow(dim, 0, size - 1)), dim)
    return torch.ops.logitless.recurrence(_next(x, dim, 1), cotangent, dim) * before, None


def _next(x, dim, last):
    """Returns the element behind each one along a dimension, and a number behind the last."""
    return torch.cat((x.narrow(dim, 1, x.shape[dim] - 1), torch.full_like(x.narrow(dim, 0, 1), last)), dim)


torch.library.register_autograd("logitless::cumprod", _backward, setup_context=_setup)


def _setup_of_recurrence(ctx, inputs, output):
    a, _, ctx.dim = inputs
    ctx.save_for_backward(a, output)


def _backward_of_recurrence(ctx, cotangent):
    """The gradient of b is a recurrence from the first element on: d[k] = a[k - 1] d[k - 1] + cotangent[k]."""
    a, made = ctx.saved_tensors
    dim = ctx.dim
    if a.shape[dim] < 2:
        return torch.zeros_like(a), cotangent, None
    d = torch.ops.logitless.recurrence(_next(a.flip(dim), dim, 1), cotangent.flip(dim), dim).flip(dim)
    return d * _next(made, dim, 0), d, None


torch.library.register_autograd("logitless::recurrence", _backward_of_recurrence, setup_context=_setup_of_recurrence)


@torch.library.register_fake("logitless::logcumsumexp")
def _(x, dim):
    return x.new_empty(x.shape)


@torch.library.register_fake("logitless::logcumsumexp_backward")
def _(g, x, y, dim):
    return x.new_empty(x.shape)


def _backward_of_logs(ctx, cotangent):
    x, made = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return torch.ops.logitless.logcumsumexp_backward(cotangent, x, made, ctx.dim), None

    def share(part):  # what gradients of gradients go through; -inf would make their differences NaN
        positive = part > 0
        logs = torch.where(positive, torch.where(positive, part, 1.0).log(), torch.finfo(part.dtype).min / 4)
        after = torch.ops.logitless.logcumsumexp((logs - made).flip(ctx.dim), ctx.dim).flip(ctx.dim)
        return (after + x).exp()

    return share(cotangent) - share(-cotangent), None


torch.library.register_autograd("logitless::logcumsumexp", _backward_of_logs, setup_context=_setup)


class OwnRunning(TorchFunctionMode):
    """Replaces cumprod and logcumsumexp of floats by the operations above, for the sake of their gradients."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operation = _OWN.get(func)
        made = None if operation is None else _replaced(operation, *args, **kwargs)
        return func(*args, **kwargs) if made is None else made


_OWN = {
    torch.cumprod: "cumprod",
    torch.Tensor.cumprod: "cumprod",
    torch.logcumsumexp: "logcumsumexp",
    torch.Tensor.logcumsumexp: "logcumsumexp",
}


def _replaced(operation, input, dim, *, dtype=None, out=None):
    """Returns the running result by an operation above, or None if it cannot express the arguments."""
    x = input if dtype is None else input.to(dtype)
    plain = out is None and isinstance(dim, int) and x.dim() > 0 and -x.dim() <= dim < x.dim()
    if not plain or x.dtype not in DTYPES[:4] or peek_interpreter_stack() is not None:
        return None
    return getattr(torch.ops.logitless, operation)(x, dim % x.dim())


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


@handles("logcumsumexp_backward")
def _gradient_of_logs(w, out, g, x, y, dim):
    """The gradient at x is the sum of g exp(x - y) over the results that include x."""
    wide = [w.cast(v, DTYPES.wide(out.dtype)) for v in (g, x, y)]
    return w.cast(_summed_back(w, *wide, dim, reverse=True), out.dtype)


def _summed_back(w, g, x, y, axis, reverse):
    if w.flipped(x, axis) is not None and w.flipped(y, axis) is not None:
        made = _summed_back(w, w.flip(g, axis), w.flipped(x, axis), w.flipped(y, axis), axis, not reverse)
        return w.flip(made, axis)

    def share(log):  # of the positive numbers with these logarithms; by logarithms no exponential overflows
        return w.map("exp", [w.add(w.scan("cumlse", w.sub(log, y), axis, reverse), x)], x.dtype)

    def part(of):
        return share(w.map("log", [w.map("max", [of, w.number(0, of.dtype)], of.dtype)], of.dtype))

    number = w.constant_of(g)
    if number is None:
        return w.sub(part(g), part(w.map("neg", [g], g.dtype)))
    if number == 0 or not math.isfinite(number):
        return w.number(0 if number == 0 else math.nan, x.dtype, x.shape)
    made = share(w.number(math.log(abs(number)), x.dtype, x.shape))
    return made if number > 0 else w.map("neg", [made], x.dtype)


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
