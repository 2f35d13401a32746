"""Writes statements of the text form of tensor programs (docs/reference/ir.md) for a framework's operations."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from logitless._autochunk.bounds import Bounds, bounds_of
from logitless._autochunk.checks import Check, Indices
from logitless._autochunk.dtypes import Dtypes
from logitless._autochunk.externs import Call, Row
from logitless._autochunk.options import Unsupported
from logitless._autochunk.order import Order


@dataclass(frozen=True)
class Value:
    """A value of the program. A constant is not written until a statement needs it."""

    name: str
    dtype: Any  # the framework's
    shape: tuple[int, ...]
    number: float | int | bool | None = None
    arange: int | None = None  # its elements are the index along this dimension; all other sizes are 1

    @property
    def rank(self) -> int:
        return len(self.shape)

    def is_number(self, number: float) -> bool:
        return self.number is not None and self.number == number


@dataclass(frozen=True)
class OneHot:
    """`part` where the index along the axis equals `index`, else 0. Both have the shape without the axis."""

    axis: int
    index: Value
    part: Value


@dataclass(frozen=True)
class Put:
    """Zeros with `updates` added at `index` along the axis; both have the same shape."""

    axis: int
    index: Value
    updates: Value


def rules_of(table: dict[str, Callable]) -> Callable:
    """Returns a decorator factory that registers a function in a table under several names."""

    def rules(*names: str):
        def keep(function):
            table.update(dict.fromkeys(names, function))
            return function

        return keep

    return rules


class Writer(Indices, Order):
    """Writes the statements of a program. Each method adds at most a few."""

    native = False  # the library runs the program, and calls no function of the framework

    def __init__(self, dtypes: Dtypes):
        super().__init__()
        self.dtypes = dtypes
        self.lines: list[str] = []
        self.taken: set[str] = set()
        self.views: dict[str, Value] = {}  # the source of each reshape and transpose
        self.dims: dict[str, tuple[int, ...]] = {}  # the permutation of each transpose
        self.constants: dict[tuple, Value] = {}
        self.one_hots: dict[str, OneHot] = {}
        self.puts: dict[str, Put] = {}
        self.sums: dict[str, tuple[str, Value, Value]] = {}  # the operands of each add and sub
        self.repeats: dict[str, tuple[Value, tuple[int, ...]]] = {}  # the operand and dims of each broadcast
        self.uniform: dict[str, float] = {}  # results of arithmetic on constants, which would round
        self.settled: dict[str, Value] = {}  # log-sum-exps as a softmax subtracts them (softmax.py)
        self.calls: dict[str, Call] = {}  # the framework's functions, by key
        self.seed: Value | None = None  # i64 [2], an input: the key of random numbers
        self.keys: list[Value] = []  # its two 32-bit halves, once something reads them
        self.drawn = 0  # random operations before the one being lowered
        self.op = ""  # the operation being lowered, for errors
        self.asked = ""  # the user's operation that it is a part of
        self.location = ""  # the line of the user's code, if known
        self.locations: dict[str, str] = {}  # the line of each value
        self.hint = ""
        self.device = "cpu"  # the device it runs on, by the framework's name
        self.bounds: dict[str, Bounds] = {}  # bounds of integer values, if known
        self.checks: dict[tuple, Check] = {}  # checks of indices, which a run on a CPU makes

    def refuse(self, why: str) -> Unsupported:
        return Unsupported(f"autochunk: {self.prefix}{self.op}: {why}")

    @property
    def prefix(self) -> str:
        """Returns the prefix of messages: the line of the user's code, if known."""
        return f"{self.location}: " if self.location else ""

    def type(self, dtype, shape: Sequence[int]) -> str:
        name = self.dtypes.name(dtype)
        if name is None:
            raise self.refuse(
                f"dtype {dtype} has no form in a tensor program; expected one of {self.dtypes.listed()}"
            )
        return f"{name}[{', '.join(str(s) for s in shape)}]"

    def fresh(self, hint: str) -> str:
        name = re.sub(r"\W", "_", hint)
        if name[:1].isdigit():
            name = "v" + name
        unique, k = name, 1
        while unique in self.taken:
            unique, k = f"{name}_{k}", k + 1
        self.taken.add(unique)
        return unique

    def emit(self, text: str, operands: Sequence[Value], dtype, shape, attributes: str = "", arange=None) -> Value:
        written = ", ".join(f"%{self.written(v).name}" for v in operands)
        result = self.type(dtype, shape)
        name = self.fresh(self.hint)
        if self.location:
            self.locations[name] = self.location
        self.lines.append(f"  %{name} = {text} {written}{attributes} : {result}")
        found = None if self.dtypes.floating(dtype) else bounds_of(text, [self.range_of(v) for v in operands], shape)
        if found is not None:
            self.bounds[name] = found
        return Value(name, dtype, tuple(shape), arange=arange)

    def emit_all(self, text: str, operands: Sequence[Value], types: Sequence[tuple], attributes: str) -> list[Value]:
        """Writes an operation with several results, one for each (dtype, shape)."""
        written = ", ".join(f"%{self.written(v).name}" for v in operands)
        for dtype, shape in types:
            self.type(dtype, shape)
        names = [self.fresh(f"{self.hint}_{i}") for i in range(len(types))]
        if self.location:
            self.locations.update((name, self.location) for name in names)
        self.lines.append(f"  {', '.join(f'%{name}' for name in names)} = {text} {written}{attributes}")
        return [Value(name, dtype, tuple(shape)) for name, (dtype, shape) in zip(names, types)]

    def written(self, v: Value) -> Value:
        """Returns the value after writing its constant, if it has no statement yet."""
        if v.number is None or v.name:
            return v
        number = float(v.number)
        if isinstance(v.number, int) and int(number) != v.number:
            raise self.refuse(f"the whole number {v.number} has no form in a tensor program, whose numbers are doubles")
        text = repr(number) if math.isfinite(number) else str(number)
        key = (text, v.dtype, v.shape)
        if key not in self.constants:
            name = self.fresh("c")
            self.lines.append(f"  %{name} = constant value({text}) : {self.type(v.dtype, v.shape)}")
            self.constants[key] = Value(name, v.dtype, v.shape, v.number)
        return self.constants[key]

    # --- numbers, shapes, dtypes
    def number(self, number, dtype, shape: Sequence[int] = ()) -> Value:
        self.type(dtype, shape)
        if isinstance(number, complex):
            raise self.refuse("complex numbers have no form in a tensor program")
        number = bool(number) if dtype == self.dtypes.i8 else number
        return Value("", dtype, tuple(shape), float(number) if self.dtypes.floating(dtype) else int(number))

    def iota(self, shape: Sequence[int], axis: int, dtype=None) -> Value:
        dtype = self.dtypes.i64 if dtype is None else dtype
        only = all(s == 1 for d, s in enumerate(shape) if d != axis)
        return self.emit("iota", [], dtype, shape, f"axis({axis})", axis if only else None)

    def between(self, shape: Sequence[int], axis: int, begin: int, end: int) -> Value:
        """Returns whether the index along the axis is in [begin, end), in this shape."""
        index = self.iota([shape[axis]], 0)
        ge, lt = (
            self.map(test, [index, self.number(n, index.dtype, index.shape)], self.dtypes.i8)
            for test, n in (("ge", begin), ("lt", end))
        )
        inside = lt if begin == 0 else ge if end == shape[axis] else self.map("logical_and", [ge, lt], self.dtypes.i8)
        return self.broadcast_dims(inside, shape, [axis])

    def cast(self, v: Value, dtype) -> Value:
        if v.dtype == dtype:
            return v
        if v.number is not None:
            narrower = dtype in self.dtypes.narrow or (v.dtype == self.dtypes.f64 and dtype == self.dtypes.f32)
            if self.dtypes.floating(dtype) and (not narrower or float(v.number).is_integer() and abs(v.number) <= 256):
                return self.number(v.number, dtype, v.shape)
        if dtype == self.dtypes.i8:
            return self.map("ne", [v, self.number(0, v.dtype)], self.dtypes.i8)
        if self.untransposed(v) is not None:
            return self.transpose(self.cast(self.untransposed(v), dtype), [1, 0])
        hot = self.one_hots.get(v.name)
        if hot is not None:
            return self.one_hot(hot.index, self.cast(hot.part, dtype), v.shape, hot.axis)
        put = self.puts.get(v.name)
        if put is not None and self.dtypes.floating(dtype):
            return self.put(put.index, self.cast(put.updates, dtype), v.shape[put.axis], put.axis)
        return self.emit("cast", [v], dtype, v.shape, arange=v.arange)

    def reshape(self, v: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        if shape == v.shape:
            return v
        if v.number is not None:
            return Value("", v.dtype, shape, v.number)
        while v.name in self.views and v.name not in self.dims:
            v = self.views[v.name]
        if shape == v.shape:
            return v
        arange = None
        if v.arange is not None:
            places = [d for d, s in enumerate(shape) if s == v.shape[v.arange]]
            if places and all(s == 1 for d, s in enumerate(shape) if d != places[0]):
                arange = places[0]
        made = self.emit("reshape", [v], v.dtype, shape, arange=arange)
        self.views[made.name] = v
        return made

    def transpose(self, v: Value, dims: Sequence[int]) -> Value:
        if list(dims) == list(range(v.rank)):
            return v
        shape = [v.shape[d] for d in dims]
        if v.number is not None:
            return Value("", v.dtype, tuple(shape), v.number)
        if v.name in self.dims:
            return self.transpose(self.views[v.name], [self.dims[v.name][d] for d in dims])
        made = self.emit("transpose", [v], v.dtype, shape, f" dims({_list(dims)})")
        self.views[made.name], self.dims[made.name] = v, tuple(dims)
        return made

    def broadcast_dims(self, v: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Broadcasts v: its dimension i becomes dimension dims[i], the other dimensions repeat it."""
        if v.number is not None:
            return Value("", v.dtype, tuple(shape), v.number)
        if tuple(shape) == v.shape:
            return v
        made = self.emit("broadcast", [v], v.dtype, shape, f" dims({_list(dims)})")
        self.repeats[made.name] = v, tuple(dims)
        return made

    def broadcast(self, v: Value, shape: Sequence[int]) -> Value:
        """Broadcasts v to a shape by PyTorch's rules, like ``expand``."""
        shape = tuple(shape)
        if v.shape == shape:
            return v
        if v.number is not None:
            return Value("", v.dtype, shape, v.number)
        lead = len(shape) - v.rank
        kept = [d for d in range(v.rank) if not (v.shape[d] == 1 and shape[lead + d] != 1)]
        small = self.reshape(v, [v.shape[d] for d in kept])
        return self.broadcast_dims(small, shape, [lead + d for d in kept])

    def slice(self, v: Value, axis: int, begin: int, end: int) -> Value:
        if begin == 0 and end == v.shape[axis]:
            return v
        shape = [end - begin if d == axis else s for d, s in enumerate(v.shape)]
        if v.number is not None:
            return Value("", v.dtype, tuple(shape), v.number)
        low = [begin if d == axis else 0 for d in range(v.rank)]
        high = [end if d == axis else s for d, s in enumerate(v.shape)]
        return self.emit("slice", [v], v.dtype, shape, f" begin({_list(low)}) end({_list(high)})")

    def pad(self, v: Value, axis: int, low: int, high: int) -> Value:
        if low == 0 and high == 0:
            return v
        shape = [s + (low + high if d == axis else 0) for d, s in enumerate(v.shape)]
        lows = [low if d == axis else 0 for d in range(v.rank)]
        highs = [high if d == axis else 0 for d in range(v.rank)]
        return self.emit("pad", [v], v.dtype, shape, f" low({_list(lows)}) high({_list(highs)})")

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        parts = [p for p in parts if p.shape[axis] > 0] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        return self.emit("concat", parts, parts[0].dtype, shape, f" axis({axis})")

    # --- arithmetic
    def map(self, function: str, operands: Sequence[Value], dtype) -> Value:
        """Writes an elementwise function of operands, broadcast by PyTorch's rules."""
        shape = broadcast_shapes(*(v.shape for v in operands))
        folded = self._folded(function, operands, dtype)
        if folded is not None:
            return self.broadcast(folded, shape)
        if function in ("mul", "neg"):
            hot = self._scaled_one_hot(operands, tuple(shape))
            if hot is not None:
                return hot
        spread = [self.broadcast(v, shape) for v in operands]
        turned = self._turned(function, spread, dtype)
        if turned is not None:
            return turned
        made = self.emit(function, spread, dtype, shape)
        known = [self.constant_of(v) for v in spread]
        if function in _ARITHMETIC and None not in known and (function != "div" or known[1] != 0):
            self.uniform[made.name] = _ARITHMETIC[function](*known)
        if function in ("add", "sub"):
            self.sums[made.name] = function, spread[0], spread[1]
        return made

    def constant_of(self, v: Value) -> float | int | bool | None:
        """Returns the number that all elements are, up to rounding, or None."""
        while v.number is None and v.name not in self.uniform:
            if v.name in self.views:
                v = self.views[v.name]
            elif v.name in self.repeats:
                v = self.repeats[v.name][0]
            else:
                return None
        return v.number if v.number is not None else self.uniform[v.name]

    def _folded(self, function: str, operands: Sequence[Value], dtype) -> Value | None:
        """Folds neutral elements, and constants where that does not round. Returns None if nothing folds."""
        a, b = operands[0], operands[1] if len(operands) > 1 else operands[0]
        if self._neutral(function, b) and a.dtype == dtype:
            return a
        if function in ("mul", "add") and self._neutral(function, a) and b.dtype == dtype:
            return b
        if function == "neg" and a.number is not None:
            return self.number(-a.number, dtype, a.shape)
        if function == "logical_and":
            if a.is_number(1):
                return b
            if b.is_number(1):
                return a
        if function == "logical_not" and a.number is not None:
            return self.number(not a.number, self.dtypes.i8, a.shape)
        if function == "select" and a.number is not None:
            return operands[1 if a.number else 2]
        return None

    def _neutral(self, function: str, v: Value) -> bool:
        """Returns whether x function v is x. For floats -0 + 0 is 0, and so is -0 - -0."""
        if not v.is_number({"mul": 1, "div": 1, "add": 0, "sub": 0}.get(function, math.nan)):
            return False
        zero = function in ("add", "sub") and self.dtypes.floating(v.dtype)
        return not zero or math.copysign(1, v.number) == (-1 if function == "add" else 1)

    def untransposed(self, v: Value) -> Value | None:
        """Returns the source of a transposed matrix, or None."""
        return self.views[v.name] if v.name in self.dims and v.rank == 2 else None

    def _turned(self, function: str, operands: Sequence[Value], dtype) -> Value | None:
        """Rewrites a function of transposed matrices as the transpose of a function of the matrices. All values
        computed from a matrix then have one dimension order, and can be chunked along the same dimension."""
        if not any(self.untransposed(v) is not None for v in operands):
            return None
        sources = [self._source(v) for v in operands]
        if any(v is None for v in sources):
            return None
        return self.transpose(self.map(function, sources, dtype), [1, 0])

    def _source(self, v: Value) -> Value | None:
        """Returns the transpose of a matrix if it is free: no operation on all of its elements."""
        shape = v.shape[::-1]
        if v.number is not None:
            return Value("", v.dtype, shape, v.number)
        if self.untransposed(v) is not None:
            return self.untransposed(v)
        if v.name in self.one_hots:
            hot = self.one_hots[v.name]
            return self.one_hot(hot.index, hot.part, shape, 1 - hot.axis)
        if v.name in self.repeats and self.repeats[v.name][0].rank <= 1:
            source, dims = self.repeats[v.name]
            return self.broadcast_dims(source, shape, [1 - d for d in dims])
        return None

    def _scaled_one_hot(self, operands: Sequence[Value], shape: tuple[int, ...]) -> Value | None:
        """Returns a one-hot value, scaled per row or negated, as a one-hot value with scaled parts."""
        for v, by in zip(operands, reversed(operands)):
            hot = self.one_hots.get(v.name)
            if hot is None or v.shape != shape:
                continue
            if len(operands) == 1:
                return self.one_hot(hot.index, self.map("neg", [hot.part], v.dtype), shape, hot.axis)
            rest = [s for d, s in enumerate(shape) if d != hot.axis]
            if by.number is None and by.name in self.repeats:
                source, dims = self.repeats[by.name]
                if by.rank != v.rank or hot.axis in dims:
                    continue
                by = self.broadcast_dims(source, rest, [d - (d > hot.axis) for d in dims])
            elif by.rank == v.rank and by.shape[hot.axis] == 1:
                by = self.reshape(by, [s for d, s in enumerate(by.shape) if d != hot.axis])
            elif by.rank > 0:
                continue
            return self.one_hot(hot.index, self.map("mul", [hot.part, by], v.dtype), shape, hot.axis)
        return None

    def one_hot(self, index: Value, part: Value, shape: Sequence[int], axis: int) -> Value:
        """Returns `part` where the index along the axis equals `index`, else 0. Every index must be in range."""
        others = [d for d in range(len(shape)) if d != axis]
        part = self.broadcast(part, [shape[d] for d in others])
        hit = self.at(index, shape, axis)
        whole = self.broadcast_dims(part, shape, others)
        made = self.map("select", [hit, whole, self.number(0, part.dtype)], part.dtype)
        self.one_hots[made.name] = OneHot(axis, index, part)
        return made

    def _row_sum(self, v: Value, axis: int) -> Value | None:
        """Returns the sum along an axis without reading a large value, or None. It applies to broadcast and one-hot
        values and to their sums."""
        rest = [s for d, s in enumerate(v.shape) if d != axis]
        hot = self.one_hots.get(v.name)
        if hot is not None and hot.axis == axis:
            return hot.part
        if v.name in self.puts and self.puts[v.name].axis == axis:
            return self.reduce("reduce_sum", self.puts[v.name].updates, [axis])
        if hot is not None and v.rank == 2:
            return self.scatter_add(hot.index, hot.part, v.shape[hot.axis])
        if v.number is None and v.name in self.repeats and axis not in self.repeats[v.name][1]:
            source, dims = self.repeats[v.name]
            small = self.broadcast_dims(source, rest, [d - (d > axis) for d in dims])
            return self.scaled(small, v.shape[axis])
        if v.name in self.sums:
            function, a, b = self.sums[v.name]
            x = self._row_sum(a, axis)
            y = self._row_sum(b, axis) if x is not None else None
            return None if y is None else self.map(function, [x, y], v.dtype)
        return None

    def add(self, a: Value, b: Value) -> Value:
        return self.map("add", [a, b], a.dtype)

    def sub(self, a: Value, b: Value) -> Value:
        return self.map("sub", [a, b], a.dtype)

    def mul(self, a: Value, b: Value) -> Value:
        return self.map("mul", [a, b], a.dtype)

    def div(self, a: Value, b: Value) -> Value:
        return self.map("div", [a, b], a.dtype)

    def scaled(self, a: Value, by: float) -> Value:
        return self.mul(a, self.number(by, a.dtype))

    # --- reductions and matrix products
    def reduce(self, kind: str, v: Value, dims: Sequence[int], keep: bool = False, dtype=None) -> Value:
        dtype = v.dtype if dtype is None else dtype
        if kind == "reduce_sum" and self.dtypes.floating(dtype):
            for axis in dims:
                row = self._row_sum(v, axis)
                if row is not None:
                    inner = [d - (d > axis) for d in dims if d != axis]
                    made = self.reduce(kind, row, inner, dtype=dtype)
                    return self.reshape(made, [1 if d in dims else s for d, s in enumerate(v.shape)]) if keep else made
        source = self.untransposed(v)
        if source is not None and dims:
            made = self.reduce(kind, source, [1 - d for d in dims], dtype=dtype)
            return self.reshape(made, [1 if d in dims else s for d, s in enumerate(v.shape)]) if keep else made
        rest = [s for d, s in enumerate(v.shape) if d not in dims]
        if dims:
            made = self.emit(kind, [v], dtype, rest, f" dims({_list(sorted(dims))})")
            if kind == "argmax":  # reduces one dimension
                self.bounds[made.name] = 0, v.shape[dims[0]] - 1
        else:  # dimensions of size 1
            made = self.cast(v, dtype)
        return self.reshape(made, [1 if d in dims else s for d, s in enumerate(v.shape)]) if keep else made

    def dot(self, a: Value, b: Value, contract, batch=((), ()), dtype=None) -> Value:
        """Contracts a and b. dtype: f32 for 16-bit operands, else the operands' own."""
        (ca, cb), sources = contract, (self.untransposed(a), self.untransposed(b))
        if not batch[0] and len(ca) == 1:
            if sources[0] is not None:
                a, ca = sources[0], [1 - ca[0]]
            if sources[1] is not None:
                b, cb = sources[1], [1 - cb[0]]
        contract = ca, cb
        free = [s for d, s in enumerate(a.shape) if d not in (*batch[0], *contract[0])]
        free += [s for d, s in enumerate(b.shape) if d not in (*batch[1], *contract[1])]
        shape = [a.shape[d] for d in batch[0]] + free
        attributes = f" batch({_list(batch[0])}; {_list(batch[1])})" if batch[0] else ""
        attributes += f" contract({_list(contract[0])}; {_list(contract[1])})"
        if not self.dtypes.floating(a.dtype):
            raise self.refuse(f"products of {a.dtype} have no form in a tensor program; expected floats")
        return self.emit("dot", [a, b], a.dtype if dtype is None else dtype, shape, attributes)

    # --- indices
    def pick(self, v: Value, index: Value, axis: int) -> Value:
        """Picks one element along the axis. index has the shape of v without the axis."""
        if self.untransposed(v) is not None:
            v, axis = self.untransposed(v), 1 - axis
        shape = [s for d, s in enumerate(v.shape) if d != axis]
        index, _ = self._addressed(index, v.shape[axis])
        return self.emit("pick", [v, self.broadcast(index, shape)], v.dtype, shape, f" axis({axis})")

    def gather(self, v: Value, index: Value, axis: int) -> Value:
        """Gathers several elements along the axis. index has the rank of v, and its shape except along the axis."""
        index, _ = self._addressed(index, v.shape[axis])
        return self.emit("pick", [v, index], v.dtype, index.shape, f" axis({axis})")

    def put(self, index: Value, updates: Value, size: int, axis: int) -> Value:
        """Adds updates to zeros of this size along the axis. index and updates have the same shape. Every index must be
        in range, or its update 0."""
        if updates.dtype == self.dtypes.i8:
            return self.cast(self.put(index, self.cast(updates, self.dtypes.i32), size, axis), updates.dtype)
        index, updates = self._addressed(index, size, updates)
        shape = [size if d == axis else s for d, s in enumerate(index.shape)]
        made = self.emit("put", [index, updates], updates.dtype, shape, f" axis({axis}) size({size})")
        self.puts[made.name] = Put(axis, index, updates)
        return made

    def at(self, index: Value, shape: Sequence[int], axis: int) -> Value:
        """Compares the position along an axis with an index that has the shape without the axis."""
        dims = [d for d in range(len(shape)) if d != axis]
        whole = self.broadcast_dims(index, shape, dims)
        return self.map("eq", [self.iota(shape, axis, index.dtype), whole], self.dtypes.i8)

    def random_keys(self) -> list[Value]:
        """Returns the two 32-bit halves of the key of random numbers."""
        if self.seed is None:
            raise self.refuse("random numbers have no form in a tensor program here")
        if not self.keys:
            self.keys = [self.reshape(self.slice(self.seed, 0, i, i + 1), ()) for i in range(2)]
        return self.keys

    # --- functions of the framework
    def extern(
        self, call: Call, operands: Sequence[Value], dtype, shape, result: int = 0, along: Sequence[Row] = ()
    ) -> Value:
        """Writes one result of a framework's call. along: the dimensions along which it can be chunked."""
        if self.native:
            raise self.refuse("the library has no code for it; executor='python' takes it")
        self.calls.setdefault(call.key, call)
        attributes = f" call({list(self.calls).index(call.key)}) result({result})"
        if along:
            attributes += f" along({'; '.join(', '.join(map(str, row)) for row in along)})"
        return self.emit("extern", operands, dtype, shape, attributes)

    def take(self, table: Value, index: Value) -> Value:
        index, _ = self._addressed(index, table.shape[0])
        return self.emit("take", [table, index], table.dtype, [*index.shape, *table.shape[1:]])

    def scatter_add(self, index: Value, updates: Value, rows: int) -> Value:
        index, updates = self._addressed(index, rows, updates)
        shape = [rows, *updates.shape[index.rank :]]
        made = self.emit("scatter_add", [index, updates], self.dtypes.wide(updates.dtype), shape, f" rows({rows})")
        return self.cast(made, updates.dtype)


_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg}


def rounded(w: Writer, x: Value) -> Value:
    """Rounds to the nearest integer, ties to even."""
    below = w.map("floor", [x], x.dtype)
    half = w.map("floor", [w.scaled(below, 0.5)], x.dtype)
    odd = w.map("ne", [below, w.scaled(half, 2)], w.dtypes.i8)
    over, middle = w.sub(x, below), w.number(0.5, x.dtype)
    tie = w.map("logical_and", [w.map("eq", [over, middle], w.dtypes.i8), odd], w.dtypes.i8)
    up = w.map("logical_or", [w.map("gt", [over, middle], w.dtypes.i8), tie], w.dtypes.i8)
    above = w.map("neg", [w.sub(w.map("neg", [below], x.dtype), w.number(1, x.dtype))], x.dtype)  # -0 of -1
    return w.map("select", [up, above, below], x.dtype)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(str(n) for n in numbers)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Returns the broadcast shape of these shapes: sizes align at the last dimension, and 1 matches any size."""
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    made = []
    for sizes in zip(*padded):
        others = {s for s in sizes if s != 1}
        if len(others) > 1:
            raise ValueError(f"shapes {', '.join(str(list(s)) for s in shapes)} do not go together")
        made.append(others.pop() if others else 1)
    return tuple(made)
