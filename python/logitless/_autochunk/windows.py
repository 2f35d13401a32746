"""Overlapping windows along an axis, and the gradient of reading them, in any framework. Element k of all windows is a
strided view of the padded axis, so that sums over windows take no memory of their own."""

from __future__ import annotations

from dataclasses import dataclass

from logitless._autochunk.lower import Value, Writer


@dataclass(frozen=True)
class Windows:
    """`count` windows of `size` elements, one every `step` elements; a window's own are `apart` from each other."""

    size: int
    step: int
    count: int
    apart: int = 1

    @property
    def _rows(self) -> int:
        """The rows [rows, step] that hold every element of a window."""
        return self.count + (self.size - 1) * self.apart // self.step

    def _place(self, k: int) -> tuple[int, int]:
        """Returns the row and the column of element k of the first window."""
        return divmod(k * self.apart, self.step)

    def _split(self, shape, axis: int) -> list[int]:
        return [*shape[:axis], self._rows, self.step, *shape[axis + 1 :]]

    def elements(self, w: Writer, x: Value, axis: int) -> list[Value]:
        """Returns element k of each window, for each k: x's shape, but for `count` along the axis."""
        needed = self._rows * self.step
        x = w.slice(x, axis, 0, min(needed, x.shape[axis]))
        x = w.pad(x, axis, 0, needed - x.shape[axis])
        rows = w.reshape(x, self._split(x.shape, axis))
        made = []
        for k in range(self.size):
            row, column = self._place(k)
            part = w.slice(w.slice(rows, axis, row, row + self.count), axis + 1, column, column + 1)
            made.append(w.reshape(part, [*x.shape[:axis], self.count, *x.shape[axis + 1 :]]))
        return made

    def added(self, w: Writer, parts: list[Value], axis: int, size: int) -> Value:
        """Adds element k of each window where `elements` reads it, in zeros of this size along the axis."""
        columns: dict[int, Value] = {}
        for k, part in enumerate(parts):
            row, column = self._place(k)
            whole = w.pad(part, axis, row, self._rows - row - self.count)
            columns[column] = w.add(columns[column], whole) if column in columns else whole
        shape = [*parts[0].shape[:axis], self._rows, 1, *parts[0].shape[axis + 1 :]]
        none = w.number(0, parts[0].dtype, shape)
        found = [w.reshape(columns[c], shape) if c in columns else none for c in range(self.step)]
        made = w.concat(found, axis + 1)
        made = w.reshape(made, [*shape[:axis], self._rows * self.step, *shape[axis + 2 :]])
        made = w.slice(made, axis, 0, min(size, made.shape[axis]))
        return w.pad(made, axis, 0, size - made.shape[axis])


def summed(w: Writer, parts: list[Value]) -> Value:
    made = parts[0]
    for part in parts[1:]:
        made = w.add(made, part)
    return made
