"""Recognises log-sum-exps, which JAX writes out as arithmetic.

JAX writes a softmax with a maximum m that cancels: s = sum exp(x - m), log s + m, exp(x - m) / s. With lse = log sum
exp x, these are exp(lse - m), lse and exp(x - lse). In this form the maximum disappears, and the sum merges over
chunks. No value of x's size is saved between the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from logitless._autochunk.lower import Value, Writer
from logitless._autochunk.softmax import settled
from logitless.jax._autochunk.dtypes import DTYPES


@dataclass(frozen=True)
class Note:
    """The role of a value in a softmax of x along axes."""

    kind: str  # "max" m; "finite" of m; "shifted" x - m; "exp" of it; "sum" s; "log" s; "quotient" part / s
    x: Value
    axes: tuple[int, ...]
    top: Value | None = None  # m, without the axes
    lse: Value | None = None  # without the axes, in the dtype of accumulation
    part: Value | None = None
    finite: bool = False  # of m: 0 stands in the place of an infinite one


class Softmaxes:
    """Roles of a writer's values. Each method returns None if its primitive is lowered as usual."""

    def __init__(self, writer: Writer):
        self.w = writer
        self.notes: dict[str, Note] = {}

    def root(self, v: Value) -> Value:
        """Returns the source of a reshape, or the value itself."""
        w = self.w
        return w.views[v.name] if v.name in w.views and v.name not in w.dims else v

    def of(self, v: Value, *kinds: str) -> Note | None:
        found = self.notes.get(v.name) or self.notes.get(self.root(v).name)
        return found if found is not None and found.kind in kinds else None

    def keep(self, v: Value, note: Note) -> Value:
        if v.number is None:
            self.notes[v.name] = note
        return v

    def row(self, v: Value, x: Value, axes) -> Value | None:
        """Returns the value that v repeats along the axes of x, or None."""
        rest = [s for d, s in enumerate(x.shape) if d not in axes]
        count = 1
        for s in rest:
            count *= s
        if v.number is not None:
            return Value("", v.dtype, tuple(rest), v.number)
        found = v
        if v.name in self.w.repeats:
            found, dims = self.w.repeats[v.name]
            if any(d in axes for d in dims) or v.shape != x.shape:
                return None
        elif v.shape != tuple(1 if d in axes else s for d, s in enumerate(x.shape)):
            return None
        elements = 1
        for s in found.shape:
            elements *= s
        return self.root(found) if elements == count else None

    def spread(self, row: Value, x: Value, axes) -> Value:
        return self.w.reshape(row, [1 if d in axes else s for d, s in enumerate(x.shape)])

    # --- the roles above
    def maximum(self, m: Value, x: Value, axes) -> Value:
        return self.keep(m, Note("max", x, tuple(axes))) if DTYPES.floating(x.dtype) else m

    def finite(self, test: Value, m: Value) -> Value:
        note = self.of(m, "max")
        return test if note is None else self.keep(test, Note("finite", note.x, note.axes, self.root(m)))

    def guarded(self, made: Value, test: Value, other: Value, m: Value) -> Value:
        """Marks m, replaced by 0 where it is not finite."""
        note = self.of(test, "finite")
        same = note is not None and other.is_number(0) and self.root(m).name == note.top.name
        return self.keep(made, Note("max", note.x, note.axes, finite=True)) if same else made

    def cast(self, made: Value, v: Value) -> Value:
        note = self.of(v, "exp", "sum", "log")
        both = DTYPES.floating(made.dtype) and DTYPES.floating(v.dtype)
        return self.keep(made, note) if note is not None and both and made.name != v.name else made

    def exp(self, made: Value, v: Value) -> Value:
        note = self.of(v, "shifted")
        return made if note is None else self.keep(made, Note("exp", note.x, note.axes, note.top))

    def sum(self, v: Value, axes) -> Value | None:
        note = self.of(v, "exp")
        if note is None or note.axes != tuple(axes):
            return None
        w = self.w
        x = w.cast(note.x, DTYPES.wide(note.x.dtype))
        lse = w.reduce("reduce_lse", x, list(axes))
        top = w.reshape(w.cast(note.top, lse.dtype), lse.shape)
        made = w.cast(w.map("exp", [w.sub(lse, top)], lse.dtype), v.dtype)
        return self.keep(made, Note("sum", note.x, note.axes, note.top, lse))

    def log(self, v: Value) -> Value | None:
        note = self.of(v, "sum")
        if note is None:
            return None
        w = self.w
        top = w.reshape(w.cast(note.top, note.lse.dtype), note.lse.shape)
        made = w.cast(w.sub(note.lse, top), v.dtype)
        self.keep(made, Note("log", note.x, note.axes, note.top, note.lse))
        return w.reshape(made, v.shape)

    def add(self, a: Value, b: Value) -> Value | None:
        for v, other in ((a, b), (b, a)):
            note = self.of(v, "log")
            if note is not None and v.shape == other.shape and self.root(other).name == note.top.name:
                lse = note.lse if self._finite(note) else settled(self.w, note.lse)
                return self.w.reshape(self.w.cast(lse, v.dtype), v.shape)
        return None

    def sub(self, a: Value, b: Value) -> Value | None:
        shifted = self.of(a, "shifted")
        row = self.row(b, a, shifted.axes) if shifted is not None else None
        log = self.of(row, "log") if row is not None else None
        if log is None or not self._same(log, shifted):
            return None
        return self._apart(log, a.dtype)

    def shift(self, made: Value, x: Value, b: Value) -> Value:
        """Marks x - m."""
        axes = self._axes_of(b, x)
        row = None if axes is None else self.row(b, x, axes)
        if row is None or made.name == x.name:
            return made
        return self.keep(made, Note("shifted", x, axes, row))

    def _axes_of(self, b: Value, x: Value) -> tuple[int, ...] | None:
        source = self.w.repeats[b.name][0] if b.name in self.w.repeats else b
        note = self.of(source, "max")
        return note.axes if note is not None and note.x.name == x.name else None

    def div(self, a: Value, b: Value) -> Value | None:
        note = self.of(a, "exp")
        row = self.row(b, a, note.axes) if note is not None else None
        total = self.of(row, "sum") if row is not None else None
        return self._share(total, a.dtype) if total is not None and self._same(total, note) else None

    def quotient(self, made: Value, a: Value, b: Value) -> Value:
        note = self.of(b, "sum")
        if note is None or (a.shape != b.shape and a.rank > 0):
            return made
        return self.keep(made, Note("quotient", note.x, note.axes, note.top, note.lse, a))

    def mul(self, a: Value, b: Value) -> Value | None:
        """Lowers part / s * exp(x - m) to part * exp(x - lse)."""
        for v, other in ((a, b), (b, a)):
            note = self.of(v, "exp")
            row = self.row(other, v, note.axes) if note is not None else None
            by = self.of(row, "quotient") if row is not None else None
            if by is None or not self._same(by, note):
                continue
            w, rest = self.w, [s for d, s in enumerate(note.x.shape) if d not in note.axes]
            part = w.reshape(w.broadcast(by.part, row.shape), rest)
            return w.mul(self._share(by, v.dtype), self.spread(part, note.x, note.axes))
        return None

    def pick(self, v: Value, picked: Callable[[Value], Value], axis: int) -> Value | None:
        """Picks one or several elements of each row of x - m, as elements of x minus m."""
        note = self.of(v, "shifted")
        if note is None or note.axes != (axis,):
            return None
        found = picked(note.x)
        rest = [s for d, s in enumerate(note.x.shape) if d != axis]
        top = self.w.reshape(note.top, rest)
        if found.rank == note.x.rank:
            top = self.w.broadcast_dims(top, found.shape, [d for d in range(found.rank) if d != axis])
        return self.w.sub(found, top)

    def _same(self, one: Note, other: Note) -> bool:
        return one.x.name == other.x.name and one.axes == other.axes

    def _subtracted(self, note: Note) -> Value:
        """lse; NaN of rows with an m that is not finite, where JAX subtracts that."""
        if not self._finite(note):
            return settled(self.w, note.lse)
        return self.w.settled.get(note.lse.name, note.lse)  # one softmax of both, which adds up to NaN

    def _finite(self, note: Note) -> bool:
        top = self.of(note.top, "max")
        return top is not None and top.finite

    def _apart(self, note: Note, dtype) -> Value:
        """Returns x - lse."""
        x = self.w.cast(note.x, note.lse.dtype)
        return self.w.cast(self.w.sub(x, self.spread(self._subtracted(note), x, note.axes)), dtype)

    def _share(self, note: Note, dtype) -> Value:
        x = self.w.cast(note.x, note.lse.dtype)
        apart = self.w.sub(x, self.spread(self._subtracted(note), x, note.axes))
        return self.w.cast(self.w.map("exp", [apart], apart.dtype), dtype)
