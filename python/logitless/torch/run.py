"""The C calls on tensors of any supported dtype and layout: converts them to the engine's form, allocates outputs, and
casts gradients to their final dtypes."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import WEIGHTS, HeadOptions, LossOptions
from . import _engine
from ._backend import is_native
from .quantized import QuantizedWeight
from .ranks import ALL, VocabShard

INPUTS = 4 + len(WEIGHTS)  # tensors of a loss: hidden, weight, target, bias and the weights
HIDDEN, WEIGHT, BIAS = 1, 2, 4  # bits of `needs`
EAGER, OPERATOR, TRANSFORM = "eager", "operator", "transform"

_ALIGNMENT = 16  # in bytes; rows must be aligned for TMA


class MainGrad(NamedTuple):
    """A tensor to which a backward adds d_weight, instead of returning it."""

    tensor: Tensor  # [V, D] floating, on weight's device
    added: Callable[[], Optional[Tensor]]  # is called after that, and returns the gradient that autograd gets


class Form(NamedTuple):
    """A call without its tensors."""

    options: LossOptions | HeadOptions
    shard: VocabShard = ALL
    compute: Optional[torch.dtype] = None  # the dtype of autocast
    needs: int = 0  # the gradients that are needed, as bits
    argmax: bool = False
    entropy: bool = True  # of a head
    lse: bool = True  # of a loss
    way: str = EAGER  # how gradients are recorded: EAGER, by an OPERATOR, or under a TRANSFORM of torch.func
    key: Any = None  # the cache key of a plain call
    main_grad: Optional[MainGrad] = None  # of an eager loss of reduction "none"


class SeenLoss(NamedTuple):
    """A call of ``linear_cross_entropy`` that passed its checks, without its tensors."""

    planned: _engine.Call
    needs: int  # of a mean or sum
    dtypes: tuple[torch.dtype, ...]  # of the gradients that are needed


def bits(needs: int) -> tuple[bool, bool, bool]:
    return bool(needs & HIDDEN), bool(needs & WEIGHT), bool(needs & BIAS)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of losses and other numbers per token."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a gradient that waits for its upstream gradient. float16 lacks the range and is rounded to
    later."""
    return torch.float32 if dtype == torch.float16 else dtype


def dtypes_of(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the final dtypes of the three gradients."""
    return hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype


def rows_are_aligned(tensor: Tensor) -> bool:
    """Returns whether rows are contiguous and aligned to 16 bytes, or would be in a contiguous copy."""
    size, width = tensor.element_size(), tensor.shape[-1]
    if tensor.stride(-1) != 1 or tensor.data_ptr() % _ALIGNMENT:
        return False
    if tensor.dim() < 2:
        return True
    stride = tensor.stride(-2)
    return stride == width or (stride > width and stride * size % _ALIGNMENT == 0)


def _operand(tensor: Tensor, compute: Optional[torch.dtype]) -> Tensor:
    """Returns hidden or weight in the dtype of computation, and on a GPU with aligned rows."""
    if isinstance(tensor, QuantizedWeight):
        return tensor  # its blocks get the dtype
    tensor = tensor.resolve_neg()
    if compute is not None and tensor.dtype != compute:
        tensor = tensor.to(compute)
    if tensor.device.type == "cuda" and is_native(tensor) and not rows_are_aligned(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def vector(tensor: Optional[Tensor], x: Tensor) -> Optional[Tensor]:
    """Returns a vector over vocabulary or tokens in the engine's form; on a GPU contiguous, and fp32 or integers. x:
    hidden in the engine's form."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    if x.device.type == "cpu":
        return tensor
    if tensor.dtype not in (torch.int32, torch.int64):
        tensor = tensor.to(accumulated(x.dtype))
    return tensor.contiguous()


def mixes(hidden: Tensor, weight: Tensor, form: Form) -> bool:
    """Returns whether the library multiplies tensors that differ in dtype as they are, one of them fp32."""
    if form.compute != torch.float32 or form.shard.group or isinstance(weight, QuantizedWeight):
        return False
    wide = [t.dtype == torch.float32 for t in (hidden, weight)]
    return sum(wide) == 1 and is_native(hidden) and is_native(weight)


def operands(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], compute, mixes: bool = False
) -> _engine.Tensors:
    """Returns a head's inputs in the engine's form, by the C struct's names. mixes: hidden and weight keep their dtypes.
    A 16-bit weight beside fp32 hidden states does so in any case."""
    x = _operand(hidden, None if mixes else compute)
    w = _operand(weight, None if mixes or hidden.dtype == compute == torch.float32 else compute)
    b = vector(bias, x)
    if b is not None and b.dtype != torch.float32 and (mixes or b.dtype != x.dtype):
        b = b.to(torch.float32)
    return dict(hidden=x, weight=w, targets=vector(target, x), bias=b)


def gradients(tensors, inputs: _engine.Tensors, needs: int, waits: bool = False, device=None) -> _engine.Tensors:
    """Allocates the gradients that are needed, by the C struct's names: in the tensor's dtype if the engine writes it,
    else in fp32. tensors: hidden, weight and bias. waits: the upstream gradient is not known yet. device: of hidden's
    and weight's gradient, if not theirs."""
    x, made = inputs["hidden"], []
    narrow = inputs["weight"].dtype != x.dtype  # one of both has 16 bits beside fp32, and gradients have their dtypes
    for t, needed, rounds in zip(tensors, bits(needs), (False, narrow, False)):
        if not needed:
            made.append(None)
            continue
        own = torch.float32 if narrow and t.dim() == 1 else x.dtype
        exact = (own, torch.float32) if t.dim() > 1 or x.device.type == "cpu" else (accumulated(x.dtype),)
        dtype = t.dtype if t.dtype in exact or rounds else accumulated(x.dtype)
        where = t.device if device is None or t.dim() == 1 else device
        made.append(torch.empty(t.shape, dtype=saved_dtype(dtype) if waits else dtype, device=where))
    return dict(zip(("d_hidden", "d_weight", "d_bias"), made))


def adds_to(main_grad: Optional[MainGrad], w: Tensor) -> bool:
    """Returns whether the engine adds d_weight to main_grad itself, without memory of that size. w: weight in the
    engine's form."""
    if main_grad is None or not is_native(w) or main_grad.tensor.dtype not in (w.dtype, torch.float32):
        return False
    return w.device.type == "cpu" or rows_are_aligned(main_grad.tensor)


def finished(made: _engine.Tensors, tensors, waits: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Casts gradients to the tensors' dtypes, or to those in which they are saved. Those that are not needed are empty.
    """
    return tuple(
        tensors[0].new_empty(0) if g is None else g.to(saved_dtype(t.dtype) if waits else t.dtype)
        for g, t in zip(made.values(), tensors)
    )


def run_cross_entropy(hidden, weight, target, bias, *more, waits: Optional[bool] = None):
    """Returns (loss, lse, argmax, d_hidden, d_weight, d_bias); one that is not asked for is empty or None. waits: the
    gradients will be multiplied by an upstream gradient, and have the dtypes in which they are saved until then (None:
    for a mean or sum). more: the weights, grad_losses and the form."""
    *weights, grad_losses, form = more
    options, lead = form.options, hidden.shape[:-1]
    none = options.reduction == "none"
    waits = not none if waits is None else waits
    inputs = operands(hidden, weight, target, bias, form.compute, mixes(hidden, weight, form))
    x = inputs["hidden"]
    number = dict(dtype=accumulated(x.dtype), device=x.device)
    loss = torch.empty(lead if none else (), **number)
    lse = torch.empty(lead if form.lse else 0, **number)
    index = torch.empty(lead if form.argmax else 0, dtype=torch.int64, device=x.device)
    like = hidden, weight, bias
    # Without upstream gradients, those of reduction "none" have to wait.
    later = form.needs if none and grad_losses is None else 0
    adds = bool(form.needs & WEIGHT) and adds_to(form.main_grad, inputs["weight"])

    def allocated(needs: int, waits: bool = False, device=None) -> _engine.Tensors:
        if form.main_grad is None or not needs & WEIGHT:
            return gradients(like, inputs, needs, waits, device)
        found = gradients(like, inputs, needs - WEIGHT, waits, device)
        if adds:  # to what all gradients hold
            zeros = {name: g if g is None else g.zero_() for name, g in found.items()}
            into = form.main_grad.tensor
            return {**zeros, "d_weight": into if device is None else torch.empty_like(into, device=device)}
        return {**found, "d_weight": torch.empty(weight.shape, dtype=accumulated(x.dtype), device=device or x.device)}

    made = allocated(form.needs - later, waits)
    factors = zip((*WEIGHTS, "grad_losses"), (*weights, grad_losses))
    inputs_of = {**inputs, **{name: vector(t, x) for name, t in factors}}

    def backward():
        upstream = torch.empty(lead, dtype=accumulated(x.dtype), device="meta")
        gradients_of = allocated(later, device="meta")
        return _engine.CROSS_ENTROPY, ({**inputs_of, "grad_losses": upstream}, dict(loss=upstream, **gradients_of))

    call = _engine.run(
        _engine.CROSS_ENTROPY, options, form.shard, inputs_of,
        dict(loss=loss, **made, lse=lse if form.lse else None, argmax=index if form.argmax else None),
        later=bits(later), backward=backward, accumulate=adds,
    )
    if form.main_grad is not None and made["d_weight"] is not None:
        if not adds:
            form.main_grad.tensor.add_(made["d_weight"])
        made["d_weight"] = None
    results = finished(made, like, waits)
    if form.key is not None and call is not None:
        same = all(a is b for a, b in zip(inputs.values(), (hidden, weight, target, bias)))
        if same and all(g is None or g is r for g, r in zip(made.values(), results)):  # nothing was converted
            dtypes = tuple(t.dtype for t, needed in zip(like, bits(form.needs)) if needed)
            _engine.calls.remember(form.key, SeenLoss(call, form.needs, dtypes))
    return loss, lse, index, *results


def head_outputs(target: Tensor, hidden: Tensor, form: Form) -> _engine.Tensors:
    """Allocates the outputs of a head, by the C struct's names. hidden: in the engine's form."""
    lead, number = hidden.shape[:-1], dict(dtype=accumulated(hidden.dtype), device=hidden.device)
    return dict(
        log_prob=torch.empty(target.shape, **number),
        entropy=torch.empty(lead, **number) if form.entropy else None,
        lse=torch.empty(lead, **number),
        argmax=torch.empty(lead, dtype=torch.int32, device=hidden.device) if form.argmax else None,  # GPUs write int32
    )


def head_results(outputs: _engine.Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (log_prob, entropy, lse, argmax); those without memory are empty."""
    log_prob, entropy, lse, index = outputs.values()
    index = lse.new_empty(0, dtype=torch.int64) if index is None else index.to(torch.int64)
    return log_prob, lse.new_empty(0) if entropy is None else entropy, lse, index


def run_head(hidden, weight, target, bias, form: Form):
    """Returns (log_prob, entropy, lse, argmax). log_prob is shaped as target, the others are [...]. argmax is -1 for
    ignored tokens. An entropy or argmax that is not asked for is empty."""
    inputs = operands(hidden, weight, target, bias, form.compute, mixes(hidden, weight, form))
    outputs = head_outputs(target, inputs["hidden"], form)

    def backward():
        cotangents = {n: None if t is None else torch.empty_like(t, device="meta") for n, t in outputs.items() if n != "argmax"}
        return _engine.HEAD_BACKWARD, (inputs, cotangents, gradients((hidden, weight, bias), inputs, form.needs, device="meta"))

    call = _engine.run(_engine.HEAD, form.options, form.shard, inputs, outputs, later=bits(form.needs), backward=backward)
    if form.key is not None and call is not None:
        if all(a is b for a, b in zip(inputs.values(), (hidden, weight, target, bias))):  # nothing was converted
            _engine.calls.remember(form.key, call)
    return head_results(outputs)


def run_head_backward(hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, form: Form):
    """Returns (d_hidden, d_weight, d_bias); those that are not needed are empty."""
    inputs = operands(hidden, weight, target, bias, form.compute, mixes(hidden, weight, form))
    d_log_prob, d_entropy, d_lse = (vector(t, inputs["hidden"]) for t in (d_log_prob, d_entropy, d_lse))
    made = gradients((hidden, weight, bias), inputs, form.needs)
    cotangents = dict(lse=d_lse, log_prob=d_log_prob, entropy=d_entropy)
    _engine.run(_engine.HEAD_BACKWARD, form.options, form.shard, inputs, cotangents, made)
    return finished(made, (hidden, weight, bias))
