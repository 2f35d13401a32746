"""Options of the calls of the C ABI, as values that both frameworks hand on and compare."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from . import _library as c
from ._c_api import LOSS_TERMS
from ._c_api import CrossEntropyValues as LossOptions
from ._c_api import HeadValues as HeadOptions

DEFAULT = LossOptions()

Function = TypeVar("Function", bound=Callable[..., Any])


def plain_number(value: Any) -> Any:
    """A real number of another kind (numpy's, an array of one without dimensions, a Fraction) as Python's int or float;
    anything else, flags among it, as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf":
        value = value[()]
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def struct_of(options: LossOptions | HeadOptions):
    """The struct of the C ABI; the budget belongs to the plan's request and is left out."""
    struct = c.new(c.CrossEntropyOptions if isinstance(options, LossOptions) else c.HeadOptions)
    for name, value in options._asdict().items():
        if name != "memory_budget":
            setattr(struct, name, c.REDUCTIONS[value] if name == "reduction" else value)
    return struct


def head_options(options: LossOptions) -> HeadOptions:
    """Those that a head has as well."""
    return HeadOptions(*(getattr(options, name) for name in HeadOptions._fields))


def term_docs(indent: int) -> str:
    """A line or more of a docstring for each term of the loss, from behind the first one's indentation on."""
    first, more = " " * indent, " " * (indent + 4)
    lines = (
        textwrap.fill(f"{name}: {term.text}.", 120, initial_indent=first, subsequent_indent=more)
        for name, term in LOSS_TERMS.items()
    )
    return "\n".join(lines).lstrip()


def takes_terms(function: Function) -> Function:
    """Lists the terms of the loss in the signature and the docstring ({terms}) of a function that takes them as
    ``**terms``, after its ignore_index."""
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
    """Returns the error of an argument that is none of ``known``, with the name that may be meant."""
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument '{name}'{hint}")


_OTHER_NAMES = {"target": "targets", "targets": "target"}


def by_own_names(given: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """Keywords where ``target`` and ``targets`` stand for the one that is known. Raises TypeError where both are given."""
    for name, own in _OTHER_NAMES.items():
        if name in given and name not in known and own in known:
            if own in given:
                raise TypeError(f"'{own}' is given twice, as '{name}' too")
            given = {own if key == name else key: value for key, value in given.items()}
    return given


def either_name(function: Function) -> Function:
    """A function of ``target`` or ``targets`` that takes it by the other name as well."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(*args, **by_own_names(given, known))

    return call  # type: ignore[return-value]


_PARAMETERS: dict[str, list[str]] = {}  # of functions with the terms of the loss, by their names


def all_terms(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every term of the loss by its name, those not given by their defaults. Raises TypeError as a signature would."""
    for name in given:
        if name not in LOSS_TERMS:
            raise unexpected(function, name, _PARAMETERS.get(function, LOSS_TERMS))
    return {name: given.get(name, term.default) for name, term in LOSS_TERMS.items()}
