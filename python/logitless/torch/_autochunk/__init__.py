"""Chunks any function of tensors: its values that would dominate memory exist one chunk at a time.

    @autochunk(memory_budget="64MiB")
    def loss(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        return torch.nn.functional.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()

    loss(hidden, weight, target).backward()
    print(loss.explain())
    print(loss.source())
"""

from __future__ import annotations

from collections.abc import Callable

from logitless._library import parse_bytes
from logitless.torch._autochunk.function import GRADIENTS, AutoChunked
from logitless.torch._autochunk.plan import Limits
from logitless.torch._autochunk.trace import Unsupported

__all__ = ["AutoChunked", "Unsupported", "autochunk"]


def autochunk(
    fn: Callable | None = None,
    *,
    memory_budget: int | str | None = None,
    chunks: int = 0,
    gradients: str = "auto",
    strict: bool = False,
    unsupported: str = "error",
):
    """``fn`` with its big values computed chunk by chunk, forward and backward; also a decorator.

    fn: a function of tensors (arguments may be nested, other arguments must be hashable), an ``nn.Module``, a method of
    one, or a function that names one; returns tensors. It is traced for each new set of shapes, dtypes, devices and
    other arguments, and must compute the same whenever these are the same.

    memory_budget: bytes, or text such as "512MiB", that values may take beyond inputs and results (outputs, gradients).
    None: chunk wherever that computes nothing twice. chunks: of every loop instead, 0 for as many as pay.
    gradients: "forward" computes them with the outputs and multiplies them by the tangent in backward, which needs one
    differentiable output of one element and holds the gradients from forward to backward; "backward" computes the
    outputs now, and computes what the gradients need of them again in backward; "auto" is "forward" where that can be
    and nothing is fp16, whose loss scaling is a tangent.
    strict: a budget that is not met, or a big value that could not be cut, is a ValueError.
    unsupported: "error" raises ``Unsupported`` (a NotImplementedError) naming the operation that cannot be expressed;
    "run" warns with the same text, and runs ``fn`` itself.

    The result has ``explain()`` and ``source()``. A second derivative is an error.
    """
    budget = parse_bytes(memory_budget)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 0:
        raise ValueError(f"chunks: expected a whole number, 0 or more, got {chunks!r}")
    if budget > 0 and chunks > 0:
        raise ValueError(f"chunks: expected 0 beside memory_budget, got {chunks}")
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients: expected one of {', '.join(GRADIENTS)}, got {gradients!r}")
    if unsupported not in ("error", "run"):
        raise ValueError(f"unsupported: expected 'error' or 'run', got {unsupported!r}")
    limits = Limits(budget, chunks, bool(strict))
    if fn is None:
        return lambda function: autochunk(
            function,
            memory_budget=memory_budget,
            chunks=chunks,
            gradients=gradients,
            strict=strict,
            unsupported=unsupported,
        )
    if not callable(fn):
        raise TypeError(f"fn: expected a callable, got {fn!r}")
    return AutoChunked(fn, limits, gradients, unsupported)
