"""Options of the ready-made losses: their checks, and the decorator that adds them to a signature and a docstring."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

from .._options import DEFAULT, by_own_names, plain_number, share, unexpected

Function = TypeVar("Function", bound=Callable[..., Any])


class LogitKeywords(TypedDict, total=False):
    """Keywords of every ready-made loss. Logits are softcap(logit_scale * (hidden @ weight.T + bias)) / temperature."""

    ignore_index: int | None  # None: the default
    softcap: float | None
    logit_scale: float
    temperature: Any  # a number; of policies and selective_log_softmax also an array [...]
    memory_budget: int | str | None


class HeadKeywords(LogitKeywords, total=False):
    """Keywords of the losses that call the head."""

    expected_ignored: float


LOGITS: dict[str, Any] = dict(
    ignore_index=DEFAULT.ignore_index, softcap=None, logit_scale=1.0, temperature=1.0, memory_budget=None
)
HEAD: dict[str, Any] = {**LOGITS, "expected_ignored": DEFAULT.expected_ignored}

LOGIT_DOCS = """ignore_index: tokens with this target are ignored, {ignored}. None is -100.
        softcap, logit_scale, temperature: logits are ``softcap(logit_scale * (hidden @ weight.T + bias)) /
            temperature``. softcap: a number c for ``c * tanh(logits / c)``, or None.
        memory_budget: bytes, or text such as "512MiB", that a call of the head may take beyond inputs and gradients."""
HEAD_DOCS = (
    LOGIT_DOCS.format(ignored="at the cost that they have in ``linear_cross_entropy``")
    + """
        expected_ignored: the share of the tokens that is expected to be ignored, in [0, 1]: a hint for GPUs, as in
            ``linear_cross_entropy``. Results differ by the order of sums alone. It must be 0 with a sharded
            vocabulary."""
)

# Without a budget, a divergence takes the plan of least memory among those that recompute nothing. Its predicted time
# may exceed the fastest plan's by this fraction: GEMMs over half as many tokens lose little throughput, and the logits
# are most of the memory.
SLACK = 0.2


class Head(NamedTuple):
    """The head's keywords in the library's form: a number as temperature is folded into scale and softcap."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    memory_budget: int | str | None
    temperature: Any = None  # an array [...]
    expected_ignored: float = DEFAULT.expected_ignored


class Framework(NamedTuple):
    """Names of a framework, as docstrings and messages use them."""

    module: str  # the last part of logitless.torch or logitless.jax
    name: str
    target: str  # the argument with the token ids
    array: str
    an_array: str
    floats: str  # dtypes of hidden
    exact: str  # a remark on the dtype of results


def documentation(text: str, framework: Framework, **texts: str) -> str:
    """Fills a docstring that both frameworks share. A line that begins with the name of a module is kept for that
    framework alone. {name} stands for a field of the framework or one of the texts."""
    for name, value in texts.items():
        text = text.replace(f"{{{name}}}", value)
    for name, value in framework._asdict().items():
        text = text.replace(f"{{{name}}}", value)
    lines = []
    for line in text.split("\n"):
        first = re.match(r"( *)(torch|jax): ", line)
        if first is None:
            lines.append(line)
        elif first[2] == framework.module:
            lines.append(first[1] + line[first.end() :])
    return "\n".join(lines)


def takes(
    defaults: Mapping[str, Any], shared: Callable[..., Any] | None, framework: Framework, texts: Mapping[str, str] = {}
) -> Callable[[Function], Function]:
    """Decorates a function that may end in ``**keywords``. Its signature lists the keywords with these defaults, and it
    receives defaults for those that the caller leaves out. An unknown keyword raises TypeError. The docstring of
    ``shared``, if given, becomes its own."""

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = {p.name for p in shown}
        known = {**dict.fromkeys(named), **defaults}
        shown += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
            for name, value in defaults.items()
            if name not in named
        ]

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            given = by_own_names(given, known)
            for name in given:
                if name not in known:
                    raise unexpected(function.__name__, name, known)
            return function(*args, **{**defaults, **given})

        call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        if shared and shared.__doc__:
            call.__doc__ = documentation(shared.__doc__, framework, **texts, head=HEAD_DOCS)
        return call  # type: ignore[return-value]

    return decorated


def ready(
    xp: Any, module: Any, defaults: Mapping[str, Any], result: type | None = None, texts: Mapping[str, str] = {},
    **given_too: Any,
) -> Callable[[Function], Function]:
    """Decorates a signature, a function without a body: it returns what ``module``'s function of the same name does for
    the same arguments, as ``result`` if given. Keywords, defaults and docstring: as ``takes``. given_too: arguments of
    that function which the caller does not give."""

    def decorated(function: Function) -> Function:
        shared = getattr(module, function.__name__)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in parameters]
        own = {p.name: p.default for p in parameters if p.default is not p.empty}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            function(*args, **given)  # raises TypeError for arguments that do not fit
            named = {**given_too, **own, **dict(zip(names, args)), **given}
            if xp.NAMES.target in named:
                named["target"] = named.pop(xp.NAMES.target)
            found = shared(xp, **named)
            return found if result is None else result(*found)

        return xp.takes(defaults, shared, texts)(call)

    return decorated


def number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Returns a finite number as a Python number. It is at least ``least``, at most ``most``, above ``above`` and below
    ``below``."""
    bounds = [
        text
        for text, wanted in (
            (f"from {least:g}", least > -math.inf), (f"above {above:g}", above > -math.inf),
            (f"to {most:g}", most < math.inf), (f"below {below:g}", below < math.inf),
        )
        if wanted
    ]
    what = " ".join(["a number", *bounds])
    if not isinstance(value, (int, float)):
        value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {what}, got {value!r}")
    if not (-math.inf < value < math.inf and least <= value <= most and above < value < below):
        raise ValueError(f"{name}: expected {what}, got {value!r}")
    return float(value)


def bad_id(name: str, vocab: int, ignore_index: int | None, got: int, at: int) -> str:
    """Returns the message for a token id out of range. at: its place in the flat array."""
    beside = "" if ignore_index is None else f", or ignore_index {ignore_index}"
    return f"{name}: expected token ids in [0, {vocab}){beside}, got {got} at position {at}"


def bad_offsets(count: int, first: int, last: int) -> str:
    """Returns the message for offsets of sets among ``count`` entries."""
    return (
        f"kept_offsets: expected numbers that rise from 0 to at most {count}, the length of kept_ids, got {first} to {last}"
    )


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns a checked integer of at least ``least``."""
    if not isinstance(value, int):
        value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number from {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected a whole number from {least}, got {value}")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def head_of(given: Mapping[str, Any], xp: Any = None) -> Head:
    """Extracts the head's keywords. With temperature t, softcap c of u, divided by t, is softcap c / t of u / t. xp: of a
    loss that takes a temperature of each token as well."""
    ignore_index = DEFAULT.ignore_index if given["ignore_index"] is None else given["ignore_index"]
    if not isinstance(ignore_index, int):
        ignore_index = plain_number(ignore_index)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}")
    each = None if xp is None or xp.is_number(given["temperature"]) else given["temperature"]
    temperature = number("temperature", given["temperature"], above=0.0) if each is None else 1.0
    scale = number("logit_scale", given["logit_scale"])
    softcap = None if given["softcap"] is None else number("softcap", given["softcap"], above=0.0)
    if scale == 0.0:
        raise ValueError("logit_scale: expected a finite number that is not 0, got 0.0")
    return Head(
        ignore_index, None if softcap is None else softcap / temperature, scale / temperature, given["memory_budget"],
        each, share("expected_ignored", given.get("expected_ignored", DEFAULT.expected_ignored)),
    )
