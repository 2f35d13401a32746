"""The operators ``torch.ops.logitless.*`` and their gradients.

Eager code runs them as autograd functions, without the dispatcher's overhead. torch.compile and other tracers see the
operators with their fake implementations. Both call the functions below whose names begin with ``run``.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .._options import HeadOptions, LossOptions
from . import _engine, _float64
from ._ranks import ALL, VocabShard, raise_on_all_ranks

HIDDEN, WEIGHT, BIAS = 1, 2, 4  # bits of `needs`


def _bits(needs: int) -> tuple[bool, bool, bool]:
    return bool(needs & HIDDEN), bool(needs & WEIGHT), bool(needs & BIAS)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of losses and other numbers per token."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_ALIGNMENT = 16  # in bytes; rows must be aligned for TMA


def _compute(tensor: Tensor, compute: Optional[torch.dtype]) -> Tensor:
    """Returns the tensor in the engine's form: in the dtype of computation, and on a GPU with aligned rows."""
    tensor = tensor.resolve_neg()
    if compute is not None and tensor.dtype != compute:
        tensor = tensor.to(compute)
    if tensor.device.type == "cuda" and not rows_are_aligned(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def rows_are_aligned(tensor: Tensor) -> bool:
    """Returns whether rows are contiguous and aligned to 16 bytes, or would be in a contiguous copy."""
    size, width = tensor.element_size(), tensor.shape[-1]
    if tensor.stride(-1) != 1 or tensor.data_ptr() % _ALIGNMENT:
        return False
    if tensor.dim() < 2:
        return True
    stride = tensor.stride(-2)
    return stride == width or (stride > width and stride * size % _ALIGNMENT == 0)


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a gradient that waits for its upstream gradient. float16 lacks the range and is rounded to
    later."""
    return torch.float32 if dtype == torch.float16 else dtype


def _gradient_like(tensor: Tensor, compute_dtype: torch.dtype, waits: bool = False) -> Tensor:
    """Allocates a gradient: in the tensor's dtype if the engine writes it, else in fp32. waits: the upstream gradient
    is not known yet."""
    dtype = tensor.dtype if tensor.dtype in (compute_dtype, torch.float32) else torch.float32
    return torch.empty(tensor.shape, dtype=saved_dtype(dtype) if waits else dtype, device=tensor.device)


def _vectors(device, *tensors):
    """Returns vectors over vocabulary and tokens in the engine's form; on a GPU contiguous and fp32."""
    tensors = tuple(t if t is None else t.resolve_neg() for t in tensors)
    if device.type == "cpu":
        return tensors
    return tuple(
        t if t is None else (t.contiguous() if t.dtype in (torch.int32, torch.int64) else t.float().contiguous())
        for t in tensors
    )


def _bias(bias: Optional[Tensor], weight: Tensor) -> Optional[Tensor]:
    """Returns the bias in the engine's form: fp32 or the dtype of weight."""
    return bias if bias is None or bias.dtype in (torch.float32, weight.dtype) else bias.to(torch.float32)


def _finish(gradient: Tensor, tensor: Tensor, waits: bool = False) -> Tensor:
    """Casts the gradient to the tensor's dtype, or to the dtype in which it is saved."""
    return gradient.to(saved_dtype(tensor.dtype) if waits else tensor.dtype)


def dtypes_of(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the final dtypes of the three gradients."""
    return hidden.dtype, weight.dtype, hidden.dtype if bias is None else bias.dtype


def _empty(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0)


def _float64_targets(target: Tensor, hidden: Tensor) -> Tensor:
    """Reshapes the target to int64 [N, K]."""
    lead = hidden.shape[:-1]
    return target.reshape(lead.numel(), target.shape[len(lead):].numel()).to(torch.int64)


def _made(reduction: str, grad_losses: Optional[Tensor], needs: int) -> int:
    """Returns the gradients that a call computes. Without upstream gradients, those of reduction "none" have to wait.
    """
    return 0 if reduction == "none" and grad_losses is None else needs


def run_cross_entropy(
    hidden, weight, target, bias, class_weight, token_weight, target_weight, grad_losses, options: LossOptions,
    compute: Optional[torch.dtype], needs: int, argmax: bool, vocab_shard: VocabShard = ALL, waits: Optional[bool] = None,
):
    """Returns (loss, lse, argmax, d_hidden, d_weight, d_bias); an argmax or gradient that is not asked for is empty.
    waits: the gradients will be multiplied by an upstream gradient, and have the dtypes in which they are saved until
    then (None: for a mean or sum)."""
    x, w = _compute(hidden, compute), _compute(weight, compute)
    b = bias
    waits = options.reduction != "none" if waits is None else waits
    need_hidden, need_weight, need_bias = _bits(_made(options.reduction, grad_losses, needs))
    lead = hidden.shape[:-1]
    if x.dtype == torch.float64:
        rows = lead.numel()
        flat = [None if t is None else t.reshape(rows, *t.shape[len(lead):]) for t in (token_weight, target_weight, grad_losses)]
        loss, lse, index, *gradients = _float64.cross_entropy(
            options, x.reshape(rows, x.shape[-1]), w, b, _float64_targets(target, hidden), class_weight,
            flat[0], flat[1], flat[2], (need_hidden, need_weight, need_bias),
        )
        if options.reduction == "none":
            loss = loss.reshape(lead)
        if gradients[0] is not None:
            gradients[0] = gradients[0].reshape(hidden.shape)
        return loss, lse.reshape(lead), index.reshape(lead), *[
            _empty(x) if g is None else g for g in gradients
        ]
    device = x.device
    target, b, class_weight, token_weight, target_weight, grad_losses = _vectors(
        device, target, b, class_weight, token_weight, target_weight, grad_losses
    )
    b = _bias(b, w)
    loss = torch.empty(lead if options.reduction == "none" else (), dtype=torch.float32, device=device)
    lse = torch.empty(lead, dtype=torch.float32, device=device)
    index = torch.empty(lead if argmax else (0,), dtype=torch.int64, device=device)
    d_hidden = _gradient_like(hidden, x.dtype, waits) if need_hidden else None
    d_weight = _gradient_like(weight, x.dtype, waits) if need_weight else None
    d_bias = torch.empty(bias.shape, dtype=torch.float32, device=device) if need_bias else None
    _engine.cross_entropy(
        options,
        dict(hidden=x, weight=w, targets=target, bias=b, class_weight=class_weight, token_weight=token_weight,
             target_weight=target_weight, grad_losses=grad_losses),
        dict(loss=loss, d_hidden=d_hidden, d_weight=d_weight, d_bias=d_bias, lse=lse, argmax=index if argmax else None),
        vocab_shard,
    )
    return (
        loss, lse, index,
        _empty(x) if d_hidden is None else _finish(d_hidden, hidden, waits),
        _empty(x) if d_weight is None else _finish(d_weight, weight, waits),
        _empty(x) if d_bias is None else _finish(d_bias, bias, waits),
    )


def run_head(
    hidden, weight, target, bias, options: HeadOptions, compute, argmax: bool, vocab_shard: VocabShard = ALL, entropy: bool = True
):
    """Returns (log_prob, entropy, lse, argmax). log_prob is shaped as target, the others are [...]. argmax is -1 for
    ignored tokens, and empty unless asked for. So is the entropy, except in float64."""
    x, w = _compute(hidden, compute), _compute(weight, compute)
    lead = hidden.shape[:-1]
    if x.dtype == torch.float64:
        log_prob, made, lse, index = _float64.head(
            options, x.reshape(lead.numel(), x.shape[-1]), w, bias, _float64_targets(target, hidden)
        )
        index = index.reshape(lead) if argmax else index[:0]
        return log_prob.reshape(target.shape), made.reshape(lead), lse.reshape(lead), index
    target, b = _vectors(x.device, target, bias)
    outputs = head_outputs(target, lead, argmax, entropy)
    _engine.head_forward(options, dict(hidden=x, weight=w, targets=target, bias=_bias(b, w)), outputs, vocab_shard)
    return head_results(outputs)


def head_outputs(target: Tensor, lead: torch.Size, argmax: bool, entropy: bool) -> dict[str, Optional[Tensor]]:
    """Allocates the outputs of a head, by the C struct's names."""
    number = dict(dtype=torch.float32, device=target.device)
    return dict(
        log_prob=torch.empty(target.shape, **number),
        entropy=torch.empty(lead, **number) if entropy else None,
        lse=torch.empty(lead, **number),
        argmax=torch.empty(lead, dtype=torch.int32, device=target.device) if argmax else None,  # GPUs write int32
    )


def head_results(outputs: dict[str, Optional[Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (log_prob, entropy, lse, argmax); those without memory are empty."""
    log_prob, entropy, lse, index = outputs.values()
    index = lse.new_empty(0, dtype=torch.int64) if index is None else index.to(torch.int64)
    return log_prob, lse.new_empty(0) if entropy is None else entropy, lse, index


def run_head_backward(
    hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, options: HeadOptions, compute, needs, vocab_shard: VocabShard = ALL
):
    x, w = _compute(hidden, compute), _compute(weight, compute)
    need = _bits(needs)
    if x.dtype == torch.float64:
        rows = hidden.shape[:-1].numel()
        cotangents = [
            None if d_log_prob is None else d_log_prob.reshape(rows, target.shape[hidden.dim() - 1 :].numel()),
            None if d_entropy is None else d_entropy.reshape(rows),
            None if d_lse is None else d_lse.reshape(rows),
        ]
        gradients = list(
            _float64.head(options, x.reshape(rows, x.shape[-1]), w, bias, _float64_targets(target, hidden), cotangents, need)
        )
        if gradients[0] is not None:
            gradients[0] = gradients[0].reshape(hidden.shape)
        return tuple(_empty(x) if g is None else g for g in gradients)
    device = x.device
    target, b, d_log_prob, d_entropy, d_lse = _vectors(device, target, bias, d_log_prob, d_entropy, d_lse)
    b = _bias(b, w)
    d_hidden = _gradient_like(hidden, x.dtype) if need[0] else None
    d_weight = _gradient_like(weight, x.dtype) if need[1] else None
    d_bias = torch.empty(bias.shape, dtype=torch.float32, device=device) if need[2] else None
    _engine.head_backward(
        options,
        dict(hidden=x, weight=w, targets=target, bias=b),
        dict(lse=d_lse, log_prob=d_log_prob, entropy=d_entropy),
        dict(d_hidden=d_hidden, d_weight=d_weight, d_bias=d_bias),
        vocab_shard,
    )
    return (
        _empty(x) if d_hidden is None else _finish(d_hidden, hidden),
        _empty(x) if d_weight is None else _finish(d_weight, weight),
        _empty(x) if d_bias is None else _finish(d_bias, bias),
    )


# --- Operators. Options and vocabulary shards are passed as separate arguments; `compute` is a dtype of computation or
# None.


def _schema(tensors: str, options: tuple[type[NamedTuple], ...], last: str, results: int) -> str:
    """Returns the schema of an operator: tensors ("?": may be None), options one by one, and the last arguments."""
    kinds = {"str": "str", "int": "SymInt", "float": "float", "bool": "bool"}
    arguments = [f"Tensor? {name[:-1]}" if name.endswith("?") else f"Tensor {name}" for name in tensors.split()]
    values = [item for kind in options for item in kind._field_defaults.items()]
    arguments += [f"{kinds[type(value).__name__]} {name}" for name, value in values]
    return f"({', '.join([*arguments, last])}) -> ({', '.join(['Tensor'] * results)})"


_LOSS_TENSORS = "hidden weight target bias? class_weight? token_weight? target_weight? grad_losses?"
_LOSS_SCHEMA = _schema(_LOSS_TENSORS, (LossOptions, VocabShard), "ScalarType? compute, SymInt needs, bool argmax", 6)
_VALUES = len(LossOptions._fields) + len(VocabShard._fields)
_LOSS_INPUTS = len(_LOSS_TENSORS.split()) + _VALUES + 3


def split_values(options: type[NamedTuple], values) -> tuple[NamedTuple, VocabShard]:
    """Returns the options and the vocabulary shard from the flat values of an operator."""
    count = len(options._fields)
    return options(*values[:count]), VocabShard(*values[count:])


def _fake_gradients(hidden, weight, bias, compute, needs: int, waits: bool):
    """Returns the three gradients as fake tensors, in the form of the functions that begin with ``run``."""

    def one(tensor, needed):
        if not needed:
            return hidden.new_empty(0, dtype=compute or hidden.dtype)
        return tensor.new_empty(tensor.shape, dtype=saved_dtype(tensor.dtype) if waits else tensor.dtype)

    return tuple(one(t, needed) for t, needed in zip((hidden, weight, bias), _bits(needs)))


@torch.library.custom_op("logitless::cross_entropy", mutates_args=(), schema=_LOSS_SCHEMA)
def cross_entropy_op(
    hidden, weight, target, bias, class_weight, token_weight, target_weight, grad_losses, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *values, compute, needs, argmax = rest
    options, vocab_shard = split_values(LossOptions, values)
    return run_cross_entropy(
        hidden, weight, target, bias, class_weight, token_weight, target_weight, grad_losses, options, compute,
        needs, argmax, vocab_shard,
    )


@cross_entropy_op.register_fake
def _(hidden, weight, target, bias, class_weight, token_weight, target_weight, grad_losses, *rest):
    *values, compute, needs, argmax = rest
    reduction = split_values(LossOptions, values)[0].reduction
    number = _accumulated(compute or hidden.dtype)
    lead = hidden.shape[:-1]
    return (
        hidden.new_empty(lead if reduction == "none" else (), dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead if argmax or number == torch.float64 else (0,), dtype=torch.int64),
        *_fake_gradients(hidden, weight, bias, compute, _made(reduction, grad_losses, needs), reduction != "none"),
    )


def _setup_loss(ctx, inputs, output):
    (hidden, weight, target, bias, class_weight, token_weight, target_weight, grad_losses, *values, compute, needs,
     argmax) = inputs
    ctx.options, ctx.vocab_shard = split_values(LossOptions, values)
    ctx.compute, ctx.needs = compute, needs
    ctx.set_materialize_grads(False)
    if ctx.options.reduction == "none":
        ctx.save_for_backward(hidden, weight, target, bias, class_weight, token_weight, target_weight)
    else:
        ctx.dtypes = dtypes_of(hidden, weight, bias)
        ctx.save_for_backward(*output[3:])


def multiplied(gradients, d_loss: Tensor, dtypes):
    """Multiplies gradients, computed for an upstream gradient of 1, by this one, with operations that tracers see."""
    return [(g.to(d_loss.dtype) * d_loss).to(dtype) for g, dtype in zip(gradients, dtypes)]


def _loss_backward(ctx, d_loss, d_lse=None, *_):
    nothing = (None,) * (_LOSS_INPUTS - 4)
    if d_lse is not None:
        raise RuntimeError("linear_cross_entropy: the lse of this operator has no gradient; use linear_logprobs")
    if d_loss is None:
        return (None, None, None, None, *nothing)
    need = _bits(ctx.needs)
    if ctx.options.reduction == "none":
        hidden, weight, target, bias, class_weight, token_weight, target_weight = ctx.saved_tensors
        *_, d_hidden, d_weight, d_bias = torch.ops.logitless.cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, d_loss, *ctx.options, *ctx.vocab_shard,
            ctx.compute, ctx.needs, False,
        )
        gradients = (d_hidden, d_weight, d_bias)
    else:
        gradients = multiplied(ctx.saved_tensors, d_loss, ctx.dtypes)
    d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, need))
    return (d_hidden, d_weight, None, d_bias, *nothing)


cross_entropy_op.register_autograd(_loss_backward, setup_context=_setup_loss)


_HEAD_SCHEMA = _schema(
    "hidden weight target bias?", (HeadOptions, VocabShard), "ScalarType? compute, SymInt needs, bool argmax", 4
)
_HEAD_BACKWARD_SCHEMA = _schema(
    "hidden weight target bias? d_log_prob? d_entropy? d_lse?", (HeadOptions, VocabShard), "ScalarType? compute, SymInt needs", 3
)
_HEAD_INPUTS = 4 + len(HeadOptions._fields) + len(VocabShard._fields) + 3


@torch.library.custom_op("logitless::head", mutates_args=(), schema=_HEAD_SCHEMA)
def head_op(hidden, weight, target, bias, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, compute, _needs, argmax = rest
    options, vocab_shard = split_values(HeadOptions, values)
    return run_head(hidden, weight, target, bias, options, compute, argmax, vocab_shard)


@head_op.register_fake
def _(hidden, weight, target, bias, *rest):
    *_, compute, _needs, argmax = rest
    number = _accumulated(compute or hidden.dtype)
    lead = hidden.shape[:-1]
    return (
        hidden.new_empty(target.shape, dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead, dtype=number),
        hidden.new_empty(lead if argmax else (0,), dtype=torch.int64),
    )


@torch.library.custom_op("logitless::head_backward", mutates_args=(), schema=_HEAD_BACKWARD_SCHEMA)
def head_backward_op(
    hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, *rest
) -> tuple[Tensor, Tensor, Tensor]:
    *values, compute, needs = rest
    options, vocab_shard = split_values(HeadOptions, values)
    return run_head_backward(
        hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, options, compute, needs, vocab_shard
    )


@head_backward_op.register_fake
def _(hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, *rest):
    *_, compute, needs = rest
    return _fake_gradients(hidden, weight, bias, compute, needs, False)


def _setup_head(ctx, inputs, output):
    hidden, weight, target, bias, *values, compute, needs, _ = inputs
    ctx.options, ctx.vocab_shard = split_values(HeadOptions, values)
    ctx.compute, ctx.needs = compute, needs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias)


def _head_backward(ctx, d_log_prob, d_entropy, d_lse, *_):
    nothing = (None,) * (_HEAD_INPUTS - 4)
    if (d_log_prob is None and d_entropy is None and d_lse is None) or not ctx.needs:
        return (None, None, None, None, *nothing)
    hidden, weight, target, bias = ctx.saved_tensors
    gradients = torch.ops.logitless.head_backward(
        hidden, weight, target, bias, d_log_prob, d_entropy, d_lse, *ctx.options, *ctx.vocab_shard, ctx.compute, ctx.needs
    )
    d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, _bits(ctx.needs)))
    return (d_hidden, d_weight, None, d_bias, *nothing)


head_op.register_autograd(_head_backward, setup_context=_setup_head)


# --- The same for eager code.


# Tells whether the running backward retains its graph. Versions of PyTorch that do not report it may retain it.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def scaled(gradients, d_loss: Tensor, dtypes=None):
    """Multiplies gradients, computed for an upstream gradient of 1, by this one, and casts them to these dtypes (None:
    unchanged). It works in place unless the graph is retained or the dtype changes. The factor is not rounded to their
    dtype."""
    if _keeps_graph():
        gradients = [g.clone() for g in gradients]
    if d_loss.device.type == "cpu":
        factor = d_loss.item()  # item() is free on a CPU, and the factor is usually 1
        gradients = gradients if factor == 1.0 else [g.mul_(factor) for g in gradients]
    elif d_loss.dtype == torch.float64 or any(g.dtype == torch.float64 for g in gradients):
        gradients = [g.mul_(d_loss) for g in gradients]
    else:
        for first in range(0, len(gradients), 3):
            _engine.scale(gradients[first : first + 3], d_loss)
    return gradients if dtypes is None else [g.to(dtype) for g, dtype in zip(gradients, dtypes)]


def refuse_second_derivatives() -> None:
    """Raises under create_graph=True: only then does a backward record gradients."""
    if torch.is_grad_enabled():
        raise NotImplementedError("logitless: second derivatives (create_graph=True) are not supported")


class LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weight, token_weight, target_weight, options, compute, needs, argmax, vocab_shard
    ):
        none = options.reduction == "none"
        loss, lse, index, *gradients = run_cross_entropy(
            hidden, weight, target, bias, class_weight, token_weight, target_weight, None, options, compute,
            needs, argmax, vocab_shard,
        )
        ctx.options, ctx.compute, ctx.needs, ctx.vocab_shard = options, compute, needs, vocab_shard
        ctx.set_materialize_grads(False)
        if none:
            ctx.save_for_backward(hidden, weight, target, bias, class_weight, token_weight, target_weight)
        else:
            ctx.dtypes = dtypes_of(hidden, weight, bias)
            ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(index, lse)
        return loss, lse, index

    @staticmethod
    def backward(ctx, d_loss, *_):
        refuse_second_derivatives()
        nothing = (None,) * 8
        if d_loss is None:
            return (None, None, None, None, *nothing)
        need = _bits(ctx.needs)
        if ctx.options.reduction == "none":
            *_, d_hidden, d_weight, d_bias = raise_on_all_ranks(
                ctx.vocab_shard.group,
                lambda: run_cross_entropy(
                    *ctx.saved_tensors, d_loss, ctx.options, ctx.compute, ctx.needs, False, ctx.vocab_shard
                ),
            )
            gradients = (d_hidden, d_weight, d_bias)
        else:
            gradients = scaled(ctx.saved_tensors, d_loss, ctx.dtypes)
        d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, need))
        return (d_hidden, d_weight, d_bias, None, *nothing)


class HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, options, compute, needs, argmax, vocab_shard, entropy):
        ctx.options, ctx.compute, ctx.needs, ctx.vocab_shard = options, compute, needs, vocab_shard
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, target, bias)
        *numbers, index = run_head(hidden, weight, target, bias, options, compute, argmax, vocab_shard, entropy)
        ctx.mark_non_differentiable(index)
        return *numbers, index

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, *_):
        refuse_second_derivatives()
        nothing = (None,) * 7
        if d_log_prob is None and d_entropy is None and d_lse is None:
            return (None, None, None, *nothing)
        gradients = raise_on_all_ranks(
            ctx.vocab_shard.group,
            lambda: run_head_backward(
                *ctx.saved_tensors, d_log_prob, d_entropy, d_lse, ctx.options, ctx.compute, ctx.needs, ctx.vocab_shard
            ),
        )
        d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, _bits(ctx.needs)))
        return (d_hidden, d_weight, d_bias, *nothing)
