"""One call with three signatures: ours, ``torch.nn.functional.linear_cross_entropy``'s and ``cut_cross_entropy``'s."""

from __future__ import annotations

import enum
import math
import textwrap
from typing import Any, Mapping, NamedTuple

import torch
from torch import Tensor

from .._library import parse_bytes
from .._options import DEFAULT, LOSS_TERMS, WEIGHTS, LossOptions, LossWeights, plain_number, share, unexpected
from ._precision import precision_of
from .ranks import Sharding


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy`` by our names, as they were given."""

    hidden: Any
    weight: Any
    target: Any
    bias: Any = None
    reduction: Any = "mean"
    ignore_index: Any = None
    terms: Mapping[str, Any] = {name: term.default for name, term in LOSS_TERMS.items()}  # of the loss
    weights: LossWeights = LossWeights()
    softcap: Any = None
    logit_scale: Any = DEFAULT.logit_scale
    temperature: Any = None
    normalizer: Any = None
    shift: Any = False
    accuracy: Any = False
    return_lse: Any = False
    return_argmax: Any = False
    return_target_logits: Any = False
    precision: Any = None
    memory_budget: Any = None
    expected_ignored: Any = 0.0
    sharding: Any = None
    chunk: Any = None  # PyTorch's chunking options: a number of tokens or "aspect_ratio:N"


def named(**given: Any) -> Arguments:
    """Returns the arguments with these values, by the names of the signature."""
    terms = {name: given.pop(name, term.default) for name, term in LOSS_TERMS.items()}
    weights = LossWeights(*[given.pop(name, None) for name in WEIGHTS])
    return Arguments(terms=terms, weights=weights, **given)


def _defaults() -> dict[str, Any]:
    found = {}
    for name, value in Arguments._field_defaults.items():
        found.update(value if name == "terms" else value._asdict() if name == "weights" else {name: value})
    del found["chunk"]
    return found


DEFAULTS = _defaults()  # by the names of the signature
# The order of cut_cross_entropy's positional arguments, which begins like ours. PyTorch's accepts the first three.
POSITIONS = (
    "hidden", "weight", "target", "bias", "ignore_index", "softcap", "reduction", "shift", "return_lse", "filter_eps",
    "accum_e_fp32", "accum_c_fp32", "filter_e_grad", "filter_c_grad", "impl", "vocab_parallel_options",
)
ALIASES = {
    "input": "hidden",
    "e": "hidden",
    "linear_weight": "weight",
    "c": "weight",
    "targets": "target",
    "linear_bias": "bias",
}
# The values of cut_cross_entropy's option. All compute the same loss; their gradients differ in filtering and rounding.
_IMPLS = (
    "cce", "cce_exact", "cce_kahan", "cce_kahan_full", "cce_kahan_full_c", "cce_kahan_full_e",
    "cce_kahan_full_c_full_e", "torch_compile",
)
NAME = "linear_cross_entropy"


def signature_text(indent: int) -> str:
    """Returns the call with its defaults, for a docstring."""
    arguments = [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v!r}" for k, v in DEFAULTS.items()]
    text = f"{NAME}({', '.join([*POSITIONS[:3], arguments[0], '*', *arguments[1:]])})"
    return textwrap.fill(text, 120 - indent, subsequent_indent=" " * indent)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _is_impl(value) -> bool:
    name = value.name.lower() if isinstance(value, enum.Enum) else value
    return name is None or name in _IMPLS


_IS_FLAG = (lambda value: value is None or isinstance(value, bool), "True or False")
# Arguments of cut_cross_entropy that allow its gradients to be filtered or summed less accurately: a test of the value,
# and its description. Our gradients are complete and summed in fp32, which every value allows.
_ALLOWANCES = {
    "filter_eps": (lambda value: value is None or value == "auto" or _is_number(value), "None, 'auto' or a number"),
    "accum_e_fp32": _IS_FLAG,
    "accum_c_fp32": _IS_FLAG,
    "filter_e_grad": _IS_FLAG,
    "filter_c_grad": _IS_FLAG,
    "impl": (_is_impl, f"one of {', '.join(_IMPLS)}"),
}


def bind(args: tuple, kwargs: dict) -> Arguments:
    """Binds all arguments to our names. Raises TypeError as a signature would."""
    if len(args) > len(POSITIONS):
        raise TypeError(f"{NAME}: expected at most {len(POSITIONS)} positional arguments, got {len(args)}")
    bound = dict(zip(POSITIONS, args))
    torch_options = None
    for key, value in kwargs.items():
        name = ALIASES.get(key, key)
        if key == "weight" and ("weight" in bound or "linear_weight" in kwargs or "c" in kwargs):
            name = "class_weight"  # PyTorch's name for it, beside linear_weight
        if key == "options":
            torch_options = value
            continue
        if name not in DEFAULTS and name not in POSITIONS:
            raise unexpected(NAME, key, (*DEFAULTS, *POSITIONS, *ALIASES))
        if name in bound:
            raise TypeError(f"{NAME}: '{name}' is given twice")
        bound[name] = value
    missing = [name for name in POSITIONS[:3] if name not in bound]
    if missing:
        raise TypeError(f"{NAME}: missing {', '.join(missing)}")
    for name, (allowed, what) in _ALLOWANCES.items():
        if name in bound and not allowed(value := bound.pop(name)):
            raise NotImplementedError(f"{NAME}: {name}={value!r} is not supported; expected {what}")
    parallel = bound.pop("vocab_parallel_options", None)
    if parallel is not None:
        if bound.get("sharding") is not None:
            raise TypeError(f"{NAME}: 'sharding' and 'vocab_parallel_options' are one argument; give one of them")
        bound["sharding"] = _vocab_parallel(parallel)
    return named(**bound, chunk=_chunk(torch_options, bound["hidden"]))


def _vocab_parallel(options) -> Sharding:
    """Converts cut_cross_entropy's VocabParallelOptions(start, stop, group, reduce_e_grad). Our gradients are always
    reduced."""
    if not hasattr(options, "start") or not hasattr(options, "group"):
        raise TypeError(
            f"vocab_parallel_options: expected cut_cross_entropy's VocabParallelOptions, got {type(options).__name__}"
        )
    if not getattr(options, "reduce_e_grad", True):
        raise NotImplementedError(
            f"{NAME}: vocab_parallel_options={options!r} is not supported; expected reduce_e_grad=True: d_hidden is complete"
        )
    return Sharding(options.group, vocab_begin=options.start)


def _chunk(options, hidden) -> int | str | None:
    """Returns the chunk size in PyTorch's options: a number of tokens, an "aspect_ratio:N", or None. Raises
    NotImplementedError for an accumulation dtype more precise than ours."""
    if options is None:
        return None
    if not hasattr(options, "batch_chunk_size"):
        raise TypeError(f"options: expected torch.nn.LinearCrossEntropyOptions or None, got {type(options).__name__}")
    if options.acc_dtype == torch.float64 and getattr(hidden, "dtype", None) != torch.float64:
        raise NotImplementedError(f"{NAME}: options.acc_dtype={options.acc_dtype!r} is not supported; sums are float32")
    if options.batch_chunk_size is not None:
        return options.batch_chunk_size
    return None if options.chunking_method in ("auto", None) else options.chunking_method


def number(name: str, value, low: float = -math.inf, what: str = "a number") -> float:
    if not isinstance(value, (int, float, Tensor)):
        value = plain_number(value)
    if isinstance(value, Tensor) or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {what}, got {value!r}")
    if not (low <= value < math.inf and value > -math.inf):
        raise ValueError(f"{name}: expected {what}, got {value}")
    return float(value)


def _range_text(least: float, most: float) -> str:
    return "a number" + (f" from {least:g}" if least > -math.inf else "") + (f" to {most:g}" if most < math.inf else "")


# A module constant: torch.compile treats a number in a global as a variable, which cannot be formatted into a text.
_RANGES = {name: _range_text(term.least, term.most) for name, term in LOSS_TERMS.items()}


def term(name: str, value) -> float:
    """Returns a checked term of the loss."""
    found = number(name, value, LOSS_TERMS[name].least, _RANGES[name])
    if found > LOSS_TERMS[name].most:
        raise ValueError(f"{name}: expected {_RANGES[name]}, got {found}")
    return found


def loss_options(a: Arguments) -> LossOptions:
    """Returns the checked scalar options. A normalizer may be a tensor, which the caller handles."""
    if a.reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {a.reduction!r}")
    ignore_index = DEFAULT.ignore_index if a.ignore_index is None else a.ignore_index
    if not isinstance(ignore_index, int):
        ignore_index = plain_number(ignore_index)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {ignore_index!r}")
    terms = {name: term(name, value) for name, value in a.terms.items()}
    softcap = 0.0 if a.softcap is None else number("softcap", a.softcap, what="a number above 0, or None")
    if a.softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap: expected a number above 0, or None, got {softcap}")
    scale = number("logit_scale", a.logit_scale, what="a finite number that is not 0")
    if scale == 0.0:
        raise ValueError("logit_scale: expected a finite number that is not 0, got 0.0")
    normalizer = 0.0
    if a.normalizer is not None and not isinstance(a.normalizer, Tensor):
        normalizer = number("normalizer", a.normalizer, what="a number above 0")
        if normalizer <= 0.0:
            raise ValueError(f"normalizer: expected a number above 0, got {normalizer}")
    if a.normalizer is not None and a.reduction != "mean":
        raise ValueError(f"normalizer: goes with reduction 'mean', got {a.reduction!r}")
    return LossOptions(
        reduction=a.reduction,
        precision=precision_of(a.precision, a.hidden, a.weight),
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=scale,
        normalizer=normalizer,
        memory_budget=parse_bytes(a.memory_budget),
        expected_ignored=share("expected_ignored", a.expected_ignored),
        **terms,
    )
