"""A temperature for each token of ``linear_logprobs`` and ``linear_cross_entropy``; ``_losses/tempered.py`` says how."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .._losses import tempered as shared
from .._options import DEFAULT, HeadOptions, head_options
from . import _memory, _portable, _xp, autograd, run
from ._arguments import Arguments, loss_options
from ._backend import is_native
from ._precision import autocast_dtype
from .call import Asked, check_head, check_tensors, checked_call, compute_dtype, head_arguments, needs_of, with_outputs
from .dtensor import _is_dtensor
from .quantized import QuantizedWeight
from .run import EAGER, TRANSFORM, Form


class _Head(autograd.Function):
    """The head in PyTorch's operations with logits divided by temperatures [N], which are constants here. Returns
    (log_prob, entropy, lse, argmax, variance of the logits); the last is empty unless wanted, without a gradient."""

    @staticmethod
    def forward(hidden, weight, target, bias, temperature, form: Form, variance: bool):
        inputs = run.operands(hidden, weight, target, bias, form.compute)
        outputs = run.head_outputs(target, inputs["hidden"], form)
        more = torch.empty_like(outputs["lse"]) if variance else None
        _portable.run("head", form.options, form.shard, {**inputs, "temperature": temperature}, {**outputs, "variance": more})
        log_prob, entropy, lse, argmax = run.head_results(outputs)
        return log_prob, entropy, lse, argmax, lse.new_empty(0) if more is None else more

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.form, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, *_):
        nothing = (None,) * 7
        if ctx.form.way == EAGER:
            autograd.check_backward(d_log_prob, d_entropy, d_lse)
        if (d_log_prob is None and d_entropy is None and d_lse is None) or not ctx.form.needs:
            return nothing
        backward = _gradients if ctx.form.way == EAGER else _HeadBackward.apply
        made = backward(*ctx.saved_tensors, d_log_prob, d_entropy, d_lse, ctx.form)
        d_hidden, d_weight, d_bias = autograd.needed(made, ctx.form.needs)
        return d_hidden, d_weight, None, d_bias, *nothing[4:]


def _gradients(hidden, weight, target, bias, temperature, d_log_prob, d_entropy, d_lse, form: Form):
    inputs = run.operands(hidden, weight, target, bias, form.compute)
    made = run.gradients((hidden, weight, bias), inputs, form.needs)
    cotangents = dict(lse=d_lse, log_prob=d_log_prob, entropy=d_entropy)
    inputs["temperature"] = temperature
    _portable.run("head_backward", form.options, form.shard, inputs, cotangents, made)
    return tuple(run.finished(made, (hidden, weight, bias)))


class _HeadBackward(autograd.Function):
    """``_gradients`` under transforms of torch.func."""

    forward = staticmethod(_gradients)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients):
        autograd.Function.refuse(gradients)
        return (None,) * 9


_head = torch.compiler.disable(_Head.apply)


def folded(a: Arguments) -> Arguments:
    """Returns the arguments without a temperature, if softcap and scale or the hidden states can take it."""
    if not isinstance(a.temperature, Tensor):
        return a._replace(temperature=None, **shared.scaled_options(a.temperature, a.softcap, a.logit_scale))
    if not isinstance(a.hidden, Tensor) or not isinstance(a.weight, Tensor):
        return a._replace(temperature=None)  # the checks of the call name them
    _memory.check("temperature", a.temperature, a.hidden.device)
    if not a.temperature.is_floating_point():
        raise TypeError(f"temperature: expected floats, got {a.temperature.dtype}")
    t = _xp.shaped("temperature", a.temperature, tuple(a.hidden.shape[:-1]), ()).expand(a.hidden.shape[:-1])
    dtype = divided_dtype(a)
    if dtype is None:
        return a._replace(temperature=t)
    if isinstance(a.target, Tensor) and not a.target.is_floating_point():
        ignored = DEFAULT.ignore_index if a.ignore_index is None else a.ignore_index
        t = shared.of_counted(_xp, t, a.target, ignored, a.shift if isinstance(a.shift, int) else 0)
    return a._replace(hidden=a.hidden.to(dtype) / t.to(dtype)[..., None], temperature=None)


def divided_dtype(a: Arguments) -> Optional[torch.dtype]:
    """Returns the dtype in which hidden states are divided by a temperature for each token; None if logits are."""
    if a.bias is not None or a.softcap is not None:
        return None
    dtype = compute_dtype(a.hidden, a.weight, blocks=True) or a.hidden.dtype
    if dtype in (torch.float32, torch.float64):
        return dtype
    # A CPU's kernels multiply fp32 hidden states by a 16-bit weight as it is. Autocast would round them.
    whole = a.sharding is None and not any(map(_is_dtensor, (a.hidden, a.weight, a.temperature)))
    plain = whole and not isinstance(a.weight, QuantizedWeight) and autocast_dtype("cpu") is None
    return torch.float32 if plain and a.hidden.device.type == "cpu" and is_native(a.hidden) else None


def _outputs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], temperature: Tensor, options: HeadOptions,
    asked: Asked,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (log_prob, entropy, lse, argmax) with gradients, also by the temperatures. The tensors are of one rank, and
    flat."""
    by_temperature = temperature.requires_grad and torch.is_grad_enabled()
    needs = needs_of(hidden, weight, bias)
    form = Form(options, compute=compute_dtype(hidden, weight, blocks=True), needs=needs, argmax=asked.argmax, entropy=asked.entropy or by_temperature,
        way=TRANSFORM if autograd.transformed() else EAGER)
    log_prob, entropy, lse, argmax, variance = _head(
        hidden, weight, target, bias, temperature.detach(), form, by_temperature
    )
    if by_temperature:
        log_prob, entropy, lse = shared.attached(
            _xp, temperature, target, options.ignore_index, log_prob, entropy, lse, variance
        )
    return log_prob, entropy, lse, argmax


def _refuse(a: Arguments) -> None:
    if a.sharding is not None or any(map(_is_dtensor, (a.hidden, a.weight, a.bias, a.temperature))):
        raise NotImplementedError(
            "temperature: one for each token goes with a sharded head in float32, without bias and softcap, alone"
        )


def log_probs(a: Arguments, asked: Asked) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes linear_logprobs with a temperature for each token, as ``call.log_probs`` does."""
    _refuse(a)
    if asked.keep:
        raise ValueError("keep: expected None or False beside a temperature for each token, got True")
    check_tensors(a)
    flat, shape = head_arguments(a)
    lead = a.hidden.shape[:-1]
    found = _outputs(*flat, a.temperature.reshape(flat[0].shape[:-1]), head_options(loss_options(a)), asked)
    log_prob, entropy, lse, argmax = found
    entropy = entropy.reshape(lead) if entropy.numel() == lse.numel() else entropy
    return log_prob.reshape(shape), entropy, lse.reshape(lead), argmax.reshape(lead) if asked.argmax else argmax


def cross_entropy(a: Arguments) -> Any:
    """Computes linear_cross_entropy with a temperature for each token."""
    _refuse(a)
    check_tensors(a)
    if a.weight.dim() > 2:
        raise NotImplementedError(f"temperature: does not go with a weight of {a.weight.dim()} dimensions")
    call = checked_call(a)
    t = a.temperature.reshape(a.hidden.shape[:-1])
    t = (t[..., : t.shape[-1] - int(a.shift)] if a.shift else t).reshape(call.hidden.shape[:-1])
    asked = Asked(call.argmax or call.accuracy, entropy=False)
    log_prob, _, lse, index = _outputs(
        call.hidden, call.weight, call.target, call.bias, t, head_options(call.options), asked
    )
    loss = shared.loss(_xp, call.options, log_prob, lse, call.target, call.weights)
    return with_outputs(call, loss, lse, index, log_prob)
