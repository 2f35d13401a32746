"""The C calls in float64, which no kernel supports. PyTorch's operations compute logits chunk by chunk, and the library
computes losses from a few numbers per row. It is slow and exact, for checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._token_loss import Smoothing, of_library

_CHUNK_LOGITS = 1 << 22  # the most elements of logits in memory at a time


def _chunks(tokens: int, vocab: int):
    step = max(1, _CHUNK_LOGITS // max(vocab, 1))
    return [(first, min(tokens, first + step)) for first in range(0, tokens, step)]


def _add(gradients, z, d_z, x, w, options, first, last):
    """Adds the gradients of a chunk with logits ``z`` and their gradient ``d_z``. It writes rows of d_hidden, and
    accumulates d_weight and d_bias; None marks one that is not wanted."""
    u = d_z * options.logit_scale
    if options.softcap:  # z = c tanh(u / c)
        u = u * (1 - (z / options.softcap) ** 2)
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        d_hidden[first:last] = u @ w
    if d_weight is not None:
        d_weight += u.t() @ x
    if d_bias is not None:
        d_bias += u.sum(0)


def _logits(x, w, bias, softcap, logit_scale):
    u = x @ w.t()
    if bias is not None:
        u = u + bias.to(u.dtype)
    u = u * logit_scale
    return softcap * torch.tanh(u / softcap) if softcap else u


def _checked(target, ignore_index: int, vocab: int):
    """Returns (target [N, K], with ignore_index in place of invalid targets; whether a row had one). On the CPU it
    raises the error of the library's kernels. On a GPU the host does not wait for errors, and the row's outputs become
    NaN."""
    bad = (target != ignore_index) & ((target < 0) | (target >= vocab))
    if target.device.type == "cpu" and bool(bad.any()):
        row, k = bad.nonzero()[0].tolist()
        entry = f", entry {k}" if target.shape[1] > 1 else ""
        raise ValueError(
            f"targets: {int(target[row, k])} at position {row}{entry} is outside [0, {vocab}) and not ignore_index {ignore_index}"
        )
    return torch.where(bad, ignore_index, target), bad.any(1)


class _Losses(NamedTuple):
    """Logits of some rows, and the library's losses and derivatives."""

    logits: torch.Tensor  # [n, V]
    lse: torch.Tensor  # [n]
    vocab_ids: torch.Tensor  # [n, K]: targets, 0 for ignored ones
    weights: torch.Tensor  # [V]: of classes
    slopes: tuple  # derivatives by lse [n], target logits [n, K] and, if smoothed, the weighted logit sum [n]
    loss: torch.Tensor  # [n]
    share: torch.Tensor  # [n]: the divisor of a mean
    argmax: torch.Tensor  # [n]; -1 for ignored rows


def _losses(x, w, bias, options, target, class_weight, token_weight, target_weight) -> _Losses:
    """Computes the losses of a chunk. target: [n, K]. Only a few numbers per row go through the library."""
    z = _logits(x, w, bias, options.softcap, options.logit_scale)
    lse = torch.logsumexp(z, 1)
    valid = target != options.ignore_index
    row = valid.any(1)
    vocab_ids = torch.where(valid, target, 0)
    share = valid.to(z.dtype)
    if target_weight is not None:
        share = share * target_weight.to(z.dtype)
    weights = torch.ones(w.shape[0], dtype=z.dtype, device=z.device) if class_weight is None else class_weight.to(z.dtype)
    of_target = share * weights[vocab_ids]
    scale = row.to(z.dtype) if token_weight is None else row.to(z.dtype) * token_weight.to(z.dtype)
    rest = None
    if options.label_smoothing:
        rest = Smoothing(w.shape[0], weights.sum().item(), (z @ weights).cpu().numpy())
    numbers = [t.cpu().numpy() for t in (lse, z.gather(1, vocab_ids), of_target, scale)]
    loss, *slopes = (torch.from_numpy(a).to(z.device) for a in of_library(options, *numbers, rest))
    loss = torch.where(lse == torch.inf, torch.nan, loss)  # a softmax with +inf is NaN
    counted = scale * of_target.sum(1) if target_weight is None else scale
    slopes = tuple(slopes[: 2 + bool(options.label_smoothing)])
    return _Losses(z, lse, vocab_ids, weights, slopes, loss, counted, torch.where(row, z.argmax(1), -1))


def _logit_slopes(made: _Losses, upstream):
    """Returns the gradient of the losses by the logits [n, V]. upstream: [n] or None."""
    slopes = made.slopes
    if upstream is not None:
        slopes = [s * (upstream if s.dim() == 1 else upstream[:, None]) for s in slopes]
    d_z = slopes[0][:, None] * torch.softmax(made.logits, 1)
    d_z.scatter_add_(1, made.vocab_ids, slopes[1])
    return d_z + slopes[2][:, None] * made.weights if len(slopes) > 2 else d_z


def cross_entropy(options, hidden, weight, bias, target, class_weight, token_weight, target_weight, grad_losses, needs):
    """Returns (loss, lse, argmax, d_hidden, d_weight, d_bias) for hidden [N, D] and target [N, K]; gradients where
    ``needs``."""
    tokens = hidden.shape[0]
    target, bad = _checked(target, options.ignore_index, weight.shape[0])
    losses = hidden.new_zeros(tokens)
    lse = hidden.new_zeros(tokens)
    argmax = torch.full((tokens,), -1, dtype=torch.int64, device=hidden.device)
    counted = hidden.new_zeros(())
    gradients = [torch.zeros_like(t) if need else None for t, need in zip((hidden, weight, bias), needs)]
    for first, last in _chunks(tokens, weight.shape[0]):
        part = [None if t is None else t[first:last] for t in (target, token_weight, target_weight, grad_losses)]
        x = hidden[first:last]
        made = _losses(x, weight, bias, options, part[0], class_weight, part[1], part[2])
        if any(needs):
            upstream = None if part[3] is None else part[3].to(made.loss.dtype)
            _add(gradients, made.logits, _logit_slopes(made, upstream), x, weight, options, first, last)
        losses[first:last] = made.loss
        lse[first:last] = torch.where(made.argmax >= 0, made.lse, 0)
        argmax[first:last] = made.argmax
        counted = counted + made.share.sum()
    losses = torch.where(bad, torch.nan, losses)
    if options.reduction == "none":
        return losses, lse, argmax, *gradients
    total = losses.sum()
    if options.reduction == "mean":
        divisor = counted if not options.normalizer else torch.full_like(counted, options.normalizer)
        inverse = torch.where(divisor > 0, 1 / divisor, 0.0)
        total = total * inverse
        gradients = [None if g is None else g * inverse for g in gradients]
    return total, lse, argmax, *gradients


class _Outputs(NamedTuple):
    """The head's outputs for some rows."""

    logits: torch.Tensor  # [n, V]
    p: torch.Tensor  # [n, V]: softmax
    mean_logit: torch.Tensor  # [n]: expectation over p
    valid: torch.Tensor  # [n, K]: targets that are not ignored
    vocab_ids: torch.Tensor  # [n, K]: targets, 0 for ignored ones
    numbers: tuple  # log_prob [n, K], entropy [n], lse [n], argmax [n]


def _outputs(x, w, bias, options, target) -> _Outputs:
    z = _logits(x, w, bias, options.softcap, options.logit_scale)
    valid = target != options.ignore_index
    row = valid.any(1)
    vocab_ids = torch.where(valid, target, 0)
    lse = torch.logsumexp(z, 1)
    log_prob = z.gather(1, vocab_ids) - torch.where(lse == torch.inf, torch.nan, lse)[:, None]
    p = torch.softmax(z, 1)
    mean = torch.where(p == 0.0, 0.0, p * z).sum(1)
    numbers = torch.where(valid, log_prob, 0.0), torch.where(row, lse - mean, 0.0), torch.where(row, lse, 0.0)
    return _Outputs(z, p, mean, valid, vocab_ids, (*numbers, torch.where(row, z.argmax(1), -1)))


def _output_slopes(out: _Outputs, d_log_prob, d_entropy, d_lse):
    """Returns the gradient by the logits [n, V], from cotangents that may be None."""
    row = out.valid.any(1)
    of_softmax = torch.zeros_like(out.mean_logit)
    d_z = torch.zeros_like(out.logits)
    if d_log_prob is not None:
        given = torch.where(out.valid, d_log_prob.to(d_z.dtype), 0.0)
        d_z.scatter_add_(1, out.vocab_ids, given)
        of_softmax = of_softmax - given.sum(1)
    if d_lse is not None:
        of_softmax = of_softmax + torch.where(row, d_lse.to(d_z.dtype), 0.0)
    d_z += of_softmax[:, None] * out.p
    if d_entropy is not None:
        apart = torch.where(out.p == 0.0, 0.0, out.p * (out.logits - out.mean_logit[:, None]))
        d_z -= torch.where(row, d_entropy.to(d_z.dtype), 0.0)[:, None] * apart
    return d_z


def head(options, hidden, weight, bias, target, cotangents=None, needs=(False, False, False)):
    """Returns (log_prob [N, K], entropy [N], lse [N], argmax [N]). With cotangents of the first three, it returns the
    gradients of hidden, weight and bias."""
    gradients = [torch.zeros_like(t) if need else None for t, need in zip((hidden, weight, bias), needs)]
    target, bad = _checked(target, options.ignore_index, weight.shape[0])
    parts = []
    for first, last in _chunks(hidden.shape[0], weight.shape[0]):
        x = hidden[first:last]
        out = _outputs(x, weight, bias, options, target[first:last])
        if cotangents is None:
            parts.append(out.numbers)
            continue
        d_z = _output_slopes(out, *[None if g is None else g[first:last] for g in cotangents])
        _add(gradients, out.logits, d_z, x, weight, options, first, last)
    if cotangents is not None:
        return tuple(gradients)
    if not parts:
        tokens = hidden.shape[0]
        numbers = hidden.new_zeros(tokens, target.shape[1]), hidden.new_zeros(tokens), hidden.new_zeros(tokens)
        return *numbers, torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    log_prob, *numbers = (torch.cat(p) for p in zip(*parts))
    return torch.where(bad[:, None], torch.nan, log_prob), *numbers


def run(name: str, options, inputs, *groups) -> None:
    """Computes the C call ``name`` on the tensors of its structs, for any number of leading dimensions, and writes its
    outputs."""
    lead = inputs["hidden"].shape[:-1]

    def flat(t):
        return None if t is None else t.reshape(lead.numel(), *t.shape[len(lead):])

    targets = inputs["targets"]
    target = targets.reshape(lead.numel(), targets.shape[len(lead):].numel()).to(torch.int64)
    operands = options, flat(inputs["hidden"]), inputs["weight"], inputs["bias"], target
    written = groups[-1]
    needs = [written.get(g) is not None for g in ("d_hidden", "d_weight", "d_bias")]
    if name == "cross_entropy":
        per_token = [flat(inputs[n]) for n in ("token_weight", "target_weight", "grad_losses")]
        made = cross_entropy(*operands, inputs["class_weight"], *per_token, needs)
        names = "loss", "lse", "argmax", "d_hidden", "d_weight", "d_bias"
    elif name == "head":
        made, names = head(*operands), ("log_prob", "entropy", "lse", "argmax")
    else:
        d_log_prob = groups[0]["log_prob"]
        cotangents = (
            None if d_log_prob is None else d_log_prob.reshape(target.shape), flat(groups[0]["entropy"]), flat(groups[0]["lse"])
        )
        made, names = head(*operands, cotangents, needs), ("d_hidden", "d_weight", "d_bias")
    for name, result in zip(names, made):
        if written[name] is not None:
            written[name].copy_(result.reshape(written[name].shape))
