"""Formulas of whole logits in PyTorch's own operations, a chunk of tokens at a time. They serve where autochunk cannot:
without the library, and on devices that it has no kernels for.

The gradients of a sum are computed with it, chunk by chunk, and those of tokens in the backward. Products are fp32, and so
are the sums of d_weight (float64 for float64). The backward of float16 waits for its upstream gradient, with which the
loss is scaled.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._losses.chunks import GRADIENTS, ROWS, Plan, Sizes, block_bytes, described, is_sum, plan_of
from ._autochunk.transforms import requires_grad
from ._portable_products import has_wide_products, wide_product
from ._portable_tokens import Tokens, may_count
from ._precision import autocast_dtype
from .autograd import Function, check_backward, multiplied, scaled, transformed

FORMULAS: dict[str, Callable[..., Any]] = {}  # by name, of (given, *form)
OF_VOCAB: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}  # a formula's argument [V], of rows of weight


_WEIGHTS = "weight", "teacher_weight"


class Operand:
    """A weight as an operand of ``_xp.product``. The gradients of chunks are added to ``total`` (None: not needed)."""

    def __init__(
        self, weight: Tensor, hidden: torch.dtype, block: int, total: Optional[Tensor] = None, of_hidden: bool = False
    ):
        """hidden: the dtype of hidden states. block: the bytes of a block of weight. of_hidden: the gradient of hidden is
        needed."""
        self.weight, self.block, self.total, self.of_hidden = weight, block, total, of_hidden
        self.number = number_of(weight.dtype)
        self.half = weight.dtype != self.number
        self.direct = self.half and hidden == weight.dtype and has_wide_products(weight.device.type, weight.dtype)

    def product(self, hidden: Tensor) -> Tensor:
        return _Product.apply(hidden, self)

    def blocks(self) -> Iterator[tuple[int, int]]:
        yield from _blocks(self.weight, self.block) if self.half else ((0, self.weight.shape[0]),)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x weight^T in the dtype of sums. x: of weight's dtype, or such values in the dtype of sums."""
        if self.direct:
            return wide_product(x.to(self.weight.dtype), self.weight.t())
        x = x.to(self.number)
        z = x.new_empty(x.shape[0], self.weight.shape[0])
        for first, last in self.blocks():
            torch.mm(x, self.weight[first:last].to(self.number).t(), out=z[:, first:last])
        return z

    def backward(self, x: Tensor, d: Tensor) -> Optional[Tensor]:
        """Returns the gradient of hidden states from that of their products, and adds that of weight."""
        made = torch.zeros_like(x, dtype=self.number) if self.of_hidden else None
        if not self.direct:
            x = x.to(self.number)
            for first, last in self.blocks():
                if made is not None:
                    made.addmm_(d[:, first:last], self.weight[first:last].to(self.number))
                if self.total is not None:
                    self.total[first:last].addmm_(d[:, first:last].t(), x)
            return made
        unit = None
        if self.weight.dtype == torch.float16:  # of size 1 in float16
            largest = torch.where(d.isfinite(), d.abs(), 0).amax() if d.numel() else d.new_zeros(())
            unit = torch.where(largest > 0, largest, 1.0)
        d = (d if unit is None else d / unit).to(self.weight.dtype)
        if made is not None:
            made = wide_product(d, self.weight)
            made = made if unit is None else made.mul_(unit)
        if self.total is not None:
            for first, last in self.blocks():
                part = wide_product(d[:, first:last].t(), x.to(d.dtype))
                self.total[first:last] += part if unit is None else part.mul_(unit)
        return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, operand: Operand) -> Tensor:
        ctx.operand = operand
        ctx.save_for_backward(hidden)
        return operand.forward(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent: Tensor):
        return ctx.operand.backward(ctx.saved_tensors[0], cotangent), None


def number_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of logits and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(weight: Tensor, size: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of rows that take at most so many bytes in the dtype of sums."""
    step = max(1, size // max(1, weight.shape[1] * number_of(weight.dtype).itemsize))
    for first in range(0, weight.shape[0], step):
        yield first, min(weight.shape[0], first + step)


class _Call(NamedTuple):
    """A formula with everything but its tensors."""

    what: str
    names: tuple[str, ...]  # of the tensors
    form: tuple
    budget: int
    wanted: tuple[str, ...]  # the tensors whose gradients are needed

    def sizes(self, given: dict[str, Tensor], tokens: int) -> Sizes:
        prefix = "" if "weight" in given else "teacher_"
        weight = given[prefix + "weight"]
        number = number_of(weight.dtype)
        heads = [given[name] for name in ("hidden", "teacher_hidden") if name in given]
        block = min(block_bytes(self.budget), max(given[name].numel() for name in _WEIGHTS if name in given) * number.itemsize)
        weights = [given[name] for name in _WEIGHTS if name in given]
        fixed = 2 * block if any(t.dtype != number for t in (*heads, *weights)) else 0
        if "weight" in self.wanted and weight.dtype != number:
            fixed += weight.numel() * number.itemsize
        if self.what in OF_VOCAB:
            fixed += 4 * block
        return Sizes(
            self.what, tokens, weight.shape[0], sum(t.shape[1] for t in heads), number.itemsize, bool(self.wanted), fixed
        )

    def plan(self, given: dict[str, Tensor], tokens: int) -> Plan:
        return plan_of(self.sizes(given, tokens), self.budget)


def _tokens(given: dict[str, Tensor]) -> Tokens:
    """Returns the tokens that are computed: those whose factor is not 0, if it may be read."""
    first, factors = given["hidden" if "hidden" in given else "teacher_hidden"], given.get("rows")
    if factors is None or not may_count(factors.device, first.numel() * given["weight"].shape[0]):
        return Tokens(first.shape[0], None)
    index = factors.nonzero()[:, 0]  # NaN is a factor of a bad target
    return Tokens(first.shape[0], None) if len(index) == first.shape[0] else Tokens(len(index), index)


class _Run:
    """A call while its chunks are computed: its tensors, and the sums of its gradients."""

    def __init__(self, call: _Call, tensors: tuple[Tensor, ...]):
        self.call = call
        self.given = given = {name: t.detach() for name, t in zip(call.names, tensors)}
        self.dtypes = {name: t.dtype for name, t in given.items()}
        self.rows = {name for name, t in given.items() if name in ROWS and t.dim()}
        self.tokens = _tokens(given)
        self.plan = call.plan(given, self.tokens.count)
        self.all = given["hidden" if "hidden" in given else "teacher_hidden"]
        self.number, self.block = number_of(self.all.dtype), block_bytes(call.budget)
        self.leaves: dict[str, Tensor] = {}  # whose gradients autograd computes, beside those of hidden
        self.d_hidden = self.d_weight = None
        if "hidden" in call.wanted:
            self.d_hidden = torch.zeros_like(self.all, memory_format=torch.contiguous_format)
        if "weight" in call.wanted:
            self.d_weight = torch.zeros(given["weight"].shape, dtype=self.number, device=self.all.device)
        if "bias" in call.wanted:
            given["bias"] = self.leaves["bias"] = given["bias"].to(self.number).requires_grad_()
        self.of_vocab = OF_VOCAB.get(call.what)
        if self.of_vocab is not None:
            name, function = self.of_vocab
            weight = given["weight"]
            given[name] = torch.cat([function(weight[a:b].to(self.number)) for a, b in _blocks(weight, self.block)])
            if self.d_weight is not None:
                self.leaves[name] = given[name].requires_grad_()
        self.sums = {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()}
        heads = {"weight": (self.d_weight, self.d_hidden is not None), "teacher_weight": ()}
        self.operands = {
            name: Operand(given[name], self.dtypes[name.replace("weight", "hidden")], self.block, *head)
            for name, head in heads.items() if name in given
        }

    def chunk(self, first: int, last: int, upstream: Optional[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs of some tokens, and adds their gradients."""
        take, wanted = self.tokens.take, bool(self.call.wanted)
        part: dict[str, Any] = {n: take(t, first, last) if n in self.rows else t for n, t in self.given.items()}
        part |= self.operands
        leaves = dict(self.leaves)
        if wanted:
            # Its gradient has the dtype of sums, until it is rounded once.
            part["hidden"] = leaves["hidden"] = part["hidden"].to(self.number, copy=True).requires_grad_()
        with recorded() if wanted else contextlib.nullcontext():
            made = FORMULAS[self.call.what](part, *self.call.form)
            made = made if isinstance(made, tuple) else (made,)
            if wanted:
                d = take(upstream, first, last) if upstream is not None and upstream.dim() else upstream
                gradients = torch.autograd.grad(made[0], list(leaves.values()), d, allow_unused=True)
        if wanted:
            found = dict(zip(leaves, gradients))
            self.tokens.put(self.d_hidden, first, last, found["hidden"])
            for name, total in self.sums.items():
                total += found[name]
        return tuple(t.detach() for t in made)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of all chunks, in the dtypes of their tensors."""
        if self.of_vocab is not None and self.d_weight is not None:
            name, function = self.of_vocab
            for a, b in _blocks(self.given["weight"], self.block):
                with recorded():
                    w = self.given["weight"][a:b].to(self.number, copy=True).requires_grad_()
                    (d,) = torch.autograd.grad(function(w), w, self.sums[name][a:b])
                self.d_weight[a:b] += d
        found = {"hidden": self.d_hidden, "weight": self.d_weight, "bias": self.sums.get("bias")}
        return [found[name].to(self.dtypes[name]) for name in self.call.wanted]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Returns the sum of chunks' sums, or the results of all tokens. Those that were not computed are 0."""
        if parts[0].dim() == 0:
            return torch.stack(parts).sum()
        made = torch.cat(parts)
        if self.tokens.index is None:
            return made
        return made.new_zeros((self.all.shape[0], *made.shape[1:])).index_copy_(0, self.tokens.index, made)


def _evaluate(call: _Call, tensors: tuple[Tensor, ...], upstream: Optional[Tensor] = None) -> list[Tensor]:
    """Returns the outputs of a formula, and the gradients of call.wanted. upstream: the gradient of its first
    output, [] or [N]; None: 1."""
    run = _Run(call, tensors)
    count, step = run.tokens.count, run.plan.tokens
    found = [run.chunk(first, min(count, first + step), upstream) for first in range(0, max(count, 1), step)]
    return [*(run.joined(list(parts)) for parts in zip(*found)), *run.gradients()]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Records operations for autograd, also within an operator, which excludes it."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
            torch._C._dispatch_tls_set_dispatch_key_excluded(getattr(torch._C.DispatchKey, name), False)
        yield


def _run(call: _Call, tensors: tuple[Tensor, ...], upstream: Optional[Tensor] = None) -> list[Tensor]:
    """Returns the outputs and the gradients, through an operator if something traces or transforms the call."""
    if torch.compiler.is_compiling() or transformed() or any(type(t) not in _PLAIN for t in tensors):
        return _operator(call, tensors, upstream, True)
    kind = tensors[0].device.type
    off = torch.autocast(kind, enabled=False) if autocast_dtype(kind) is not None else contextlib.nullcontext()
    with torch.no_grad(), off:
        return _evaluate(call, tensors, upstream)


_PLAIN = torch.Tensor, torch.nn.Parameter, torch.nn.Buffer
_SCHEMA = "(Tensor[] tensors, Tensor? upstream, str what, str names, str form, SymInt budget, str wanted, bool now) "
_SCHEMA += "-> Tensor[]"


def _operator(call: _Call, tensors: tuple[Tensor, ...], upstream: Optional[Tensor], now: bool) -> list[Tensor]:
    """now: the results include the gradients; otherwise the operator's backward computes them."""
    flat = call.what, ",".join(call.names), repr(call.form), call.budget, ",".join(call.wanted), now
    return torch.ops.logitless.formula(list(tensors), upstream, *flat)


def _call_of(what: str, names: str, form: str, budget: int, wanted: str, now: bool) -> _Call:
    of = tuple(filter(None, wanted.split(","))) if now else ()
    return _Call(what, tuple(names.split(",")), ast.literal_eval(form), budget, of)


@torch.library.custom_op("logitless::formula", mutates_args=(), schema=_SCHEMA)
def _formula(tensors, upstream, *flat):
    return [t.clone() if any(t is other for other in tensors) else t for t in _run(_call_of(*flat), tuple(tensors), upstream)]


@_formula.register_fake
def _(tensors, upstream, *flat):
    call = _call_of(*flat)
    given = dict(zip(call.names, tensors))
    with torch.no_grad():
        made = FORMULAS[call.what](given, *call.form)
    made = made if isinstance(made, tuple) else (made,)
    return [*(t.new_empty(t.shape) for t in made), *(torch.empty_like(given[name]) for name in call.wanted)]


def _save(ctx, inputs, output) -> None:
    tensors, _, *flat, ctx.joint = inputs
    ctx.call, ctx.tracing = _call_of(*flat, True), True
    count = len(output) - len(ctx.call.wanted)
    ctx.save_for_backward(*(output[count:] if ctx.joint else tensors))


def _of_operator(ctx, cotangents) -> tuple:
    return list(_Chunked.backward(ctx, *cotangents)[2:]), *(None,) * 7


_formula.register_autograd(_of_operator, setup_context=_save)


class _Chunked(Function):
    """A formula. Its gradients are more results where they are computed with it."""

    @staticmethod
    def forward(call: _Call, joint: bool, *tensors):
        return tuple(_run(call if joint else call._replace(wanted=()), tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, ctx.joint, *tensors = inputs
        ctx.tracing = torch.compiler.is_compiling() or transformed()
        ctx.set_materialize_grads(False)
        if ctx.joint and not ctx.tracing:
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*(output[1:] if ctx.joint else tensors))

    @staticmethod
    def backward(ctx, cotangent, *others):
        if not ctx.tracing:
            check_backward(cotangent)
        call = ctx.call
        if cotangent is None:
            gradients = [None] * len(call.wanted)
        elif not ctx.joint:
            run = _Backward.apply if transformed() else _backward
            gradients = run(call, cotangent, *ctx.saved_tensors)
        elif ctx.tracing:
            gradients = multiplied(ctx.saved_tensors, cotangent, [g.dtype for g in ctx.saved_tensors])
        else:
            gradients = scaled(ctx.saved_tensors, cotangent)
        made = dict(zip(call.wanted, gradients))
        return None, None, *(made.get(name) for name in call.names)


def _backward(call: _Call, cotangent: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_run(call, tensors, cotangent)[1:])


class _Backward(Function):
    """The gradients in a backward under transforms of torch.func."""

    forward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        Function.refuse(gradients)
        return (None,) * ctx.count


def _is_joint(call: _Call, given: dict[str, Tensor]) -> bool:
    """Returns whether gradients are computed with the result."""
    return bool(call.wanted) and is_sum(call.what, call.form) and given["hidden"].dtype != torch.float16


def call_of(what: str, budget: int, given: dict[str, Tensor], form: tuple) -> _Call:
    wanted = ()
    if torch.is_grad_enabled():
        needs = Tensor.requires_grad.__get__ if torch.compiler.is_compiling() else requires_grad
        wanted = tuple(name for name in GRADIENTS if name in given and needs(given[name]))
    return _Call(what, tuple(given), form, budget, wanted)


def run(what: str, budget: int, given: dict[str, Tensor], *form: Any):
    """Returns what the formula returns, with gradients by hidden, weight and bias."""
    call = call_of(what, budget, given, form)
    if call.wanted and torch.compiler.is_compiling():
        made = _operator(call, tuple(given.values()), None, _is_joint(call, given))
        made = made[: len(made) - len(call.wanted)] if _is_joint(call, given) else made
    elif call.wanted or transformed():
        made = _Chunked.apply(call, _is_joint(call, given), *given.values())
        made = made[: len(made) - len(call.wanted)] if _is_joint(call, given) else made
    else:
        made = _run(call, tuple(given.values()))
    return tuple(made) if len(made) > 1 else made[0]


def explain(what: str, budget: int, reason: str, given: dict[str, Tensor], *form: Any) -> str:
    """Describes the plan of a call."""
    call = call_of(what, budget, given, form)
    tokens = _tokens(given).count
    when = "gradients with the loss" if _is_joint(call, given) else "gradients in the backward"
    when = when if call.wanted else "no input needs a gradient"
    return described(call.sizes(given, tokens), call.plan(given, tokens), "PyTorch", reason, when)
