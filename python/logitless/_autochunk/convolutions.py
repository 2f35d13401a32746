"""Convolutions along one axis whose windows overlap, in any framework: a matrix product over the windows' elements, or
for a channel alone a sum of shifted products."""

from __future__ import annotations

from dataclasses import dataclass

from logitless._autochunk.lower import Value, Writer
from logitless._autochunk.windows import Windows, summed

MOST_TAPS = 32  # elements of a window, or windows of a row; each takes an operation


@dataclass(frozen=True)
class Convolution:
    """Rows [N, C, L], padded by `low` and `high` zeros, and a kernel [O, C / groups, K]. `taps` is K. A window's elements
    are `apart` from each other, and windows `step`. Operands of 16 bits are summed in f32."""

    length: int  # L
    taps: int
    step: int = 1
    apart: int = 1
    low: int = 0
    high: int = 0
    groups: int = 1

    @property
    def count(self) -> int:
        """The windows of a row."""
        return (self.length + self.low + self.high - self.apart * (self.taps - 1) - 1) // self.step + 1

    @property
    def _windows(self) -> Windows:
        return Windows(self.taps, self.step, self.count, self.apart)

    def _apart(self, weight: Value) -> bool:
        """Returns whether each channel has a kernel of its own."""
        return self.groups > 1 and self.groups == weight.shape[0] and weight.shape[1] == 1

    def _parts(self, w: Writer, x: Value) -> list[Value]:
        """Returns element k of all windows, [N, C, count], for each k."""
        return self._windows.elements(w, w.pad(x, 2, self.low, self.high), 2)

    def _grouped(self, w: Writer, v: Value, axis: int) -> Value:
        """Splits an axis of channels to [groups, channels of a group]."""
        return w.reshape(v, [*v.shape[:axis], self.groups, v.shape[axis] // self.groups, *v.shape[axis + 1 :]])

    def _stack(self, w: Writer, x: Value) -> Value:
        """Returns the windows as [N, groups, C / groups, K, count]: by elements of all windows, or by windows."""
        if self.taps <= MOST_TAPS:
            made = w.concat([w.reshape(p, [*p.shape[:2], 1, p.shape[2]]) for p in self._parts(w, x)], 2)
        else:
            windows = Windows(self.count, self.apart, self.taps, self.step)
            parts = windows.elements(w, w.pad(x, 2, self.low, self.high), 2)
            made = w.concat([w.reshape(p, [*p.shape, 1]) for p in parts], 3)
        return self._grouped(w, made, 1)

    def _tap(self, w: Writer, weight: Value, k: int, wide) -> Value:
        """Returns element k of each channel's own kernel, [1, C, 1]."""
        part = w.slice(weight, 2, k, k + 1)
        return w.cast(w.reshape(part, [1, weight.shape[0], 1]), wide)

    def _ungrouped(self, w: Writer, v: Value) -> Value:
        """Turns [groups, N, count, O / groups] to [N, O, count]."""
        groups, rows, count, channels = v.shape
        return w.reshape(w.transpose(v, [1, 0, 3, 2]), [rows, groups * channels, count])

    def convolved(self, w: Writer, x: Value, weight: Value, dtype=None) -> Value:
        """Returns the convolution [N, O, count]. dtype: x's, or f32 for 16 bits."""
        if self._apart(weight) and self.taps <= MOST_TAPS:
            wide = w.dtypes.wide(x.dtype)
            terms = [w.mul(w.cast(p, wide), self._tap(w, weight, k, wide)) for k, p in enumerate(self._parts(w, x))]
            return w.cast(summed(w, terms), x.dtype if dtype is None else dtype)
        made = w.dot(self._stack(w, x), self._grouped(w, weight, 0), ([2, 3], [2, 3]), ([1], [0]), dtype=dtype)
        return self._ungrouped(w, made)

    def gradient_of_weight(self, w: Writer, x: Value, weight: Value, cotangent: Value) -> Value:
        """Returns the gradient [O, C / groups, K] by the kernel. cotangent: [N, O, count]."""
        if self._apart(weight):
            wide = w.dtypes.wide(x.dtype)
            grad = w.cast(cotangent, wide)
            sums = [w.reduce("reduce_sum", w.mul(w.cast(p, wide), grad), [0, 2]) for p in self._parts(w, x)]
            made = w.concat([w.reshape(s, [weight.shape[0], 1, 1]) for s in sums], 2)
            return w.cast(made, weight.dtype)
        made = w.dot(self._grouped(w, cotangent, 1), self._stack(w, x), ([0, 3], [0, 4]), ([1], [1]))
        return w.reshape(made, weight.shape)

    def gradient_of_rows(self, w: Writer, x: Value, weight: Value, cotangent: Value) -> Value:
        """Returns the gradient [N, C, L] by the rows."""
        wide = w.dtypes.wide(x.dtype)
        if self._apart(weight):
            grad = w.cast(cotangent, wide)
            parts = [w.mul(grad, self._tap(w, weight, k, wide)) for k in range(self.taps)]
        else:
            grad, kernel = self._grouped(w, cotangent, 1), self._grouped(w, weight, 0)
            made = w.dot(grad, kernel, ([2], [1]), ([1], [0]), dtype=wide)  # [groups, N, count, C / groups, K]
            parts = [self._ungrouped(w, self._element(w, made, k)) for k in range(self.taps)]
        size = self.length + self.low + self.high
        made = self._windows.added(w, parts, 2, size)
        return w.cast(w.slice(made, 2, self.low, self.low + self.length), x.dtype)

    def _element(self, w: Writer, v: Value, k: int) -> Value:
        return w.reshape(w.slice(v, v.rank - 1, k, k + 1), v.shape[:-1])
