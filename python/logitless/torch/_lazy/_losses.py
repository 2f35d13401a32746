"""Functions of lazy logits that need no logits: cross entropy, likelihood of targets, log-sum-exp.

Each rule takes the arguments of PyTorch's function. It returns NotImplemented if it does not apply; then the logits are
computed for the function.
"""

from __future__ import annotations

from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd import is_batch
from ..loss import linear_cross_entropy, linear_logprobs
from ._form import Form
from ._gradient import LazyGradient, refuse_spread_derivatives
from ._tensor import RULES, LazyLogits, shadow, top_hooks
from ._traced import loss_of_targets

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_NO_TARGET = -(1 << 40)  # an ignore_index outside of any range


def _open(x) -> bool:
    """Returns whether a loss of x may run without logits: they are not computed yet, and x's gradient reaches the
    head's calls."""
    return (
        isinstance(x, LazyLogits)
        and x._form is not None
        and not x._form.after_tanh
        and x._storage.real is None
        and (x.numel() > 0 or x._form.spread)
        and (not (torch.is_grad_enabled() and x.requires_grad) or x._form.tracks)
    )


def _has(x, vocab: int, log: bool) -> bool:
    return _open(x) and x._form.vocab == vocab and x._form.log == log


class _Fused(torch.autograd.Function):
    """``fused(hidden, weight, bias)``, which equals ``plain(x)``, as a function of x."""

    @staticmethod
    def forward(ctx, x, fused, plain, track, dtype, keeps):
        form = x._form
        leaves = form.leaves(track)
        with torch.set_grad_enabled(track), form.parts[0].call.autocast():
            ctx.inner = fused(form, *form.head(leaves))
        if track:
            ctx.form, ctx.leaves, ctx.plain = form, leaves, plain
            ctx.x, ctx.version, ctx.dtype = x, x._version, dtype
            ctx.checks = keeps and top_hooks(True) is None  # hooks copy saved tensors, so later edits are harmless
            with shadow():
                ctx.like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        result = ctx.inner.detach()
        return result if result.dtype == dtype else result.to(dtype)

    @staticmethod
    def backward(ctx, upstream):
        form, plain, dtype = ctx.form, ctx.plain, ctx.dtype
        nothing = (None,) * 5
        if ctx.inner is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time; specify retain_graph=True the first time"
            )
        if ctx.checks and ctx.x._version != ctx.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"LazyLogits {list(ctx.x.shape)} is at version {ctx.x._version}; expected version {ctx.version} instead"
            )
        # create_graph, and batches of upstream gradients, use the derivatives of real logits.
        if torch.is_grad_enabled() or is_batch(upstream):
            refuse_spread_derivatives(form.spread)
            if ctx.x._version != ctx.version:
                raise RuntimeError("LazyLogits: modified in place since the loss that create_graph=True differentiates again")
            with torch.enable_grad():
                result = plain(ctx.x._ordinary().to(dtype))
            upstream = upstream.to(result.dtype)
            return torch.autograd.grad(result, ctx.x, upstream, create_graph=torch.is_grad_enabled())[0], *nothing
        again = _keeps_graph()
        flat = [t for leaves in ctx.leaves for t in leaves if t is not None and t.requires_grad]
        gradients = iter(
            torch.autograd.grad(ctx.inner, flat, upstream.to(ctx.inner.dtype), retain_graph=again, allow_unused=True)
        )
        known = {
            call: [tuple(next(gradients) if t is not None and t.requires_grad else None for t in leaves)]
            for call, leaves in zip(form.calls, ctx.leaves)
        }
        if not again:
            ctx.inner = ctx.leaves = None

        def make():
            x = form.value().requires_grad_()
            result = plain(x if x.dtype == dtype else x.to(dtype))
            return torch.autograd.grad(result, x, upstream.to(result.dtype))[0]

        return LazyGradient(ctx.like, upstream.device, known, make), *nothing


def _dtype(x: LazyLogits, tiny: Callable) -> torch.dtype:
    """Returns the result's dtype of PyTorch's function on x under autocast. tiny: the function, for logits [1, 2]."""
    with torch.no_grad():
        return tiny(torch.zeros(1, 2, dtype=x.dtype, device=x.device)).dtype


def _loss_of(form: Form, reduction: str, soft: bool = False) -> Callable:
    """Returns linear_cross_entropy with the head's options, or the far-field head whose step replaces it."""
    call = form.parts[0].call
    if call.far is not None and not soft and reduction != "none":
        return call.far
    return partial(linear_cross_entropy, expected_ignored=call.expected_ignored)


def _apply(x: LazyLogits, fused: Callable, plain: Callable, tiny: Callable, dtype=None, keeps=False):
    """Applies the fused function to x. Returns NotImplemented if it rejects the arguments, so that PyTorch raises the
    error. keeps: PyTorch's function saves x for its backward."""
    track = torch.is_grad_enabled() and x.requires_grad
    try:
        result = _dtype(x, tiny) if torch.is_autocast_enabled(x.device.type) else dtype or x.dtype
        return _Fused.apply(x, fused, plain, track, result, keeps)
    except (ValueError, TypeError, NotImplementedError) as error:
        if track and x._form.parts[0].call.far is not None:
            raise  # a call that the far field rejects has no fallback
        if x._form.spread and not isinstance(error, NotImplementedError):
            raise  # all ranks raise it, and must make the same calls afterwards
        return NotImplemented


def _cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    x = input
    if not _has(x, 0 if x.dim() == 1 else 1, log=False) or size_average is not None or reduce is not None:
        return NotImplemented
    soft = isinstance(target, Tensor) and target.is_floating_point()
    if not _targets(x, target, soft) or not _weight(x, weight) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if soft and (target.requires_grad or ignore_index >= 0 or x.shape[x._form.vocab] > 65536):
        return NotImplemented

    def fused(form: Form, hidden, weights, bias):
        targets = target.movedim(form.vocab, -1) if soft else target
        return loss_of_targets(
            _loss_of(form, reduction, soft), hidden, weights, targets, bias, weight, None if soft else ignore_index,
            reduction, label_smoothing=label_smoothing, softcap=form.softcap, logit_scale=form.scale,
        )

    def plain(z):
        return F.cross_entropy(z, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)

    return _apply(x, fused, plain, lambda z: F.cross_entropy(z, z.new_zeros(1, dtype=torch.int64)))


def _targets(x: LazyLogits, target, soft: bool) -> bool:
    if type(target) is not Tensor or target.device != x.device:
        return False
    if soft:
        return target.shape == x.shape
    lead = list(x.shape)
    del lead[x._form.vocab]
    return target.dtype == torch.int64 and list(target.shape) == lead


def _weight(x: LazyLogits, weight) -> bool:
    return weight is None or (
        isinstance(weight, Tensor) and weight.dtype == x.dtype and weight.device == x.device and not weight.requires_grad
        and list(weight.shape) == [x.shape[x._form.vocab]]
    )


def _nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    x = input
    if not _has(x, 0 if x.dim() == 1 else 1, log=True) or size_average is not None or reduce is not None:
        return NotImplemented
    if not _targets(x, target, False) or not _weight(x, weight) or reduction not in ("none", "mean", "sum"):
        return NotImplemented

    def fused(form: Form, hidden, weights, bias):
        loss = loss_of_targets(
            _loss_of(form, reduction), hidden, weights, target, bias, weight, ignore_index, reduction,
            softcap=form.softcap, logit_scale=form.scale,
        )
        return loss if form.factor == 1.0 else loss * form.factor

    plain = lambda z: F.nll_loss(z, target, weight, ignore_index=ignore_index, reduction=reduction)  # noqa: E731
    return _apply(x, fused, plain, lambda z: F.nll_loss(z, z.new_zeros(1, dtype=torch.int64)), keeps=True)


def _last(x, dim) -> bool:
    """Returns whether dim is the vocabulary's and the last."""
    return isinstance(dim, int) and _open(x) and x._form.vocab == x.dim() - 1 and dim in (-1, x.dim() - 1)


def _gather(input, dim, index, *, sparse_grad=False, out=None):
    x = input
    if not _last(x, dim) or sparse_grad or out is not None or type(index) is not Tensor or index.dtype != torch.int64:
        return NotImplemented
    if x.dim() < 2 or index.dim() != x.dim() or index.shape[:-1] != x.shape[:-1]:
        return NotImplemented
    if not index.numel() and not (x._form.spread and index.shape[-1]):
        return NotImplemented

    def fused(form: Form, hidden, weights, bias):
        log_prob, _, lse = linear_logprobs(
            hidden, weights, index, bias, ignore_index=_NO_TARGET, softcap=form.softcap, logit_scale=form.scale
        )
        return (log_prob if form.factor == 1.0 else log_prob * form.factor) if form.log else log_prob + lse[..., None]

    tiny = lambda z: z.gather(-1, z.new_zeros(1, 1, dtype=torch.int64))  # noqa: E731
    return _apply(x, fused, lambda z: z.gather(-1, index), tiny, keeps=True)


def _logsumexp(input, dim, keepdim=False, *, out=None):
    x = input
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not _last(x, dim) or x._form.log or out is not None or x.dim() < 2:
        return NotImplemented

    def fused(form: Form, hidden, weights, bias):
        index = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        lse = linear_logprobs(hidden, weights, index, bias, softcap=form.softcap, logit_scale=form.scale)[2]
        return lse[..., None] if keepdim else lse

    return _apply(x, fused, lambda z: z.logsumexp(-1, keepdim), lambda z: z.logsumexp(-1), keeps=True)


def _sum(input, dim=None, keepdim=False, *, dtype=None):
    """Sums log-probabilities over the vocabulary, as label smoothing does."""
    x = input
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not _last(x, dim) or not x._form.log or x.dim() < 2 or dtype not in (None, x.dtype, torch.float32):
        return NotImplemented

    def fused(form: Form, hidden, weights, bias):
        index = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        mean = linear_cross_entropy(
            hidden, weights, index, bias, reduction="none", label_smoothing=1.0, softcap=form.softcap, logit_scale=form.scale
        )
        total = mean * (-form.factor * weights.shape[0])
        return total[..., None] if keepdim else total

    return _apply(x, fused, lambda z: z.sum(-1, keepdim, dtype=dtype), lambda z: z.sum(-1, dtype=dtype), dtype)


def _isnan(x):
    return x.materialize().isnan() if isinstance(x, LazyGradient) else NotImplemented


def _retain_grad(x):
    if not isinstance(x, LazyLogits) or x.is_leaf or not x.requires_grad:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        x.register_hook(lambda g: g.materialize() if isinstance(g, LazyGradient) else None)
        return x.retain_grad()


def _grad(*args, **kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(*args, **kwargs)
    return tuple(g.materialize() if isinstance(g, LazyGradient) else g for g in found)


RULES.update(
    {
        F.cross_entropy: _cross_entropy,
        F.nll_loss: _nll_loss,
        torch.gather: _gather,
        Tensor.gather: _gather,
        torch.logsumexp: _logsumexp,
        Tensor.logsumexp: _logsumexp,
        torch.sum: _sum,
        Tensor.sum: _sum,
        torch.isnan: _isnan,
        Tensor.isnan: _isnan,
        Tensor.retain_grad: _retain_grad,
        torch.autograd.grad: _grad,
    }
)
