"""Options of the C ABI's calls, as values that both frameworks pass on and compare."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from . import _library as c
from ._c_api import LOSS_TERMS, LOSS_WEIGHTS, LossWeights
from ._c_api import CrossEntropyValues as LossOptions
from ._c_api import HeadValues as HeadOptions

DEFAULT = LossOptions()
WEIGHTS = LossWeights._fields
PER_ENTRY = tuple(name for name, shape in LOSS_WEIGHTS.items() if shape == "[V]")  # others are of tokens or targets
PER_TOKEN = tuple(name for name in WEIGHTS if name not in PER_ENTRY)
REQUEST = ("memory_budget", "expected_ignored")  # of the plan's request
ENUMS = {"reduction": c.REDUCTIONS, "precision": c.PRECISIONS}  # numbers of the C ABI, by option and name

Function = TypeVar("Function", bound=Callable[..., Any])


def plain_number(value: Any) -> Any:
    """Returns a real number of another type as Python's int or float: numpy numbers, arrays of rank 0, Fractions.
    Returns anything else unchanged, booleans included."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf":
        value = value[()]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def weights_of(given: Mapping[str, Any]) -> LossWeights:
    """Returns the weights among values by name."""
    return LossWeights(*map(given.get, WEIGHTS))


def weight_shapes(vocab: int, lead: Iterable[int], per_token: Iterable[int]) -> LossWeights:
    """Returns the shape of each weight. lead: of the tokens. per_token: (K,) with K weighted targets each."""
    shapes = {"[V]": (vocab,), "[...]": tuple(lead), "[..., K]": (*lead, *per_token)}
    return LossWeights(*map(shapes.get, LOSS_WEIGHTS.values()))


def struct_of(options: LossOptions | HeadOptions):
    """Returns the struct of the C ABI, without the fields of the plan's request."""
    struct = c.new(c.CrossEntropyOptions if isinstance(options, LossOptions) else c.HeadOptions)
    for name, value in options._asdict().items():
        if name not in REQUEST:
            setattr(struct, name, ENUMS[name][value] if name in ENUMS else value)
    return struct


def request_of(options: LossOptions | HeadOptions):
    """Returns the plan's request as the struct of the C ABI."""
    struct = c.new(c.PlanRequest)
    for name in REQUEST:
        setattr(struct, name, getattr(options, name))
    return struct


def shape_text(lead: Iterable[int], last: str) -> str:
    """Returns a shape whose last size is a letter, as text: "[8, K]"."""
    return f"[{', '.join(map(str, (*lead, last)))}]"


def share(name: str, value: Any) -> float:
    """Returns a checked number in [0, 1]."""
    found = value if isinstance(value, (int, float)) else plain_number(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(f"{name}: expected a number in [0, 1], got {value!r}")
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {found}")
    return float(found)


def head_options(options: LossOptions) -> HeadOptions:
    """Returns the options that a head has in common with a loss."""
    return HeadOptions(*(getattr(options, name) for name in HeadOptions._fields))


def check_terms(options: LossOptions | HeadOptions) -> None:
    """Raises ValueError for a term of the loss outside its range."""
    for name, term in LOSS_TERMS.items():
        value = getattr(options, name, term.default)
        if not term.least <= value <= term.most:
            expected = f"in [{term.least:g}, {term.most:g}]" if term.most < math.inf else f">= {term.least:g}"
            raise ValueError(f"{name}: expected a number {expected}, got {value}")


def term_docs(indent: int) -> str:
    """Returns the docstring lines of the loss terms. The first line is not indented."""
    first, more = " " * indent, " " * (indent + 4)
    lines = (
        textwrap.fill(f"{name}: {term.text}.", 120, initial_indent=first, subsequent_indent=more)
        for name, term in LOSS_TERMS.items()
    )
    return "\n".join(lines).lstrip()


def takes_terms(function: Function) -> Function:
    """Decorates a function that takes the terms of the loss as ``**terms``, after its ignore_index. Its signature and
    its docstring ({terms}) list them."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
        if parameter.name == "ignore_index":
            parameters += [
                inspect.Parameter(name, parameter.KEYWORD_ONLY, default=term.default, annotation="float")
                for name, term in LOSS_TERMS.items()
            ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    _PARAMETERS[function.__name__] = [parameter.name for parameter in parameters]
    kept = {name: kind for name, kind in function.__annotations__.items() if name != "terms"}
    function.__annotations__ = {**kept, **dict.fromkeys(LOSS_TERMS, "float")}
    if function.__doc__:
        function.__doc__ = function.__doc__.replace("{terms}", term_docs(8))
    return function


def unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Returns the TypeError for an argument that is not in ``known``, with a similar name as a hint."""
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


_OTHER_NAMES = {"target": "targets", "targets": "target"}


def by_own_names(given: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """Renames ``target`` or ``targets`` to the keyword that is known. Raises TypeError if both are given."""
    for name, own in _OTHER_NAMES.items():
        if name in given and name not in known and own in known:
            if own in given:
                raise TypeError(f"'{own}' is given twice, as '{name}' too")
            given = {own if key == name else key: value for key, value in given.items()}
    return given


def either_name(function: Function) -> Function:
    """Returns a function that accepts its ``target`` or ``targets`` under either name."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(*args, **by_own_names(given, known))

    return call  # type: ignore[return-value]


_PARAMETERS: dict[str, list[str]] = {}  # parameters of functions with the terms of the loss, by function name


def all_terms(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every term of the loss by name, with defaults. Raises TypeError for an unknown one, as a signature would.
    """
    for name in given:
        if name not in LOSS_TERMS:
            raise unexpected(function, name, _PARAMETERS.get(function, LOSS_TERMS))
    return {name: given.get(name, term.default) for name, term in LOSS_TERMS.items()}
