"""The head of one portable call: products, passes over logits, and gradients by one of the plans of ``_portable_plan``."""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Optional

import torch
from torch import Tensor

from . import _portable_fused, groups
from ._portable_plan import Sizes, plan_of
from ._portable_products import add_wide_product, has_wide_products, has_wide_sums, wide_product
from ._portable_rows import (
    Entries, RowForm, Statistics, Targets, exponentials, finished, logit_gradients, targets_of,
)
from ._portable_tokens import counted_tokens, is_cpu
from .quantized import QuantizedWeight

_HALF = (torch.bfloat16, torch.float16)


class Rows(NamedTuple):
    """Some tokens between forward and backward."""

    first: int
    last: int
    statistics: Statistics
    entries: Entries


class Task(NamedTuple):
    """The statistics, numbers and results of a call's tokens."""

    statistics: Callable[[Targets], Statistics]
    form: RowForm
    numbers: Callable[[int, int], tuple]  # of tokens first to last: the last arguments of ``form.of``
    put: Callable[[int, int, tuple], None]  # writes the values of tokens


class Head:
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
        self.quantized = isinstance(self.weight, QuantizedWeight)
        mixed = self.weight.dtype != hidden.dtype and not self.quantized  # fp32 hidden states, a 16-bit weight
        self.cast = (half and not self.direct) or mixed
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
        if shard.group:  # ranks exchange statistics of the same chunks, whatever rows of weight they have
            chunk = groups.least_of_ranks(shard.group, self.plan.tokens, self.device)
            self.plan = self.plan._replace(tokens=chunk)
        self.sum_weight: Optional[Tensor] = None
        self._saved: Optional[Tensor] = None  # gradients of logits that d_weight's own memory has no space for
        self._buffer: Optional[Tensor] = None
        self._dequantized: Optional[tuple[Tensor, ...]] = None  # a block of a quantised weight, and in fp32

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
            is_cpu(self.device), bool(self.shard.group), self.quantized, self._own(of_weight),
            self.direct and has_wide_sums(self.device.type, self.hidden.dtype),
        )

    def _own(self, of_weight: bool) -> int:
        """Returns the number of tokens whose gradients of logits fit into the memory of d_weight."""
        given = self.weight if self.d_weight is None else self.d_weight
        same = of_weight and given.dtype == (self.hidden.dtype if self.direct else self.number)
        return self.hidden.shape[1] if same and given.is_contiguous() else 0

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
            dtypes = (self.hidden.dtype, *([self.number] if self.cast else ()))
            self._dequantized = tuple(torch.empty(shape, dtype=dtype, device=self.device) for dtype in dtypes)
        rounded, *wide = self._dequantized
        w = self.weight.rows(first, last, self.hidden.dtype, rounded)
        return wide[0][: last - first].copy_(w) if self.cast else w

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

    def gradient(self, row: Rows, z: Tensor, block: tuple[int, int], out: Tensor, columns: Optional[Tensor]) -> None:
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

    def finish(self, task: Task, statistics: Statistics, first: int, last: int) -> Optional[Entries]:
        """Writes the values of tokens, and returns the gradients of their products if those are needed."""
        inverse, given = self.inverse_of(first, last), task.numbers(first, last)
        done = False
        if self.fused:  # no views, as above
            own = tuple(None if t is None else t.clone() if t.dim() else t for t in (inverse, *given))
            done, found = _portable_fused.numbers(
                task.form, statistics.sums, statistics.targets, statistics.weights, own[0], own[1:]
            )
        values, entries = found if done else finished(task.form, statistics, inverse, given)
        task.put(first, last, values)
        return entries

    # --- The softmax and its gradients.

    def run(self, task: Task) -> None:
        """Computes all tokens."""
        if self.plan.stored:
            self._run_stored(task)
        else:
            self._run_recomputed(task)
        if self.d_bias is not None:
            self._write(self.d_bias, self.sum_bias)

    def _chunks(self, begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
        for first in range(begin, end, step):
            yield first, min(end, first + step)

    def _blocks(self, step: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.weight.shape[0], step):
            yield first, min(self.weight.shape[0], first + step)

    def _write(self, out: Tensor, total: Tensor) -> None:
        if self.factor is None:
            out.copy_(total)
        else:
            torch.mul(total, self.factor, out=out)

    def _run_stored(self, task: Task) -> None:
        plan = self.plan
        single = plan.tokens >= self.tokens.count
        if self.d_weight is not None and not single and self._is_summed_apart(self.d_weight):
            self.sum_weight = torch.zeros_like(self.d_weight, dtype=self.number)
        for first, last in self._chunks(0, self.tokens.count, plan.tokens):
            x, d = self._gradients_of_chunk(first, last, task)
            self._hidden_of_chunk(d, first, last)
            if self.d_weight is not None:
                self._weight_of_chunk(d, x, single)
            del d  # before the next chunk makes its own
        if self.sum_weight is not None:
            self._write(self.d_weight, self.sum_weight)

    def _gradients_of_chunk(self, first: int, last: int, task: Task) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of tokens, and the gradients of their products [n, V], as operands of products."""
        vocab, targets = self.weight.shape[0], self.targets_at(first, last)
        x = self.states(first, last, targets)
        z = self.products(x, 0, vocab)
        d = torch.empty_like(z, dtype=self.hidden.dtype) if self.direct else z
        for begin in range(0, last - first, self.plan.rows):
            end = min(last - first, begin + self.plan.rows)
            whole, tokens = end - begin == last - first, (first + begin, first + end)
            statistics = task.statistics(targets if whole else self.targets_at(*tokens))
            rows, out = (z, d) if whole else (z[begin:end], d[begin:end])
            out = out if self.direct else rows
            are_products, tanh = self.add(statistics, rows, (0, vocab), tokens), None
            if not are_products:
                tanh = self.capped(rows, True, (0, vocab), tokens)
                statistics.add(rows, 0)
            entries = self.finish(task, statistics, *tokens)
            if are_products:
                self.gradient(Rows(*tokens, statistics, entries), rows, (0, vocab), out, self.sum_bias)
            else:
                logit_gradients(rows, 0, statistics, entries, tanh)
                self._finish(rows, out, self.sum_bias)
            del tanh  # before the next pass makes its own
        return x, d

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
        total = self.d_weight if self.sum_weight is None else self.sum_weight
        if single and self._is_summed_apart(self.d_weight):
            for begin, end in self._blocks(self.plan.vocab):
                self._write(total[begin:end], self._product(d[:, begin:end].t(), x))
        else:
            self._add_product(total, d.t(), x)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return wide_product(a, b) if self.direct else torch.mm(a, b)

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Adds to a sum in the dtype of logits."""
        if self.direct:
            add_wide_product(total, a, b, self.plan.vocab)
        else:
            total.addmm_(a, b)

    def _run_recomputed(self, task: Task) -> None:
        plan, rows = self.plan, []
        needs = self.d_hidden is not None, self.d_weight is not None or self.d_bias is not None
        if plan.saved > plan.own:
            shape, dtype = (plan.saved - plan.own, self.weight.shape[0]), self.hidden.dtype if self.direct else self.number
            self._saved = torch.empty(shape, dtype=dtype, device=self.device)
        for begin, end in ((0, plan.own), (plan.own, plan.saved)):
            for first, last in self._chunks(begin, end, plan.chunk):
                self._save(first, last, self._gradients_of_chunk(first, last, task)[1])
        if plan.saved:
            self._buffer = None  # of the chunks' logits
        for first, last in self._chunks(plan.saved, self.tokens.count, plan.tokens):
            targets = self.targets_at(first, last)
            statistics, x = task.statistics(targets), self.states(first, last, targets)
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
            entries = self.finish(task, statistics, first, last)
            if entries is not None:
                rows.append(Rows(first, last, statistics, entries))
        if needs[0] and not plan.together or needs == (True, False):
            self._hidden_by_chunks(rows)
            needs = False, needs[1]
        if needs[1]:
            self._weight_by_blocks(rows, needs[0])
        if self.d_hidden is not None and self.shard.group:
            self._sum_over_ranks()

    def _saved_block(self, own: bool, begin: int, end: int) -> Tensor:
        """Returns the saved gradients of logits [n, v] of a block: those in the memory of d_weight's rows, or the others."""
        if not own:
            return self._saved[:, begin:end]
        return self.d_weight[begin:end].view(-1)[: self.plan.own * (end - begin)].view(self.plan.own, end - begin)

    def _save(self, first: int, last: int, d: Tensor) -> None:
        """Saves the gradients of the logits of tokens [n, V]."""
        own = self.plan.own
        if first >= own:
            self._saved[first - own : last - own].copy_(d)
            return
        for begin, end in self._blocks(self.plan.vocab):
            self._saved_block(True, begin, end)[first:last].copy_(d[:, begin:end])

    def _gradient(self, row: Rows, x: Tensor, begin: int, end: int, columns: Optional[Tensor] = None) -> Tensor:
        """Returns the products' gradient of tokens and a block, as an operand of products."""
        z = self.products(x, begin, end)
        out = torch.empty_like(z, dtype=self.hidden.dtype) if self.direct else z
        self.gradient(row, z, (begin, end), out, columns)
        return out

    def _hidden_by_chunks(self, rows: list[Rows]) -> None:
        for row in rows:
            x = self.states(row.first, row.last, row.statistics.targets)
            total = torch.zeros(x.shape, dtype=self.number, device=self.device)
            for begin, end in self._blocks(self.plan.vocab):
                d = self._gradient(row, x, begin, end)
                self._add_product(total, d, self.block(begin, end))
                del d
            self.tokens.put(self.d_hidden, row.first, row.last, self._scaled(total))

    def _weight_by_blocks(self, rows: list[Rows], hidden: bool) -> None:
        """Writes the gradients of weight and bias, and with ``hidden`` that of hidden."""
        total = None
        if hidden:
            same = self.tokens.index is None and not self._is_summed_apart(self.d_hidden)
            shape = self.tokens.count, self.hidden.shape[1]
            total = self.d_hidden if same else torch.zeros(shape, dtype=self.number, device=self.device)
        plan, saved = self.plan, []
        apart = self.d_weight is not None and (plan.own > 0 or self._is_summed_apart(self.d_weight))
        for first, last in ((0, plan.own), (plan.own, plan.saved)):
            if first < last:
                saved.append((first, last, self.states(first, last, self.targets_at(first, last))))
        for begin, end in self._blocks(plan.vocab):
            w = self.block(begin, end)
            of_block = None if self.d_weight is None or apart else self.d_weight[begin:end]
            for first, last, x, row in (*((*s, None) for s in saved), *((row.first, row.last, None, row) for row in rows)):
                if row is None:
                    d = self._saved_block(first < plan.own, begin, end)
                else:
                    x = self.states(first, last, row.statistics.targets)
                    d = self._gradient(row, x, begin, end, None if self.sum_bias is None else self.sum_bias[begin:end])
                if of_block is not None:
                    self._add_product(of_block, d.t(), x)
                elif apart:
                    of_block = self._product(d.t(), x)
                if total is not None:
                    self._add_product(total[first:last], d, w)
                del d
            if apart and of_block is not None:
                self._write(self.d_weight[begin:end], of_block)
        if total is not None and total is not self.d_hidden:
            self.tokens.put(self.d_hidden, 0, self.tokens.count, self._scaled(total))

    def _scaled(self, total: Tensor) -> Tensor:
        return total if self.factor is None else total.mul_(self.factor)

    def _sum_over_ranks(self) -> None:
        from torch.distributed import all_reduce

        total = self.d_hidden.to(self.number)
        all_reduce(total, group=groups.process_group(self.shard.group))
        self.d_hidden.copy_(total)
