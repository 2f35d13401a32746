"""Programs with one softmax of the logits, whose gradient is a one-hot value plus one multiple of the softmax. The
compiler recognises heads for its engine in this form, which takes the fewest passes over the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from logitless._autochunk.lower import Value, Writer, broadcast_shapes


_DEPTH = 5  # the most nested functions that a reshape is moved through, enough for the index arithmetic of frameworks


class Multiple(NamedTuple):
    """Exponentials, each row multiplied by a number."""

    exponentials: Value
    row: Value
    dims: tuple[int, ...]  # the dimensions of the exponentials that row has


class HeadWriter(Writer):
    """A writer that removes common subexpressions, merges multiples of the same exponentials, and emits matrix products
    of 16-bit operands in f32 where asked (`wide`). Reassociated sums differ by f32 rounding."""

    wide = False  # the next matrix products are read in f32 alone

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made: dict[tuple, Value] = {}
        self.maps: dict[str, tuple[str, list[Value]]] = {}  # function and operands of each map
        self.multiples: dict[str, Multiple] = {}

    def emit(self, text: str, operands: Sequence[Value], dtype, shape, attributes: str = "", arange=None) -> Value:
        names = tuple(self.written(v).name for v in operands)
        key = (text, names, dtype, tuple(shape), attributes)
        if key not in self.made:
            self.made[key] = super().emit(text, operands, dtype, shape, attributes, arange)
        return self.made[key]

    def dot(self, a: Value, b: Value, contract, batch=((), ()), dtype=None) -> Value:
        if self.wide and dtype is None and a.dtype in self.dtypes.narrow:
            dtype = self.dtypes.f32
        return super().dot(a, b, contract, batch, dtype)

    def reshape(self, v: Value, shape: Sequence[int]) -> Value:
        """Reshapes a value. A function of reshaped values becomes the function of the values themselves."""
        made = self._unshaped(v, tuple(shape)) if v.name in self.maps and tuple(shape) != v.shape else None
        return super().reshape(v, shape) if made is None else made

    def _unshaped(self, v: Value, shape: tuple[int, ...], depth: int = 0) -> Value | None:
        """Returns the value in another shape, if that takes no reshape."""
        if v.number is not None:
            return Value("", v.dtype, shape, v.number)
        source = self.views.get(v.name) if v.name not in self.dims else None
        if source is not None and source.shape == shape:
            return source
        if v.name in self.repeats and self.repeats[v.name][0].rank == 0:
            return self.broadcast_dims(self.repeats[v.name][0], shape, [])
        function, operands = self.maps.get(v.name, ("", []))
        if not operands or depth == _DEPTH or any(o.shape != v.shape and o.number is None for o in operands):
            return None
        sources = [self._unshaped(o, shape, depth + 1) for o in operands]
        if None in sources:
            return None
        return self.map(function, sources, v.dtype)

    def pick(self, v: Value, index: Value, axis: int) -> Value:
        """Picks an element of each row. A pick from logits minus a number per row becomes the picked logit minus the
        number."""
        function, z, whole = self.sums.get(v.name, ("", v, v))
        row, dims = self.repeats.get(whole.name, (None, ()))
        if function == "sub" and row is not None and axis not in dims:
            picked = super().pick(z, index, axis)
            return self.sub(picked, self.broadcast_dims(row, picked.shape, [d - (d > axis) for d in dims]))
        return super().pick(v, index, axis)

    def map(self, function: str, operands: Sequence[Value], dtype) -> Value:
        if function == "sub" and self.settled:
            # The row of a softmax beside it is NaN there, and so is any sum of the two.
            whole = self.broadcast(operands[1], broadcast_shapes(*(v.shape for v in operands)))
            row, dims = self.repeats.get(whole.name, (whole, ()))
            if whole.name in self.repeats and row.name in self.settled:
                operands = [operands[0], self.broadcast_dims(self.settled[row.name], whole.shape, dims)]
        if function in ("add", "sub") and operands[0].shape == operands[1].shape:
            made = self._collected(function, *operands)
            if made is not None:
                return made
        if function == "mul":
            shape = broadcast_shapes(*(v.shape for v in operands))
            operands = [self.broadcast(v, shape) for v in operands]
        made = super().map(function, operands, dtype)
        if made.number is None and made not in operands:
            self.maps[made.name] = function, list(operands)
        if function == "mul":
            for x, by in zip(operands, reversed(operands)):
                row = self.repeats.get(by.name)
                if row is not None and by.shape == x.shape and self.maps.get(x.name, ("",))[0] == "exp":
                    self.multiples[made.name] = Multiple(x, *row)
        return made

    def _parts(self, v: Value) -> tuple[Value | None, Multiple | None]:
        """Splits a value into a multiple and the rest of its sum."""
        if v.name in self.multiples:
            return None, self.multiples[v.name]
        function, a, b = self.sums.get(v.name, ("", v, v))
        if function == "add" and b.name in self.multiples:
            return a, self.multiples[b.name]
        if function == "add" and a.name in self.multiples:
            return b, self.multiples[a.name]
        return v, None

    def _collected(self, function: str, a: Value, b: Value) -> Value | None:
        """Merges a sum or difference of multiples of the same exponentials into one multiple, and writes a difference
        as a sum."""
        (rest, x), (other, y) = self._parts(a), self._parts(b)
        if y is None or (function == "sub" and other is not None):
            return None
        row = self.map("neg", [y.row], y.row.dtype) if function == "sub" else y.row
        if x is not None and (x.exponentials, x.dims) == (y.exponentials, y.dims):
            row = self.map("add", [x.row, row], row.dtype)
            if rest is None or other is None:
                rest = other if rest is None else rest
            else:
                rest = super().map("add", [rest, other], a.dtype)
        elif function == "sub":
            rest = a
        else:
            return None
        p = y.exponentials
        whole = self.mul(p, self.broadcast_dims(row, p.shape, y.dims))
        return whole if rest is None else super().map("add", [rest, whole], a.dtype)
