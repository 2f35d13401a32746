"""float64: no kernel computes in it, so PyTorch's own operations make logits, chunk by chunk, and the library the losses
of them. Slow, exact, for checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._token_loss import Smoothing, of_library

_CHUNK_LOGITS = 1 << 22  # elements of the logits that exist at a time


def _chunks(tokens: int, vocab: int):
    step = max(1, _CHUNK_LOGITS // max(vocab, 1))
    return [(first, min(tokens, first + step)) for first in range(0, tokens, step)]


def _leaves(tensors, needs):
    return [None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]


def _add(gradients, found, needs, first, last):
    """The gradients of a chunk's leaves that need one: rows of hidden's, and parts of the sums of the others."""
    parts = iter(found)
    for i, need in enumerate(needs):
        g = next(parts) if need else None
        if g is None:
            continue
        if i == 0:
            gradients[0][first:last] = g
        else:
            gradients[i] += g


def _logits(x, w, bias, softcap, logit_scale):
    u = x @ w.t()
    if bias is not None:
        u = u + bias.to(u.dtype)
    u = u * logit_scale
    return softcap * torch.tanh(u / softcap) if softcap else u


class _Losses(NamedTuple):
    """Of rows: what a loss is a function of, on the graph, and what the library made of it."""

    graph: tuple  # lse [n], target logits [n, K], and with label smoothing the weighted sum of the logits [n]
    slopes: tuple  # of the loss by each of those
    loss: torch.Tensor  # [n]
    share: torch.Tensor  # [n]: what mean divides by
    argmax: torch.Tensor  # [n]; -1 for rows that are ignored


def _losses(x, w, bias, options, target, class_weight, token_weight, target_weight) -> _Losses:
    """target [n, K]. A few numbers a row go to the library and come back."""
    z = _logits(x, w, bias, options.softcap, options.logit_scale)
    lse = torch.logsumexp(z, 1)
    valid = target != options.ignore_index
    row = valid.any(1)
    words = torch.where(valid, target, 0)
    share = valid.to(z.dtype)
    if target_weight is not None:
        share = share * target_weight.to(z.dtype)
    weights = torch.ones(w.shape[0], dtype=z.dtype, device=z.device) if class_weight is None else class_weight.to(z.dtype)
    of_target = share * weights[words]
    scale = row.to(z.dtype) if token_weight is None else row.to(z.dtype) * token_weight.to(z.dtype)
    graph = [lse, z.gather(1, words)]
    rest = None
    if options.label_smoothing:
        graph.append(z @ weights)
        rest = Smoothing(w.shape[0], weights.sum().item(), graph[2].detach().cpu().numpy())
    numbers = [t.detach().cpu().numpy() for t in (graph[0], graph[1], of_target, scale)]
    loss, *slopes = (torch.from_numpy(a).to(z.device) for a in of_library(options, *numbers, rest))
    counted = scale * of_target.sum(1) if target_weight is None else scale
    return _Losses(tuple(graph), tuple(slopes[: len(graph)]), loss, counted, torch.where(row, z.argmax(1), -1))


def cross_entropy(options, hidden, weight, bias, target, class_weight, token_weight, target_weight, grad_losses, needs):
    """(loss, lse, argmax, d_hidden, d_weight, d_bias) of hidden [N, D] and target [N, K]; gradients where ``needs``."""
    tokens = hidden.shape[0]
    losses = hidden.new_zeros(tokens)
    lse = hidden.new_zeros(tokens)
    argmax = torch.full((tokens,), -1, dtype=torch.int64, device=hidden.device)
    counted = hidden.new_zeros(())
    gradients = [torch.zeros_like(t) if need else None for t, need in zip((hidden, weight, bias), needs)]
    for first, last in _chunks(tokens, weight.shape[0]):
        with torch.enable_grad():
            leaves = _leaves((hidden[first:last], weight, bias), needs)
            part = [None if t is None else t[first:last] for t in (target, token_weight, target_weight)]
            made = _losses(leaves[0], leaves[1], leaves[2], options, part[0], class_weight, part[1], part[2])
            slopes = made.slopes
            if grad_losses is not None:
                upstream = grad_losses[first:last].to(made.loss.dtype)
                slopes = [s * (upstream if s.dim() == 1 else upstream[:, None]) for s in slopes]
            wanted = [leaf for leaf, need in zip(leaves, needs) if need]
            found = torch.autograd.grad(made.graph, wanted, slopes, allow_unused=True) if wanted else ()
        _add(gradients, found, needs, first, last)
        losses[first:last] = made.loss
        lse[first:last] = torch.where(made.argmax >= 0, made.graph[0].detach(), 0)
        argmax[first:last] = made.argmax
        counted = counted + made.share.sum()
    if options.reduction == "none":
        return losses, lse, argmax, *gradients
    total = losses.sum()
    if options.reduction == "mean":
        divisor = counted if not options.normalizer else torch.full_like(counted, options.normalizer)
        inverse = torch.where(divisor > 0, 1 / divisor, 0.0)
        total = total * inverse
        gradients = [None if g is None else g * inverse for g in gradients]
    return total, lse, argmax, *gradients


def _outputs(x, w, bias, options, target):
    z = _logits(x, w, bias, options.softcap, options.logit_scale)
    valid = target != options.ignore_index
    row = valid.any(1)
    lse = torch.logsumexp(z, 1)
    log_prob = z.gather(1, torch.where(valid, target, 0)) - lse[:, None]
    p = torch.exp(z - lse[:, None])
    entropy = lse - (p * z).sum(1)
    numbers = torch.where(valid, log_prob, 0.0), torch.where(row, entropy, 0.0), torch.where(row, lse, 0.0)
    return *numbers, torch.where(row, z.argmax(1), -1)


def head(options, hidden, weight, bias, target, cotangents=None, needs=(False, False, False)):
    """(log_prob [N, K], entropy [N], lse [N], argmax [N]), or with cotangents of the first three the gradients of hidden,
    weight and bias."""
    gradients = [torch.zeros_like(t) if need else None for t, need in zip((hidden, weight, bias), needs)]
    parts = []
    for first, last in _chunks(hidden.shape[0], weight.shape[0]):
        with torch.set_grad_enabled(cotangents is not None):
            leaves = _leaves((hidden[first:last], weight, bias), needs)
            out = _outputs(leaves[0], leaves[1], leaves[2], options, target[first:last])
        if cotangents is None:
            parts.append(out)
            continue
        pairs = [(o, g[first:last].to(o.dtype)) for o, g in zip(out, cotangents) if g is not None]
        wanted = [leaf for leaf, need in zip(leaves, needs) if need]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        _add(gradients, found, needs, first, last)
    if cotangents is not None:
        return tuple(gradients)
    if not parts:
        tokens = hidden.shape[0]
        numbers = hidden.new_zeros(tokens, target.shape[1]), hidden.new_zeros(tokens), hidden.new_zeros(tokens)
        return *numbers, torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    return tuple(torch.cat(p) for p in zip(*parts))
