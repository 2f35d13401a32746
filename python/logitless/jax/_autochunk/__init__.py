"""Chunks any function of arrays: its values that would dominate memory exist one chunk at a time.

    @autochunk(memory_budget="64MiB")
    def loss(hidden, weight, targets):
        logits = hidden @ weight.T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return nll.mean() + 1e-4 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, weight, targets)
    print(loss.explain())
    print(loss.source())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

from logitless._autochunk.function import make
from logitless._autochunk.options import Unsupported
from logitless.jax._autochunk.function import AutoChunked

__all__ = ["AutoChunked", "Unsupported", "autochunk"]


P = ParamSpec("P")
R = TypeVar("R")


@overload
def autochunk(
    fn: Callable[P, R],
    *,
    memory_budget: int | str | None = ...,
    chunks: int | None = ...,
    gradients: str = ...,
    strict: bool = ...,
    unsupported: str = ...,
    executor: str = ...,
) -> AutoChunked[P, R]: ...


@overload
def autochunk(
    fn: None = None,
    *,
    memory_budget: int | str | None = ...,
    chunks: int | None = ...,
    gradients: str = ...,
    strict: bool = ...,
    unsupported: str = ...,
    executor: str = ...,
) -> Callable[[Callable[P, R]], AutoChunked[P, R]]: ...


def autochunk(
    fn: Callable | None = None,
    *,
    memory_budget: int | str | None = None,
    chunks: int | None = None,
    gradients: str = "auto",
    strict: bool = False,
    unsupported: str = "error",
    executor: str = "python",
):
    """``fn`` with its big values computed chunk by chunk, outputs and gradients; also a decorator.

    fn: a function of arrays in pytrees, positional and by keyword; other arguments, Python numbers among them, must be
    hashable and are constants. Returns arrays, likewise. It is traced for each new set of shapes, dtypes and constants.
    Arrays that it closes over are constants too; a traced one is an error.

    memory_budget: bytes, or text such as "512MiB", that XLA's temporaries of the outputs, or of outputs and gradients,
    may take beyond inputs and results. None: chunk wherever that computes nothing twice. chunks: of every loop instead,
    None or 0 for as many as pay.
    gradients: "forward" computes them with the outputs and multiplies them by the tangent in backward, which needs one
    differentiable output of one element and holds the gradients from forward to backward; "backward" computes the
    outputs now, and computes what the gradients need of them again in backward; "auto" is "forward" where that can be
    and nothing is fp16, whose loss scaling is a tangent. What is not differentiated by is not computed.
    A budget that no plan meets is a warning, and the plan of the least memory runs.
    strict: a budget that is not met, or a big value that could not be cut, is a ValueError instead.
    unsupported: "error" raises ``Unsupported`` (a NotImplementedError) naming the primitive that cannot be expressed;
    "run" warns with the same text, and runs ``fn`` itself.
    executor: "python" runs generated JAX; "native" has the library run the program in a custom call, with its head
    engine, in one of XLA's temporaries, on a GPU (docs/gpu.md: what it needs there) or the CPU, with the same bits for
    any number of threads. memory_budget then bounds that temporary; on the CPU kernels take some MiB more for each
    thread beyond the first. Products of fp32 are computed in fp32, whatever precision says. vmap runs one example after
    another.

    The result has ``explain()`` and ``source()``: given arguments, of a call with its gradients by all floating ones.
    It works under jit, grad, scan, checkpoint and vmap. A second derivative is an error, as is forward mode.
    """
    return make(AutoChunked, fn, memory_budget, chunks, gradients, strict, unsupported, executor)
