"""The calls under torch.func: grad, vmap, jacrev and functional_call. A vmap makes one call for each element of its
batch. Second derivatives and forward mode raise errors that name them."""

from __future__ import annotations

import torch

from .._options import HeadOptions, LossOptions
from ._ops import BIAS, HIDDEN, WEIGHT, dtypes_of, multiplied, split_values
from ._ranks import VocabShard


_LOSS_VALUES = len(LossOptions._fields) + len(VocabShard._fields)


def active() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def cross_entropy(*inputs):
    """Returns the outputs of the operator ``logitless::cross_entropy`` for its arguments."""
    return _Loss.apply(*inputs) if active() else torch.ops.logitless.cross_entropy(*inputs)


def head(*inputs):
    """Returns the outputs of the operator ``logitless::head`` for its arguments."""
    return _Head.apply(*inputs) if active() else torch.ops.logitless.head(*inputs)


def _head_backward(*inputs):
    return _HeadBackward.apply(*inputs) if active() else torch.ops.logitless.head_backward(*inputs)


class _Transformed(torch.autograd.Function):
    @classmethod
    def refuse(cls, gradients) -> None:
        if any(g is not None for g in gradients):
            raise NotImplementedError("logitless: second derivatives (torch.func.grad of a gradient) are not supported")

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError("logitless: forward-mode derivatives (torch.func.jvp, jacfwd) are not supported")


def _one_by_one(cls, info, in_dims, args):
    results = []
    for k in range(info.batch_size):
        of = [a.select(d, k) if isinstance(a, torch.Tensor) and d is not None else a for a, d in zip(args, in_dims)]
        results.append(cls.apply(*of))
    return tuple(torch.stack(r) for r in zip(*results)), (0,) * len(results[0])


def _asked(gradients, needs: int):
    return [g if needs & bit else None for g, bit in zip(gradients, (HIDDEN, WEIGHT, BIAS))]


class _Loss(_Transformed):
    @staticmethod
    def forward(*inputs):
        return tuple(cross_entropy(*inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *before, ctx.compute, ctx.needs, _argmax = inputs
        *tensors, _grad_losses = before[:-_LOSS_VALUES]
        ctx.dtypes = dtypes_of(tensors[0], tensors[1], tensors[3])
        ctx.options, ctx.vocab_shard = split_values(LossOptions, before[-_LOSS_VALUES:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(*(tensors if ctx.options.reduction == "none" else output[3:]))

    @staticmethod
    def backward(ctx, d_loss, d_lse, d_index, *more):
        _Transformed.refuse(more)
        nothing = (None,) * (4 + _LOSS_VALUES + 3)
        if d_loss is None:
            return (None, None, None, None, *nothing)
        if ctx.options.reduction == "none":
            gradients = cross_entropy(
                *ctx.saved_tensors, d_loss, *ctx.options, *ctx.vocab_shard, ctx.compute, ctx.needs, False
            )[3:]
        else:
            gradients = multiplied(ctx.saved_tensors, d_loss, ctx.dtypes)
        d_hidden, d_weight, d_bias = _asked(gradients, ctx.needs)
        return (d_hidden, d_weight, None, d_bias, *nothing)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(_Loss, info, in_dims, args)


class _Head(_Transformed):
    @staticmethod
    def forward(*inputs):
        return tuple(head(*inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *before, ctx.compute, ctx.needs, _argmax = inputs
        tensors = before[:4]
        ctx.options, ctx.vocab_shard = split_values(HeadOptions, before[4:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[3])
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, d_log_prob, d_entropy, d_lse, d_index):
        nothing = (None,) * (len(HeadOptions._fields) + len(VocabShard._fields) + 3)
        if d_log_prob is None and d_entropy is None and d_lse is None:
            return (None, None, None, None, *nothing)
        gradients = _head_backward(
            *ctx.saved_tensors, d_log_prob, d_entropy, d_lse, *ctx.options, *ctx.vocab_shard, ctx.compute, ctx.needs
        )
        d_hidden, d_weight, d_bias = _asked(gradients, ctx.needs)
        return (d_hidden, d_weight, None, d_bias, *nothing)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(_Head, info, in_dims, args)


class _HeadBackward(_Transformed):
    @staticmethod
    def forward(*inputs):
        return tuple(_head_backward(*inputs))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.inputs = len(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        _Transformed.refuse(gradients)
        return (None,) * ctx.inputs

    @staticmethod
    def vmap(info, in_dims, *args):
        return _one_by_one(_HeadBackward, info, in_dims, args)
