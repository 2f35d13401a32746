"""The C calls with gradients: one autograd function for each, and the operators ``torch.ops.logitless.*``.

Eager code and the transforms of torch.func apply the functions. torch.compile and other tracers see the operators with
their fake implementations, whose gradients are those of the functions. All of them run the calls of ``run.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import WEIGHTS, HeadOptions, LossOptions
from . import _engine, run
from ._backend import is_native
from .groups import raise_on_all_ranks
from .ranks import VocabShard
from .run import BIAS, EAGER, HIDDEN, INPUTS, OPERATOR, TRANSFORM, WEIGHT, Form, saved_dtype

_HEAD = "hidden weight target bias?"
LOSS_TENSORS = " ".join([_HEAD, *(f"{name}?" for name in WEIGHTS)])  # of operators
_OTHERS = (None,) * (len(WEIGHTS) + 2)  # weights, grad_losses and the form
_NO_WEIGHTS = (None,) * (len(WEIGHTS) + 1)  # and no grad_losses
_SCALED = 1 << 22  # elements of a gradient that are scaled at a time

# Tells whether the running backward retains its graph. Versions of PyTorch that do not report it may retain it.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def transformed() -> bool:
    """Returns whether a transform of torch.func is active in eager code."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def scaled(gradients, d_loss: Tensor, dtypes=None, planned: bool = False):
    """Multiplies gradients, computed for an upstream gradient of 1, by this one, and casts them to these dtypes (None:
    unchanged). It works in place unless the graph is retained or the dtype changes. The factor is not rounded to their
    dtype. planned: they are of a planned call, so that the library's kernels serve them."""
    if keeps_graph():
        gradients = [g.clone() for g in gradients]
    if d_loss.device.type == "cpu":
        factor = d_loss.item()  # item() is free on a CPU, and the factor is usually 1
        gradients = gradients if factor == 1.0 else [g.mul_(factor) for g in gradients]
    elif not (planned or all(is_native(t) for t in (d_loss, *gradients))):
        gradients = [_times(g, d_loss) for g in gradients]
    else:
        for first in range(0, len(gradients), 3):
            _engine.scale(gradients[first : first + 3], d_loss)
    if dtypes is None:
        return gradients
    return [g if g.dtype is dtype else g.to(dtype) for g, dtype in zip(gradients, dtypes)]


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Computes ``gradient *= factor`` in blocks, each in the wider dtype of both."""
    rows = gradient.view(-1)
    for first in range(0, rows.numel(), _SCALED):
        part = rows[first : first + _SCALED]
        part.copy_(part.to(torch.promote_types(part.dtype, factor.dtype)) * factor)
    return gradient


def multiplied(gradients, d_loss: Tensor, dtypes):
    """Multiplies gradients, computed for an upstream gradient of 1, by this one, with operations that tracers see."""
    return [(g.to(d_loss.dtype) * d_loss).to(dtype) for g, dtype in zip(gradients, dtypes)]


def is_batch(gradient: Optional[Tensor]) -> bool:
    """Returns whether vmap runs the backward that has this upstream gradient, as with is_grads_batched=True."""
    functorch = torch._C._functorch
    return gradient is not None and (functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient))


def check_backward(*upstream: Optional[Tensor]) -> None:
    """Raises for what an eager backward has no rule for, given its upstream gradients. Only under create_graph=True does
    it record gradients. Batches of vmap have no memory of their own."""
    if torch.is_grad_enabled():
        raise NotImplementedError("logitless: second derivatives (create_graph=True) are not supported")
    if any(map(is_batch, upstream)):
        raise NotImplementedError(
            "logitless: batches of upstream gradients (is_grads_batched=True, jacobian(vectorize=True)) are not supported; "
            "expected torch.func.jacrev, or torch.vmap around the forward too"
        )


def needed(gradients, needs: int) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Returns the gradients of hidden, weight and bias; None for those that are not needed."""
    d_hidden, d_weight, d_bias = gradients
    return d_hidden if needs & HIDDEN else None, d_weight if needs & WEIGHT else None, d_bias if needs & BIAS else None


def by_input(gradients, needs: int) -> list[Optional[Tensor]]:
    """Returns those of hidden, weight and bias for the gradients that are needed, in this order; None for others."""
    each = iter(gradients)
    return [next(each) if needs & bit else None for bit in (HIDDEN, WEIGHT, BIAS)]


def eager_apply(function: type[torch.autograd.Function]):
    """Returns ``function.apply`` for eager code. It skips PyTorch's Python wrapper, which binds the arguments to a
    signature, and looks for transforms of torch.func."""
    return super(torch.autograd.Function, function).apply


class Function(torch.autograd.Function):
    """A call whose last argument is its ``Form``. A vmap makes one call for each element of its batch. Second
    derivatives and forward mode raise errors that name them."""

    @staticmethod
    def refuse(gradients) -> None:
        if any(g is not None for g in gradients):
            raise NotImplementedError("logitless: second derivatives (torch.func.grad of a gradient) are not supported")

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError("logitless: forward-mode derivatives (torch.func.jvp, jacfwd) are not supported")

    @classmethod
    def vmap(cls, info, in_dims, *args):
        results = []
        for k in range(info.batch_size):
            of = [a.select(d, k) if isinstance(a, Tensor) and d is not None else a for a, d in zip(args, in_dims)]
            results.append(cls.apply(*of))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(r) for r in zip(*results)), (0,) * len(results[0])


class CrossEntropy(Function):
    """``logitless_cross_entropy``. Gradients of a mean or sum are outputs of the forward, which the backward scales;
    those of reduction "none" are computed in the backward."""

    @staticmethod
    def forward(*inputs):
        return run.run_cross_entropy(*inputs) if inputs[-1].way == EAGER else cross_entropy(*_dispatched(inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.form = form = inputs[-1]
        ctx.set_materialize_grads(False)
        if form.way == EAGER:
            ctx.mark_non_differentiable(*[t for t in output[1:] if t is not None])
        elif form.way == TRANSFORM:  # the others stay differentiable, for an error of second derivatives
            ctx.mark_non_differentiable(output[1], output[2])
        if form.options.reduction == "none":
            ctx.save_for_backward(*inputs[:INPUTS])
        else:
            made = zip((HIDDEN, WEIGHT, BIAS), output[3:], (inputs[0], inputs[1], inputs[3]))
            kept = [(g, t.dtype) for bit, g, t in made if form.needs & bit]
            ctx.dtypes = [dtype for _, dtype in kept]
            ctx.save_for_backward(*[g for g, _ in kept])

    @staticmethod
    def backward(ctx, d_loss, d_lse, d_argmax, *d_gradients):
        form = ctx.form
        if form.way == EAGER:
            check_backward(d_loss)
        else:
            Function.refuse(d_gradients)
        if d_lse is not None:
            raise RuntimeError("linear_cross_entropy: the lse of this operator has no gradient; use linear_logprobs")
        if d_loss is None:
            return (None,) * (INPUTS + 2)
        if form.options.reduction == "none":
            call = form._replace(argmax=False, lse=False)
            gradients = _on_ranks(call, lambda: cross_entropy(*ctx.saved_tensors, d_loss, call))[3:]
            d_hidden, d_weight, d_bias = needed(gradients, form.needs)
            if form.main_grad is not None and form.needs & WEIGHT:
                d_weight = form.main_grad.added()
        else:
            scale = scaled if form.way == EAGER else multiplied
            d_hidden, d_weight, d_bias = by_input(scale(ctx.saved_tensors, d_loss, ctx.dtypes), form.needs)
        return d_hidden, d_weight, None, d_bias, *_OTHERS


class RepeatedCrossEntropy(Function):
    """``CrossEntropy`` for a mean or sum that was seen before. The gradients are saved without being outputs, which costs
    less of the host's time. Arguments: hidden, weight, target, bias and the ``run.SeenLoss``."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.seen = seen = inputs[-1]
        ctx.set_materialize_grads(False)
        loss, *made = seen.planned.replay(inputs[:4])
        ctx.save_for_backward(*made)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        check_backward(d_loss)
        if d_loss is None:
            return None, None, None, None, None
        seen = ctx.seen
        d_hidden, d_weight, d_bias = by_input(scaled(ctx.saved_tensors, d_loss, seen.dtypes, planned=True), seen.needs)
        return d_hidden, d_weight, None, d_bias, None


class Head(Function):
    """``logitless_head_forward``, and ``logitless_head_backward`` as its backward."""

    @staticmethod
    def forward(*inputs):
        return run.run_head(*inputs) if inputs[-1].way == EAGER else head(*_dispatched(inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.form = inputs
        ctx.set_materialize_grads(False)
        if ctx.form.way != OPERATOR:
            ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, d_argmax):
        form = ctx.form
        if form.way == EAGER:
            check_backward(d_log_prob, d_entropy, d_lse)
        if (d_log_prob is None and d_entropy is None and d_lse is None) or not form.needs:
            return None, None, None, None, None
        inputs = *ctx.saved_tensors, d_log_prob, d_entropy, d_lse, form
        gradients = _on_ranks(form, lambda: head_backward(*inputs))
        d_hidden, d_weight, d_bias = needed(gradients, form.needs)
        return d_hidden, d_weight, None, d_bias, None


class HeadBackward(Function):
    """``logitless_head_backward`` under transforms of torch.func, whose tensors must not reach the library."""

    @staticmethod
    def forward(*inputs):
        return head_backward(*_dispatched(inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients):
        Function.refuse(gradients)
        return (None,) * 8


def _dispatched(inputs):
    """Returns the inputs of an operator for those of a function. The dispatcher gives memory to zeros of autograd."""
    return *inputs[:-1], inputs[-1]._replace(way=OPERATOR)


def _on_ranks(form: Form, function):
    """Runs a backward's call. In eager code, all ranks raise an error of one."""
    return raise_on_all_ranks(form.shard.group if form.way == EAGER else "", function)


_cross_entropy, _repeated, _head = (eager_apply(f) for f in (CrossEntropy, RepeatedCrossEntropy, Head))


def cross_entropy(*inputs):
    """Returns (loss, lse, argmax, d_hidden, d_weight, d_bias); only the loss has a gradient. inputs: hidden, weight,
    target, bias, the weights, grad_losses and a ``Form``. The gradients are for internal use."""
    form = inputs[-1]
    if form.way == OPERATOR:
        return torch.ops.logitless.cross_entropy(*inputs[:-1], *_values(form), form.needs, form.argmax)
    if form.way == TRANSFORM:
        return CrossEntropy.apply(*inputs)
    return _cross_entropy(*inputs) if form.needs and torch.is_grad_enabled() else run.run_cross_entropy(*inputs)


def head(*inputs):
    """Returns (log_prob, entropy, lse, argmax), all but the last with gradients. inputs: hidden, weight, target, bias
    and a ``Form``."""
    form = inputs[-1]
    if form.way == OPERATOR:
        return torch.ops.logitless.head(*inputs[:-1], *_values(form), form.needs, form.argmax)
    if form.way == TRANSFORM:
        return Head.apply(*inputs)
    return _head(*inputs) if form.needs else run.run_head(*inputs)


def repeat(
    seen: run.SeenLoss | Form, hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """Computes the loss of a call that was seen before, which has no plan if it is a ``Form``."""
    if isinstance(seen, Form):
        return cross_entropy(hidden, weight, target, bias, *_NO_WEIGHTS, seen)[0]
    if seen.needs:
        return _repeated(hidden, weight, target, bias, seen)
    return seen.planned.replay((hidden, weight, target, bias))[0]


def head_backward(*inputs):
    """Returns (d_hidden, d_weight, d_bias). inputs: those of ``head``, with d_log_prob, d_entropy and d_lse before the
    ``Form``."""
    form = inputs[-1]
    if form.way == OPERATOR:
        return torch.ops.logitless.head_backward(*inputs[:-1], *_values(form), form.needs)
    if form.way == TRANSFORM:
        return HeadBackward.apply(*inputs)
    return run.run_head_backward(*inputs)


# --- Operators. Options and vocabulary shards are passed as separate arguments; `compute` is a dtype of computation or
# None.


def schema(tensors: str, options: tuple[type[NamedTuple], ...], last: str, results: int) -> str:
    """Returns the schema of an operator: tensors ("?": may be None), options one by one, and the last arguments."""
    kinds = {"str": "str", "int": "SymInt", "float": "float", "bool": "bool"}
    arguments = [f"Tensor? {name[:-1]}" if name.endswith("?") else f"Tensor {name}" for name in tensors.split()]
    values = [item for kind in options for item in kind._field_defaults.items()]
    arguments += [f"{kinds[type(value).__name__]} {name}" for name, value in values]
    return f"({', '.join([*arguments, last])}) -> ({', '.join(['Tensor'] * results)})"


def fake_gradients(hidden, weight, bias, needs: int, waits: bool):
    """Returns the three gradients as fake tensors, in the form of the functions that begin with ``run``."""

    def one(tensor, needed):
        if not needed:
            return hidden.new_empty(0)
        return tensor.new_empty(tensor.shape, dtype=saved_dtype(tensor.dtype) if waits else tensor.dtype)

    return tuple(one(t, needed) for t, needed in zip((hidden, weight, bias), run.bits(needs)))


def _values(form: Form) -> tuple:
    return *form.options, *form.shard, form.compute


class _Operator:
    """An operator whose implementation and gradient take its flat arguments as tensors and a ``Form``."""

    def __init__(self, name: str, tensors: str, options: type[NamedTuple], last: str, results: int):
        self.tensors, self.options = len(tensors.split()), options
        self.last = [argument.split()[1] for argument in last.split(", ")]
        text = schema(tensors, (options, VocabShard), last, results)
        self.inputs = self.tensors + len(options._fields) + len(VocabShard._fields) + len(self.last)
        self.name, self.schema = f"logitless::{name}", text

    def inputs_of(self, flat) -> tuple:
        """Returns the tensors and the Form."""
        values, count = flat[self.tensors :], len(self.options._fields)
        options = self.options(*values[:count])
        shard = VocabShard(*values[count : -len(self.last)])
        form = Form(options, shard, **dict(zip(self.last, values[-len(self.last) :])), way=OPERATOR)
        return *flat[: self.tensors], form

    def register(self, implementation, fake, function: Any = None) -> None:
        op = torch.library.custom_op(
            self.name, lambda *flat: implementation(*self.inputs_of(flat)), mutates_args=(), schema=self.schema
        )
        op.register_fake(lambda *flat: fake(*self.inputs_of(flat)))
        if function is None:
            return
        nothing = (None,) * (self.inputs - self.tensors)
        op.register_autograd(
            lambda ctx, *gradients: (*function.backward(ctx, *gradients)[:-1], *nothing),
            setup_context=lambda ctx, inputs, output: function.setup_context(ctx, self.inputs_of(inputs), output),
        )


def _fake_cross_entropy(hidden, weight, target, bias, *more):
    *_, grad_losses, form = more
    none, lead = form.options.reduction == "none", hidden.shape[:-1]
    number = run.accumulated(form.compute or hidden.dtype)
    return (
        hidden.new_empty(lead if none else (), dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead if form.argmax else (0,), dtype=torch.int64),
        *fake_gradients(hidden, weight, bias, 0 if none and grad_losses is None else form.needs, not none),
    )


def _fake_head(hidden, weight, target, bias, form):
    number = run.accumulated(form.compute or hidden.dtype)
    lead = hidden.shape[:-1]
    return (
        hidden.new_empty(target.shape, dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead if form.argmax else (0,), dtype=torch.int64),
    )


def _fake_head_backward(hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, form):
    return fake_gradients(hidden, weight, bias, form.needs, False)


_LAST = "ScalarType? compute, SymInt needs"
_Operator("cross_entropy", f"{LOSS_TENSORS} grad_losses?", LossOptions, f"{_LAST}, bool argmax", 6).register(
    run.run_cross_entropy, _fake_cross_entropy, CrossEntropy
)
_Operator("head", _HEAD, HeadOptions, f"{_LAST}, bool argmax", 4).register(run.run_head, _fake_head, Head)
_Operator("head_backward", f"{_HEAD} d_log_prob? d_entropy? d_lse?", HeadOptions, _LAST, 3).register(
    run.run_head_backward, _fake_head_backward
)
