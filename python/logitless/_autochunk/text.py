"""Building blocks of generated Python: terms, names, operators."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from logitless._autochunk.parse import Node, Type

UNARY = {"abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf"}
UNARY |= {"sigmoid", "sin", "cos", "atan", "erfc", "lgamma", "digamma", "trigamma", "floor", "sign"}
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "logical_and": "&", "logical_or": "|"}
MAPS = {*UNARY, *INFIX, *COMPARE, "neg", "max", "min", "logical_not", "select", "random", "uniform"}


@dataclass(frozen=True)
class Term:
    """A value in the source. The array has size 1 along broadcast dimensions, and lacks leading ones."""

    text: str
    type: Type
    present: tuple[bool, ...]  # whether the array has each dimension, rather than broadcasting it
    number: bool = False  # a Python number
    owned: bool = False  # the array owns its memory, which may be overwritten

    @property
    def rank(self) -> int:
        """Returns the array's rank, counted from the first dimension that is present."""
        return len(self.present) - self.present.index(True) if any(self.present) else 0


def broadcast(x: Term, dims: Sequence[int], type_: Type) -> Term:
    """Returns x with its dimension i as dimension dims[i] of the type."""
    rank = len(type_.shape)
    present = [False] * rank
    for i, d in enumerate(dims):
        present[d] = x.present[i]
    text = x.text
    if not x.number and any(present):
        # The array's dimensions, from the first that is present, are dimensions of the result, in order.
        lead = len(x.present) - x.rank
        kept = dims[lead:]
        index = [":" if d in kept else "None" for d in range(kept[0], rank)] if kept else []
        if "None" in index:
            while index and index[-1] == ":":
                index.pop()
            text = f"{text}[{', '.join(index)}]"
        for d in kept:  # a present dimension of size 1 stays present
            present[d] = True if x.present[dims.index(d)] else present[d]
    return Term(text, type_, tuple(present), x.number)


def sizes(shape: Sequence[str]) -> str:
    return ", ".join(shape)


def tuple_of(shape: Sequence[str]) -> str:
    return f"({shape[0]},)" if len(shape) == 1 else f"({sizes(shape)})"


def literal(text: str) -> bool:
    return re.fullmatch(r'-?[\d.]+(e[+-]?\d+)?|-?float\("\w+"\)', text) is not None


def _quotient(a: float, b: float) -> float:
    """Divides as floats do, by 0 too: the mean of no rows is NaN."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def number_of(op: str, texts: list[str]) -> str | None:
    """Folds arithmetic of Python numbers into one number or expression. Returns None if it takes more than an operator.
    """
    if op == "neg":
        return f"-{texts[0]}" if not texts[0].startswith("-") else texts[0][1:]
    if op in ("add", "sub", "mul", "div"):
        if all(literal(t) and "float" not in t for t in texts):
            a, b = (float(t) if "." in t or "e" in t else int(t) for t in texts)
            made = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: _quotient(a, b)}[op]()
            return repr(made) if math.isfinite(made) else f'float("{made}")'
        return f"({texts[0]} {INFIX[op]} {texts[1]})"
    return None


def operation(op: str, texts: list[str]) -> str | None:
    """Returns the expression of Python's operator for an operation, or None if there is none."""
    if op in ("neg", "logical_not"):
        return f"{'-' if op == 'neg' else '~'}{texts[0]}"
    symbol = INFIX.get(op) or COMPARE.get(op)
    return None if symbol is None else f"{texts[0]} {symbol} {texts[1]}"


class Names:
    """A set of Python names; each is handed out once."""

    def __init__(self, reserved: Iterable[str]):
        self.taken = {*reserved, *keyword.kwlist}

    def fresh(self, wanted: str) -> str:
        name = re.sub(r"\W", "_", wanted)
        name = f"v{name}" if name[:1].isdigit() else name
        unique, k = name, 1
        while unique in self.taken:
            unique, k = f"{name}_{k}", k + 1
        self.taken.add(unique)
        return unique


def rename(node: Node, symbol: str, size: str) -> None:
    """Replaces the symbol of a chunk's size by its Python name."""

    def renamed(text: str) -> str:
        return re.sub(rf"\b{symbol}\b", size, text)

    def of(type_: Type | None) -> Type | None:
        return None if type_ is None else Type(type_.dtype, tuple(renamed(s) for s in type_.shape))

    node.type, node.types = of(node.type), [of(t) for t in node.types]
    for key in ("begin", "end", "low", "high", "rows", "size"):
        if key in node.attributes:
            node.attributes[key] = renamed(node.attributes[key])


def load(source: str, name: str, globals_: dict | None = None) -> Callable:
    """Executes a generated module and returns its function."""
    space = dict(globals_ or {})
    exec(compile(source, f"<autochunk {name}>", "exec"), space)
    return space[name]
