"""The options that autochunk refuses, in any framework."""

import dataclasses

import pytest


def check_options(autochunk, function, array, expected):
    """Checks every refusal. function can be chunked; array is any array; expected is the framework's phrase for one, as
    in "an array"."""
    with pytest.raises(ValueError, match="chunks: expected a whole number, 0 or more, got -1"):
        autochunk(function, chunks=-1)
    with pytest.raises(ValueError, match="expected 0 beside memory_budget, got 4"):
        autochunk(function, chunks=4, memory_budget=100)
    with pytest.raises(ValueError, match="gradients: expected one of auto, forward, backward, got 'late'"):
        autochunk(function, gradients="late")
    with pytest.raises(ValueError, match="unsupported: expected 'error' or 'run', got 'ignore'"):
        autochunk(function, unsupported="ignore")
    for strict in ("yes", 1, None):
        with pytest.raises(ValueError, match="strict: expected True or False, got"):
            autochunk(function, strict=strict)
    with pytest.raises(TypeError, match="fn: expected a callable, got 3"):
        autochunk(3)
    with pytest.raises(RuntimeError, match="explain: the function has not been called"):
        autochunk(function).explain()
    with pytest.raises(TypeError, match="hashable"):
        autochunk(lambda x, y: x.sum())(array, {1, 2})
    with pytest.raises(ValueError, match=f"expected {expected} among the arguments"):
        autochunk(lambda x: x)(1)
    with pytest.raises(TypeError, match=r"unhashable type: 'Pair': .*register_dataclass\(Pair\) makes its fields arguments"):
        autochunk(lambda x, y: x.sum())(array, Pair(1, 2))
    with pytest.raises(ValueError, match=r"among the arguments, got none: .*register_dataclass\(Pair\)"):
        autochunk(lambda y: y.first.sum())(Pair(array, 2))


@dataclasses.dataclass
class Pair:
    first: object
    second: object
