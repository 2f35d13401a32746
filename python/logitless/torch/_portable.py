"""The C calls in PyTorch's own operations, for devices and dtypes without kernels, and machines without the library.

Logits exist for a chunk of tokens or a block of the vocabulary at a time, in fp32 (float64 for float64). Gradients of a
loss are made in the forward. Sums of gradients are fp32 and rounded once. Rows whose targets are all ignored are left
out. On a GPU their number is known only after a synchronisation: small heads, and calls in a CUDA graph's capture,
compute them as zeros instead.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Optional

import torch
from torch import Tensor

from .._options import LossOptions
from . import _memory
from ._portable_head import Head
from ._portable_rows import Outputs, Slopes, Statistics, Targets, output_slopes, targets_of, token_losses
from ._portable_tokens import COUNTED, is_cpu
from ._precision import autocast_dtype, products_in
from .quantized import QuantizedWeight


def _largest(*given: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the largest finite size of some tensors as a scalar, 1 if it is 0; None without tensors."""
    sizes = [torch.where(t.isfinite(), t.abs(), 0).amax() for t in given if t is not None and t.numel()]
    if not sizes:
        return None
    largest = torch.stack(sizes).amax()
    return torch.where(largest > 0, largest, 1.0)


def _count(head: Head, class_weight, token_weight, target_weight) -> Tensor:
    """Returns the divisor of a mean over the tokens."""
    total = torch.zeros((), dtype=head.number, device=head.device)
    tokens, per_token = head.targets.shape
    step = max(1, COUNTED // max(per_token, 1))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        targets = targets_of(head.targets[part], head.options.ignore_index, head.vocab)
        count = targets.row.to(head.number)
        if target_weight is None and class_weight is not None:
            count = count * class_weight[targets.ids[:, 0]]
        if token_weight is not None:
            count = torch.where(targets.row, count * token_weight[part], 0.0)
        total += count.sum()
    return total


def _cross_entropy(options: LossOptions, shard, inputs, made, later=()) -> None:
    numbers = {n: inputs[n] for n in ("class_weight", "token_weight", "target_weight", "grad_losses")}
    head = Head(options, shard, inputs, made, False, later)
    class_weight, token_weight, target_weight, upstream = (
        None if t is None else t.to(head.number) for t in numbers.values()
    )
    token_weight, upstream = head.flat(token_weight), head.flat(upstream)
    if target_weight is not None:
        target_weight = target_weight.reshape(head.targets.shape)
    weights = class_weight
    if options.label_smoothing and weights is None:
        weights = torch.ones(head.vocab, dtype=head.number, device=head.device)
    wants = head.d_hidden is not None or head.d_weight is not None or head.d_bias is not None
    inverse = None
    if options.reduction == "mean":
        divisor = torch.full((), options.normalizer, dtype=head.number, device=head.device)
        if not options.normalizer:
            divisor = _count(head, class_weight, token_weight, target_weight)
        inverse = torch.where(divisor == 0, 0.0, 1 / divisor)
    if head.direct:  # 16-bit gradients of logits are of size 1
        head.factor = inverse
        largest = _largest(upstream)
        if largest is not None:
            upstream, head.factor = upstream / largest, largest if inverse is None else inverse * largest
    losses = head.hidden.new_zeros(head.hidden.shape[0], dtype=head.number)
    lse, index = (None if made.get(n) is None else made[n].view(-1) for n in ("lse", "argmax"))
    if lse is not None:
        lse.zero_()
    if index is not None:
        index.fill_(-1)

    def statistics_of(targets: Targets) -> Statistics:
        return Statistics(targets, argmax=index is not None, weights=weights if options.label_smoothing else None)

    def finish(first: int, last: int, statistics: Statistics, outputs: Outputs) -> Optional[Slopes]:
        take, targets = head.tokens.take, statistics.targets
        loss, slopes = token_losses(
            options, outputs, statistics, head.vocab, class_weight, take(token_weight, first, last),
            take(target_weight, first, last),
        )
        if not is_cpu(head.device):
            loss = torch.where(targets.bad.any(1), torch.nan, loss)
        head.tokens.put(losses, first, last, loss)
        head.tokens.put(lse, first, last, torch.where(targets.row, outputs.lse, 0.0))
        if index is not None:
            head.tokens.put(index, first, last, torch.where(targets.row, statistics.sums.index, -1))
        if not wants:
            return None
        if upstream is not None:
            slopes = slopes.times(take(upstream, first, last))
        return slopes if inverse is None or head.direct else slopes.times(inverse)

    head.run(statistics_of, finish)
    if options.reduction == "none":
        made["loss"].view(-1).copy_(losses)
    else:
        total = losses.sum()
        made["loss"].copy_(total if inverse is None else total * inverse)


def _head(options, shard, inputs, made, later=()) -> None:
    variance = made.get("variance")
    head = Head(options, shard, inputs, {}, (made["entropy"] is not None) + 2 * (variance is not None), later)
    log_prob, entropy, lse, index = (made[n] for n in ("log_prob", "entropy", "lse", "argmax"))
    log_prob = log_prob.view(head.targets.shape).zero_()
    entropy, lse, variance = (None if t is None else t.view(-1).zero_() for t in (entropy, lse, variance))
    index = None if index is None else index.view(-1).fill_(-1)

    def finish(first: int, last: int, statistics: Statistics, outputs: Outputs) -> None:
        targets, put = statistics.targets, head.tokens.put
        of_target = torch.where(targets.valid, outputs.log_prob, 0.0)
        if not is_cpu(head.device):
            of_target = torch.where(targets.bad.any(1)[:, None], torch.nan, of_target)
        put(log_prob, first, last, of_target)
        put(lse, first, last, torch.where(targets.row, outputs.lse, 0.0))
        if entropy is not None:
            put(entropy, first, last, torch.where(targets.row, outputs.entropy, 0.0))
        if variance is not None:
            put(variance, first, last, torch.where(targets.row, outputs.variance, 0.0))
        if index is not None:
            put(index, first, last, torch.where(targets.row, statistics.sums.index, -1))

    head.run(lambda targets: Statistics(targets, entropy is not None, index is not None, None, variance is not None), finish)


def _head_backward(options, shard, inputs, cotangents, made) -> None:
    of_entropy = cotangents["entropy"] is not None
    head = Head(options, shard, inputs, made, of_entropy)
    given = [None if t is None else t.to(head.number) for t in (cotangents[n] for n in ("log_prob", "entropy", "lse"))]
    if head.direct:  # 16-bit gradients of logits are of size 1
        head.factor = _largest(*given)
        given = [None if t is None else t / head.factor for t in given]
    d_log_prob = None if given[0] is None else given[0].reshape(head.targets.shape)
    d_entropy, d_lse = head.flat(given[1]), head.flat(given[2])

    def finish(first: int, last: int, statistics: Statistics, outputs: Outputs) -> Slopes:
        parts = (head.tokens.take(t, first, last) for t in (d_log_prob, d_entropy, d_lse))
        return output_slopes(outputs, statistics.targets, *parts)

    head.run(lambda targets: Statistics(targets, of_entropy), finish)


_CALLS = {"cross_entropy": _cross_entropy, "head": _head, "head_backward": _head_backward}


def _check(options, shard, hidden: Tensor) -> None:
    if options.precision == "tf32":
        if hidden.dtype != torch.float32:
            name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}[hidden.dtype]
            raise ValueError(f"precision: tf32 rounds f32 tensors, hidden and weight are {name}")
        if hidden.device.type != "cuda":
            device = "a CPU" if hidden.device.type == "cpu" else hidden.device.type
            raise ValueError(f"precision: tf32 is for a GPU, the device is {device}")
    if shard.group and (shard.tokens or shard.columns >= 0):
        raise NotImplementedError(
            "sharding: the portable implementation supports rows of weight with the same tokens on all ranks; expected "
            "tokens=False, weight='rows'"
        )


def run(name: str, options, shard, inputs: dict[str, Any], *groups_of_tensors: dict[str, Any], later=()) -> None:
    """Computes the C call ``name`` on the tensors of its structs, for any number of leading dimensions, and writes its
    outputs. later: of a forward, whether a backward of its own will need the gradients of hidden, weight and bias.

    Memory: within options.memory_budget, whose default is a quarter of the fp32 logits and at least 16 MiB. Raises
    ValueError if the least plan takes more, with its bytes; NotImplementedError for sharded tokens and columns.
    """
    device = inputs["hidden"].device
    _check(options, shard, inputs["hidden"])
    if device.type in ("cpu", "cuda"):  # PyTorch would access memory that was freed, as FSDP does
        for name_of, t in itertools.chain(*(group.items() for group in (inputs, *groups_of_tensors))):
            if t is not None and not isinstance(t, QuantizedWeight):
                _memory.address("target" if name_of == "targets" else name_of, t)
    casts = autocast_dtype(device.type) is not None
    autocast = torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext()
    with torch.no_grad(), autocast, products_in(device, options.precision):
        more = (later,) if any(later) else ()
        _CALLS[name](options, shard, inputs, *groups_of_tensors, *more)
