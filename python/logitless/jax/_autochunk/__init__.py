"""Chunks any function of arrays: values that would dominate memory exist one chunk at a time.

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
from typing import TYPE_CHECKING, overload

from logitless._autochunk.function import P, R, make
from logitless._autochunk.options import Keywords, Unsupported
from logitless.jax._autochunk.function import AutoChunked

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AutoChunked", "Unsupported", "autochunk"]


@overload
def autochunk(fn: Callable[P, R], **options: Unpack[Keywords]) -> AutoChunked[P, R]: ...


@overload
def autochunk(fn: None = None, **options: Unpack[Keywords]) -> Callable[[Callable[P, R]], AutoChunked[P, R]]: ...


def autochunk(
    fn: Callable | None = None,
    *,
    memory_budget: int | str | None = None,
    chunks: int | None = None,
    gradients: str = "auto",
    strict: bool = False,
    unsupported: str = "error",
    executor: str = "auto",
):
    """Returns ``fn`` with its large values computed chunk by chunk, for outputs and gradients. Also a decorator.

    fn: a function of arrays in pytrees, positional and by keyword. Other arguments, Python numbers included, must be
        hashable and are constants. It returns arrays in pytrees. It is traced for each new set of shapes, dtypes and
        constants. Arrays that it closes over are constants too; a traced one is an error.
    memory_budget: bytes, or text such as "512MiB", that XLA's temporaries may take beyond inputs and results. It holds
        for the outputs, or for outputs and gradients. None: chunk wherever nothing is recomputed. On a GPU
        the library takes a quarter of the largest value, or as little of it as is not far slower (docs/use/autochunk.md).
    chunks: the number of chunks of every loop, instead of a budget. None or 0: the compiler chooses.
    gradients: when they are computed; inputs that are not differentiated cost nothing.
        "forward": with the outputs; backward multiplies them by the upstream gradient. This needs one differentiable
        output of one element, and holds the gradients from forward to backward.
        "backward": in backward, which recomputes the values that it needs.
        "auto": "forward" where possible, unless a value is fp16: loss scaling enters through the upstream gradient.
    strict: raise ValueError if no plan meets the budget, or if a large value cannot be chunked. Otherwise a missed
        budget is a warning, and the plan of the best balance of memory and time runs.
    unsupported: "error" raises ``Unsupported`` (a NotImplementedError) that names the primitive without a form in the
        compiler. "run" warns with the same text and runs ``fn`` itself.
    executor: how the program runs; ``explain()`` names the choice of "auto" and its reason.
        "auto": "native" on one GPU or in a shard_map, unless the library does not support the function or multiplies fp32
        arrays; "python" elsewhere. "python" too where it alone meets the budget, or misses it with a better balance of
        memory and time.
        "python": generated JAX.
        "native": the library runs the program as a custom call with the head engine, in one of XLA's temporaries. It
        supports GPUs (requirements: docs/use/gpu.md) and the CPU, and its results do not depend on the number of threads.
        memory_budget then bounds that temporary; on the CPU, kernels take some MiB more for each thread beyond the
        first. fp32 matrix products run in fp32, whatever the precision setting. vmap runs one example after another.

    The result has ``explain()`` and ``source()``. With arguments, they describe a call with gradients by all floating
    inputs. It works under jit, grad, scan, checkpoint and vmap. Second derivatives and forward mode raise errors.
    """
    return make(AutoChunked, fn, memory_budget, chunks, gradients, strict, unsupported, executor)
