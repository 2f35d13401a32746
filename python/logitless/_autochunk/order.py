"""Statements along one axis: the reverse order, running results and sorts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logitless._autochunk.lower import Value


class Order:
    """The part of a Writer for these statements."""

    def __init__(self):
        self.flips: dict[str, tuple[Value, int]] = {}  # the operand and the axis of each
        self.scans: dict[str, tuple[str, Value, int, bool]] = {}  # the arguments of each
        self.distinct: dict[str, int] = {}  # indices that are distinct along this dimension

    def flip(self, v: Value, axis: int) -> Value:
        """Reverses an axis. A flip of a flip is the value itself, and a flipped scan of a flipped value is a scan in the
        other direction."""
        if self.constant_of(v) is not None or v.shape[axis] == 1:
            return v
        source = self.flipped(v, axis)
        if source is not None:
            return source
        kind, x, along, reverse = self.scans.get(v.name, ("", v, -1, False))
        source = self.flipped(x, axis) if along == axis else None
        if source is not None:  # so a framework writes a scan from the end on
            return self.scan(kind, source, axis, not reverse)
        made = self.emit("flip", [v], v.dtype, v.shape, f" axis({axis})")
        self.flips[made.name] = v, axis
        return made

    def flipped(self, v: Value, axis: int) -> Value | None:
        """Returns the value that v is a flip of along the axis, or None."""
        source, along = self.flips.get(v.name, (None, axis))
        return source if along == axis else None

    def scan(self, kind: str, v: Value, axis: int, reverse: bool = False) -> Value:
        """Writes a cumsum, cumlse, cumprod or cummax along an axis. 16-bit values accumulate in f32."""
        source = self.flipped(v, axis)
        if self.native and source is not None:  # loops read a flip where it is; a scan would copy it
            return self.flip(self.scan(kind, source, axis, not reverse), axis)
        hot = self.one_hots.get(v.name)
        if kind == "cumsum" and hot is not None and hot.axis == axis:
            return self._steps(hot, v.shape, reverse)
        wide = self.cast(v, self.dtypes.wide(v.dtype))
        made = self.emit(kind, [wide], wide.dtype, v.shape, f" axis({axis}) reverse({int(reverse)})")
        made = self.cast(made, v.dtype)
        self.scans[made.name] = kind, v, axis, reverse
        return made

    def _steps(self, hot, shape, reverse: bool) -> Value:
        """Returns running sums of a one-hot value: its part from the index on, or up to it. One out of range is 0."""
        index, dims = hot.index, [d for d in range(len(shape)) if d != hot.axis]
        test, end = ("lt", shape[hot.axis]) if reverse else ("ge", 0)
        inside = self.map(test, [index, self.number(end, index.dtype)], self.dtypes.i8)
        part = self.map("select", [inside, hot.part, self.number(0, hot.part.dtype)], hot.part.dtype)
        place, whole = self.iota(shape, hot.axis, index.dtype), self.broadcast_dims(index, shape, dims)
        counts = self.map("le" if reverse else "ge", [place, whole], self.dtypes.i8)
        parts = self.broadcast_dims(part, shape, dims)
        return self.map("select", [counts, parts, self.number(0, part.dtype)], part.dtype)

    def recurrence(self, a: Value, b: Value, axis: int, reverse: bool) -> Value:
        """Writes y[k] = a[k] y[k - 1] + b[k] along an axis, the first of which is b's; k + 1 for k - 1 if reversed."""
        wide = [self.cast(v, self.dtypes.wide(v.dtype)) for v in (a, b)]
        made = self.emit("recurrence", wide, wide[1].dtype, b.shape, f" axis({axis}) reverse({int(reverse)})")
        return self.cast(made, b.dtype)

    def sort(self, v: Value, axis: int, count: int, descending: bool) -> tuple[Value, Value]:
        """Returns the first `count` elements along an axis in sorted order, and their indices."""
        shape = [count if d == axis else s for d, s in enumerate(v.shape)]
        attributes = f" axis({axis}) count({count}) descending({int(descending)})"
        values, index = self.emit_all("sort", [v], [(v.dtype, shape), (self.dtypes.i64, shape)], attributes)
        self.distinct[index.name] = axis
        self.bounds[index.name] = 0, v.shape[axis] - 1
        return values, index
