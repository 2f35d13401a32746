"""The C calls in PyTorch's own operations, for devices and dtypes without kernels, and machines without the library.

Logits exist for a chunk of tokens or a block of the vocabulary at a time, in fp32 (float64 for float64). Gradients of a
loss are made in the forward. Sums of gradients are fp32 and rounded once. Rows whose targets are all ignored are left
out. On a GPU their number is known only after a synchronisation: small heads, and calls in a CUDA graph's capture,
compute them as zeros instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, Callable, Iterator, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import LossOptions
from . import _memory, _portable_fused, groups
from ._portable_plan import Sizes, plan_of
from ._portable_rows import (
    Entries, Outputs, Slopes, Statistics, Targets, entries_of, exponentials, logit_gradients, output_slopes, targets_of,
    token_losses,
)
from ._portable_tokens import COUNTED, counted_tokens, is_cpu
from ._precision import autocast_dtype, products_in
from .quantized import QuantizedWeight

_HALF = (torch.bfloat16, torch.float16)


@functools.cache
def has_wide_products(device: str, dtype: torch.dtype) -> bool:
    """Returns whether a device multiplies 16-bit matrices with a result in fp32."""
    try:
        one = torch.ones((16, 16), dtype=dtype, device=device)
        return torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of 16-bit matrices in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32)


class _Rows(NamedTuple):
    """Some tokens between forward and backward."""

    first: int
    last: int
    statistics: Statistics
    entries: Entries


class _Head:
    """The head of one call: its operands, its plan, and its gradients."""

    def __init__(self, options, shard, inputs, wanted: dict[str, Optional[Tensor]], spare: int, later=()):
        """wanted: outputs by the names of the C structs, of which only gradients are read here. spare: more memory of a
        chunk's logits that a pass over them needs. later: whether a backward will need each gradient; empty: none."""
        hidden, self.weight, self.bias = inputs["hidden"], inputs["weight"], inputs["bias"]
        lead = hidden.shape[:-1]
        self.options, self.shard, self.device = options, shard, hidden.device
        self.hidden = hidden.reshape(lead.numel(), hidden.shape[-1])
        targets = inputs["targets"]
        self.targets = targets.reshape(lead.numel(), targets.shape[len(lead) :].numel())
        self.vocab = shard.vocab if shard.group else self.weight.shape[0]
        self.begin = shard.vocab_begin if shard.group else 0
        self.number = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        temperature = inputs.get("temperature")  # [N], which divides the logits of each token
        self.inverse = None if temperature is None else temperature.reshape(-1).to(self.number).reciprocal()
        half = hidden.dtype in _HALF
        self.direct = half and has_wide_products(hidden.device.type, hidden.dtype)
        self.cast = half and not self.direct
        self.quantized = isinstance(self.weight, QuantizedWeight)
        self.by_blocks = self.cast or self.quantized  # of weight
        self.d_hidden, self.d_weight, self.d_bias = (wanted.get(n) for n in ("d_hidden", "d_weight", "d_bias"))
        work = self.hidden.numel() * self.vocab  # the same on all ranks
        self.tokens = counted_tokens(self.targets, options.ignore_index, self.vocab, work)
        self.fused = not _portable_fused.why_not(
            hidden.device, self.hidden.shape[0] * self.weight.shape[0], self.targets.shape[1]
        )
        self.scale = options.logit_scale / (options.softcap or 1.0)
        if self.d_hidden is not None:
            self.d_hidden = self.d_hidden.view(self.hidden.shape)
        for gradient in (self.d_hidden, self.d_weight, self.d_bias):
            if gradient is not None:
                gradient.zero_()
        self.factor: Optional[Tensor] = None  # multiplies gradients before they are rounded
        self.sum_bias = None if self.d_bias is None else torch.zeros_like(self.d_bias, dtype=self.number)
        needs = (t is not None for t in (self.d_hidden, self.d_weight, self.d_bias))
        if later and options.memory_budget > 0:
            plan_of(self._sizes(spare, *later), options.memory_budget)  # so that the backward does not raise
        self.plan = plan_of(self._sizes(spare, *needs), options.memory_budget)
        self.sum_hidden = self.sum_weight = None
        self._buffer: Optional[Tensor] = None
        self._dequantized: Optional[tuple[Tensor, Tensor]] = None  # a block of a quantised weight, and rounded

    def _sizes(self, spare: int, of_hidden: bool, of_weight: bool, of_bias: bool) -> Sizes:
        """Returns the sizes of a call with some gradients. One that has no memory yet has the dtype of its input."""

        spare += bool(self.options.softcap)
        if self.fused and not is_cpu(self.device):  # Inductor makes a tile of a tanh or an exponential on a CPU
            spare = 0

        def apart(gradient: Optional[Tensor], operand: Any) -> bool:
            return self._is_summed_apart(operand if gradient is None else gradient)

        return Sizes(
            self.tokens.count, self.hidden.shape[1], self.weight.shape[0], self.targets.shape[1], self.number.itemsize,
            self.cast, self.direct, spare, of_hidden, of_weight or of_bias,
            of_hidden and apart(self.d_hidden, self.hidden), of_weight and apart(self.d_weight, self.weight),
            is_cpu(self.device), bool(self.shard.group), self.quantized,
        )

    def _is_summed_apart(self, gradient: Tensor) -> bool:
        return self.direct or gradient.dtype != self.number

    # --- Operands and logits.

    def flat(self, t: Optional[Tensor]) -> Optional[Tensor]:
        """Returns numbers per token, with one leading dimension."""
        return None if t is None else t.reshape(self.hidden.shape[0])

    def states(self, first: int, last: int, targets: Targets) -> Tensor:
        """Returns hidden states of tokens as an operand of products. Those that do not count are 0."""
        x = self.tokens.take(self.hidden, first, last)
        if not is_cpu(self.device):
            x = torch.where(targets.row[:, None], x, 0)
        return x.to(self.number) if self.cast else x

    def targets_at(self, first: int, last: int) -> Targets:
        return targets_of(self.tokens.take(self.targets, first, last), self.options.ignore_index, self.vocab)

    def block(self, first: int, last: int) -> Tensor:
        """Returns rows of weight as an operand of products."""
        if not self.quantized:
            w = self.weight[first:last]
            return w.to(self.number) if self.cast else w
        if self._dequantized is None:  # new memory for each block would cost a CPU as much as the products
            shape = min(self.plan.vocab, self.weight.shape[0]), self.weight.shape[1]
            dtypes = self.number, self.hidden.dtype
            self._dequantized = tuple(torch.empty(shape, dtype=dtype, device=self.device) for dtype in dtypes)
        wide, rounded = self._dequantized
        w = self.weight.rows(first, last, self.number, wide)
        if self.hidden.dtype == self.number:
            return w
        rounded = rounded[: last - first].copy_(w)
        return rounded if self.direct else wide[: last - first].copy_(rounded)

    def _memory(self, rows: int, columns: int) -> Tensor:
        """Returns memory for logits, which the calls of one head share."""
        if self._buffer is None or self._buffer.numel() < rows * columns:
            self._buffer = None
            self._buffer = torch.empty(rows * columns, dtype=self.number, device=self.device)
        return self._buffer[: rows * columns].view(rows, columns)

    def products(self, x: Tensor, first: int, last: int) -> Tensor:
        """Returns the products of x [n, D] and weight rows first to last."""
        step = self.plan.vocab if self.by_blocks else max(last - first, 1)
        if self.direct and last - first <= step:
            return wide_product(x, self.block(first, last).t())
        z = self._memory(x.shape[0], last - first)
        for begin in range(first, last, step):
            end = min(last, begin + step)
            part = z[:, begin - first : end - first]
            if self.direct:
                part.copy_(wide_product(x, self.block(begin, end).t()))
            else:
                torch.mm(x, self.block(begin, end).t(), out=part)
        return z

    def bias_of(self, first: int, last: int) -> Optional[Tensor]:
        return None if self.bias is None else self.bias[first:last].to(self.number)

    def inverse_of(self, first: int, last: int) -> Optional[Tensor]:
        return self.tokens.take(self.inverse, first, last)

    def capped(self, z: Tensor, keep: bool, block: tuple[int, int], tokens: tuple[int, int]) -> Optional[Tensor]:
        """Overwrites products of tokens and a block of weight with logits. Returns the tanh of which the softcap's
        gradient is made, if it is to be kept."""
        bias, inverse, kept = self.bias_of(*block), self.inverse_of(*tokens), None
        if bias is not None:
            z.add_(bias)
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.options.softcap:
            z.tanh_()
            kept = z.clone() if keep else None
            z.mul_(self.options.softcap)
        if inverse is not None:
            z.mul_(inverse[:, None])
        return kept

    # --- Passes over products [n, v] of tokens and a block of weight: compiled, or in operations of their own.

    def _form(self, statistics: Statistics) -> _portable_fused.Form:
        s = statistics
        return _portable_fused.Form(self.scale, self.options.softcap, s.apart, s.entropy, s.variance, s.argmax)

    def _operands(self, statistics: Statistics, block: tuple[int, int], tokens: tuple[int, int]) -> tuple:
        """Returns the tensors of both passes beside the products. None is a view: passes are compiled again for the sizes
        of what a view is of."""
        begin, end = self.begin + block[0], self.begin + block[1]
        weights = None if statistics.weights is None else statistics.weights[begin:end]
        rest = (None if t is None else t.clone() for t in (self.bias_of(*block), self.inverse_of(*tokens), weights))
        return torch.full((), begin, dtype=torch.int64, device=self.device), statistics.targets, *rest

    def add(self, statistics: Statistics, z: Tensor, block: tuple[int, int], tokens: tuple[int, int]) -> bool:
        """Adds a compiled pass's sums to the statistics. Returns False if there is none."""
        if not self.fused:
            return False
        first, targets, *rest = self._operands(statistics, block, tokens)
        done, sums = _portable_fused.add(self._form(statistics), z, first, targets.ids, targets.valid, *rest, statistics.sums)
        if done:
            statistics.sums = sums
        return done

    def gradient(self, row: _Rows, z: Tensor, block: tuple[int, int], out: Tensor, columns: Optional[Tensor]) -> None:
        """Writes the gradients of products, which it overwrites, into ``out``, which may be z. Adds their sums over tokens
        to ``columns``."""
        statistics, tokens = row.statistics, (row.first, row.last)
        if self.fused:
            form = self._form(statistics)._replace(argmax=False, columns=columns is not None)
            first, targets, *rest = self._operands(statistics, block, tokens)
            more = first, targets.ids, *rest, row.entries, None if out is z else out
            done, found = _portable_fused.gradients(form, z, *more)
            if done:
                if columns is not None:
                    columns += found
                return
        tanh = self.capped(z, True, block, tokens)
        exponentials(z, row.entries.shift)
        logit_gradients(z, self.begin + block[0], statistics, row.entries, tanh)
        self._finish(z, out, columns)

    def _finish(self, z: Tensor, out: Tensor, columns: Optional[Tensor]) -> None:
        if columns is not None:
            columns += z.sum(0)
        if out is not z:
            out.copy_(z)

    def of_products(self, slopes: Slopes, first: int, last: int) -> Slopes:
        """Returns the derivatives by the scaled products, before the softcap, from those by the logits of tokens."""
        slopes = slopes.times(self.options.logit_scale)
        return slopes if self.inverse is None else slopes.times(self.tokens.take(self.inverse, first, last))

    # --- The softmax and its gradients.

    def run(self, statistics_of: Callable[[Targets], Statistics], finish: Callable[..., Optional[Slopes]]) -> None:
        """Computes all tokens. ``finish(first, last, statistics, outputs)`` writes the outputs of tokens, and returns
        the slopes of their logits if gradients are needed."""
        if self.plan.stored:
            self._run_stored(statistics_of, finish)
        else:
            self._run_recomputed(statistics_of, finish)
        if self.d_bias is not None:
            self._write(self.d_bias, self.sum_bias)

    def _chunks(self, step: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.tokens.count, step):
            yield first, min(self.tokens.count, first + step)

    def _blocks(self, step: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.weight.shape[0], step):
            yield first, min(self.weight.shape[0], first + step)

    def _write(self, out: Tensor, total: Tensor) -> None:
        out.copy_(total if self.factor is None else total * self.factor)

    def _run_stored(self, statistics_of, finish) -> None:
        plan, vocab = self.plan, self.weight.shape[0]
        single = plan.tokens >= self.tokens.count
        if self.d_weight is not None and not single and self._is_summed_apart(self.d_weight):
            self.sum_weight = torch.zeros_like(self.d_weight, dtype=self.number)
        for first, last in self._chunks(plan.tokens):
            targets = self.targets_at(first, last)
            x = self.states(first, last, targets)
            z = self.products(x, 0, vocab)
            d = torch.empty_like(z, dtype=self.hidden.dtype) if self.direct else z
            for begin in range(0, last - first, plan.rows):
                end = min(last - first, begin + plan.rows)
                whole, tokens = end - begin == last - first, (first + begin, first + end)
                statistics = statistics_of(targets if whole else self.targets_at(*tokens))
                rows, out = (z, d) if whole else (z[begin:end], d[begin:end])
                out = out if self.direct else rows
                are_products, tanh = self.add(statistics, rows, (0, vocab), tokens), None
                if not are_products:
                    tanh = self.capped(rows, True, (0, vocab), tokens)
                    statistics.add(rows, 0)
                outputs = statistics.outputs()
                slopes = self.of_products(finish(*tokens, statistics, outputs), *tokens)
                entries = entries_of(statistics, outputs, slopes)
                if are_products:
                    self.gradient(_Rows(*tokens, statistics, entries), rows, (0, vocab), out, self.sum_bias)
                else:
                    logit_gradients(rows, 0, statistics, entries, tanh)
                    self._finish(rows, out, self.sum_bias)
                del tanh  # before the next pass makes its own
            del z, rows, out
            self._hidden_of_chunk(d, first, last)
            if self.d_weight is not None:
                self._weight_of_chunk(d, x, single)
        if self.sum_weight is not None:
            self._write(self.d_weight, self.sum_weight)

    def _hidden_of_chunk(self, d: Tensor, first: int, last: int) -> None:
        """Writes the gradient of hidden from the logits' [n, V]."""
        if self.d_hidden is None:
            return
        if self.by_blocks:
            made = torch.zeros((last - first, self.hidden.shape[1]), dtype=self.number, device=self.device)
            for begin, end in self._blocks(self.plan.vocab):
                self._add_product(made, d[:, begin:end], self.block(begin, end))
        elif self.direct:
            made = wide_product(d, self.weight)
        else:
            if self.tokens.index is None and self.d_hidden.dtype == self.number:
                torch.mm(d, self.weight, out=self.d_hidden[first:last])
                return
            made = torch.mm(d, self.weight)
        if self.factor is not None:
            made.mul_(self.factor)
        self.tokens.put(self.d_hidden, first, last, made)

    def _weight_of_chunk(self, d: Tensor, x: Tensor, single: bool) -> None:
        """Adds to the gradient of weight from the logits' [n, V]. single: there is no other chunk."""
        if self.direct or self.cast:
            for begin, end in self._blocks(self.plan.vocab):
                made = self._product(d[:, begin:end].t(), x)
                if single and self._is_summed_apart(self.d_weight):
                    self._write(self.d_weight[begin:end], made)
                else:
                    (self.d_weight if self.sum_weight is None else self.sum_weight)[begin:end] += made
            return
        total = self.d_weight if self.sum_weight is None else self.sum_weight
        if total.dtype == self.number:
            total.addmm_(d.t(), x)
        else:
            total.copy_(torch.mm(d.t(), x))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return wide_product(a, b) if self.direct else torch.mm(a, b)

    def _run_recomputed(self, statistics_of, finish) -> None:
        plan, rows = self.plan, []
        needs = self.d_hidden is not None, self.d_weight is not None or self.d_bias is not None
        for first, last in self._chunks(plan.tokens):
            targets = self.targets_at(first, last)
            statistics, x = statistics_of(targets), self.states(first, last, targets)
            if not self.weight.shape[0]:
                statistics.add(x.new_empty((last - first, 0), dtype=self.number), self.begin)
            for begin, end in self._blocks(plan.vocab):
                z = self.products(x, begin, end)
                if not self.add(statistics, z, (begin, end), (first, last)):
                    self.capped(z, False, (begin, end), (first, last))
                    statistics.add(z, self.begin + begin)
                del z
            if self.shard.group:
                statistics.over_ranks(groups.process_group(self.shard.group))
            outputs = statistics.outputs()
            slopes = finish(first, last, statistics, outputs)
            if slopes is not None:
                entries = entries_of(statistics, outputs, self.of_products(slopes, first, last))
                rows.append(_Rows(first, last, statistics, entries))
        if needs[0] and not plan.together or needs == (True, False):
            self._hidden_by_chunks(rows)
            needs = False, needs[1]
        if needs[1]:
            self._weight_by_blocks(rows, needs[0])
        if self.d_hidden is not None and self.shard.group:
            self._sum_over_ranks()

    def _gradient(self, row: _Rows, x: Tensor, begin: int, end: int, columns: Optional[Tensor] = None) -> Tensor:
        """Returns the products' gradient of tokens and a block, as an operand of products."""
        z = self.products(x, begin, end)
        out = torch.empty_like(z, dtype=self.hidden.dtype) if self.direct else z
        self.gradient(row, z, (begin, end), out, columns)
        return out

    def _hidden_by_chunks(self, rows: list[_Rows]) -> None:
        for row in rows:
            x = self.states(row.first, row.last, row.statistics.targets)
            total = torch.zeros(x.shape, dtype=self.number, device=self.device)
            for begin, end in self._blocks(self.plan.vocab):
                d = self._gradient(row, x, begin, end)
                self._add_product(total, d, self.block(begin, end))
                del d
            self._put_hidden(row, total)

    def _put_hidden(self, row: _Rows, total: Tensor) -> None:
        self.tokens.put(self.d_hidden, row.first, row.last, total if self.factor is None else total * self.factor)

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if self.direct:
            total.add_(wide_product(a, b))
        else:
            total.addmm_(a, b)

    def _weight_by_blocks(self, rows: list[_Rows], hidden: bool) -> None:
        """Writes the gradients of weight and bias, and with ``hidden`` that of hidden."""
        total = None
        if hidden:
            same = self.tokens.index is None and not self._is_summed_apart(self.d_hidden)
            shape = self.tokens.count, self.hidden.shape[1]
            total = self.d_hidden if same else torch.zeros(shape, dtype=self.number, device=self.device)
        for begin, end in self._blocks(self.plan.vocab):
            w, of_block = self.block(begin, end), None
            if self.d_weight is not None:
                of_block = self.d_weight[begin:end]
                if self._is_summed_apart(self.d_weight):
                    of_block = torch.zeros(of_block.shape, dtype=self.number, device=self.device)
            for row in rows:
                x = self.states(row.first, row.last, row.statistics.targets)
                d = self._gradient(row, x, begin, end, None if self.sum_bias is None else self.sum_bias[begin:end])
                if of_block is not None:
                    self._add_product(of_block, d.t(), x)
                if total is not None:
                    self._add_product(total[row.first : row.last], d, w)
                del d
            if of_block is not None and self._is_summed_apart(self.d_weight):
                self._write(self.d_weight[begin:end], of_block)
        if total is not None and total is not self.d_hidden:
            for row in rows:
                self._put_hidden(row, total[row.first : row.last])

    def _sum_over_ranks(self) -> None:
        from torch.distributed import all_reduce

        total = self.d_hidden.to(self.number)
        all_reduce(total, group=groups.process_group(self.shard.group))
        self.d_hidden.copy_(total)


def _largest(*given: Optional[Tensor]) -> Optional[Tensor]:
    """Returns the largest finite size of some tensors as a scalar, 1 if it is 0; None without tensors."""
    sizes = [torch.where(t.isfinite(), t.abs(), 0).amax() for t in given if t is not None and t.numel()]
    if not sizes:
        return None
    largest = torch.stack(sizes).amax()
    return torch.where(largest > 0, largest, 1.0)


def _count(head: _Head, class_weight, token_weight, target_weight) -> Tensor:
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
    head = _Head(options, shard, inputs, made, False, later)
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
    head = _Head(options, shard, inputs, {}, (made["entropy"] is not None) + 2 * (variance is not None), later)
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
    head = _Head(options, shard, inputs, made, of_entropy)
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
