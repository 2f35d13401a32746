"""The C calls in PyTorch's own operations, for devices and dtypes without kernels, and machines without the library.

Logits exist for a chunk of tokens or a block of the vocabulary at a time, in fp32 (float64 for float64). Gradients of a
loss are made in the forward. Sums of gradients are fp32 and rounded once. Rows whose targets are all ignored are left
out. On a GPU their number is known only after a synchronisation: small heads, and calls in a CUDA graph's capture,
compute them as zeros instead.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import PER_ENTRY, WEIGHTS, LossOptions, LossWeights, weight_shapes
from .._token_loss import entry_weights, token_shares
from . import _memory
from ._portable_head import Head, Task
from ._portable_rows import Outputs, RowForm, Slopes, Statistics, output_slopes, targets_of, token_losses
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


def _count(head: Head, weights: LossWeights) -> Tensor:
    """Returns the divisor of a mean over the tokens."""
    total = torch.zeros((), dtype=head.number, device=head.device)
    tokens, per_token = head.targets.shape
    step = max(1, COUNTED // max(per_token, 1))
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        targets = targets_of(head.targets[part], head.options.ignore_index, head.vocab)
        here = LossWeights(*(t if t is None or name in PER_ENTRY else t[part] for name, t in weights._asdict().items()))
        total += token_shares(torch, here, targets.row, targets.ids[:, 0], total.new_ones(())).sum()
    return total


class _Loss(NamedTuple):
    """Everything in the losses of tokens that is not a tensor."""

    options: LossOptions
    vocab: int  # 0 if it makes no difference
    marks: bool  # targets outside of the vocabulary, by NaN
    needs: bool  # gradients


def _loss_of(form: _Loss, statistics: Statistics, outputs: Outputs, *numbers) -> tuple[tuple, Optional[Slopes]]:
    """Returns losses, log-sum-exps and the argmax of tokens, and the slopes of logits. numbers: the weights, and the
    upstream gradients and the inverse divisor, which multiply the slopes."""
    *weights, upstream, inverse = numbers
    targets, index = statistics.targets, statistics.sums.index
    loss, slopes = token_losses(form.options, outputs, statistics, form.vocab, LossWeights(*weights))
    if form.marks:
        loss = torch.where(targets.bad.any(1), torch.nan, loss)
    lse = torch.where(targets.row, outputs.lse, 0.0)
    values = loss, lse, None if index is None else torch.where(targets.row, index, -1)
    for factor in (upstream, inverse):
        slopes = slopes if factor is None else slopes.times(factor)
    return values, slopes if form.needs else None


def _outputs_of(marks: bool, statistics: Statistics, outputs: Outputs) -> tuple[tuple, None]:
    """Returns log-probabilities, log-sum-exps, entropies, variances and the argmax of tokens."""
    targets, index = statistics.targets, statistics.sums.index
    log_prob = torch.where(targets.valid, outputs.log_prob, 0.0)
    if marks:
        log_prob = torch.where(targets.bad.any(1)[:, None], torch.nan, log_prob)
    of_row = (None if t is None else torch.where(targets.row, t, 0.0) for t in (outputs.lse, outputs.entropy, outputs.variance))
    return (log_prob, *of_row, None if index is None else torch.where(targets.row, index, -1)), None


def _slopes_of(given: tuple[bool, ...], statistics: Statistics, outputs: Outputs, *parts) -> tuple[tuple, Slopes]:
    found = iter(parts)
    return (), output_slopes(outputs, statistics.targets, *(next(found) if there else None for there in given))


def _cross_entropy(options: LossOptions, shard, inputs, made, later=()) -> None:
    numbers = {n: inputs[n] for n in (*WEIGHTS, "grad_losses")}
    head = Head(options, shard, inputs, made, False, later)
    *given, upstream = (None if t is None else t.to(head.number) for t in numbers.values())
    shapes, upstream = weight_shapes(head.vocab, head.targets.shape[:1], head.targets.shape[1:]), head.flat(upstream)
    weights = LossWeights(*(None if t is None else t.reshape(shape) for t, shape in zip(given, shapes)))
    of_entries = entry_weights(weights)
    if options.label_smoothing and of_entries is None:
        of_entries = torch.ones(head.vocab, dtype=head.number, device=head.device)
    wants = head.d_hidden is not None or head.d_weight is not None or head.d_bias is not None
    inverse = None
    if options.reduction == "mean":
        divisor = torch.full((), options.normalizer, dtype=head.number, device=head.device)
        if not options.normalizer:
            divisor = _count(head, weights)
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

    take, put = head.tokens.take, head.tokens.put
    shared = None if head.direct else inverse
    form = _Loss(
        options._replace(memory_budget=0, normalizer=0, reduction="sum"), head.vocab if options.label_smoothing else 0,
        not is_cpu(head.device), wants,
    )

    def written(first: int, last: int, values: tuple) -> None:
        for whole, part in zip((losses, lse, index), values):
            put(whole, first, last, part)

    head.run(
        Task(
            lambda targets: Statistics(targets, False, index is not None, of_entries if options.label_smoothing else None),
            RowForm(_loss_of, form, False, index is not None, False, options.logit_scale),
            lambda *tokens: (
                *(t if name in PER_ENTRY else take(t, *tokens) for name, t in weights._asdict().items()),
                take(upstream, *tokens), shared,
            ),
            written,
        )
    )
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

    def written(first: int, last: int, values: tuple) -> None:
        for whole, part in zip((log_prob, lse, entropy, variance, index), values):
            head.tokens.put(whole, first, last, part)

    asked = entropy is not None, index is not None, variance is not None
    head.run(
        Task(
            lambda targets: Statistics(targets, asked[0], asked[1], None, asked[2]),
            RowForm(_outputs_of, not is_cpu(head.device), *asked, options.logit_scale), lambda *_: (), written,
        )
    )


def _head_backward(options, shard, inputs, cotangents, made) -> None:
    of_entropy = cotangents["entropy"] is not None
    head = Head(options, shard, inputs, made, of_entropy)
    given = [None if t is None else t.to(head.number) for t in (cotangents[n] for n in ("log_prob", "entropy", "lse"))]
    if head.direct:  # 16-bit gradients of logits are of size 1
        head.factor = _largest(*given)
        given = [None if t is None else t / head.factor for t in given]
    d_log_prob = None if given[0] is None else given[0].reshape(head.targets.shape)
    d_entropy, d_lse = head.flat(given[1]), head.flat(given[2])

    given = [t for t in (d_log_prob, d_entropy, d_lse) if t is not None]
    there = tuple(t is not None for t in (d_log_prob, d_entropy, d_lse))
    head.run(
        Task(
            lambda targets: Statistics(targets, of_entropy),
            RowForm(_slopes_of, there, of_entropy, False, False, options.logit_scale),
            lambda *tokens: tuple(head.tokens.take(t, *tokens) for t in given), lambda *_: None,
        )
    )


_CALLS = {"cross_entropy": _cross_entropy, "head": _head, "head_backward": _head_backward}


def _check(options, shard, hidden: Tensor) -> None:
    if options.precision == "bf16x3":
        raise ValueError("precision: bf16x3 is of the library's own kernels (docs/use/gpu.md); expected 'ieee', 'tf32' or None")
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
