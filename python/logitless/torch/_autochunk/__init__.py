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
from typing import ParamSpec, TypeVar, overload

from logitless._autochunk.function import make
from logitless._autochunk.options import Unsupported
from logitless.torch._autochunk.function import AutoChunked

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
    executor: str = "auto",
):
    """``fn`` with its big values computed chunk by chunk, forward and backward; also a decorator.

    fn: a function of tensors (arguments may be nested, other arguments must be hashable), an ``nn.Module``, a method of
    one, or a function that names one; returns tensors. It is traced for each new set of shapes, dtypes, devices and
    other arguments, and must compute the same whenever these are the same.

    memory_budget: bytes, or text such as "512MiB", that values may take beyond inputs and results (outputs, gradients).
    None: chunk wherever that computes nothing twice. chunks: of every loop instead, None or 0 for as many as pay.
    gradients: "forward" computes them with the outputs and multiplies them by the tangent in backward, which needs one
    differentiable output of one element and holds the gradients from forward to backward; "backward" computes the
    outputs now, and computes what the gradients need of them again in backward; "auto" is "forward" where that can be
    and nothing is fp16, whose loss scaling is a tangent.
    A budget that no plan meets is a warning, and the plan of the least memory runs.
    strict: a budget that is not met, or a big value that could not be cut, is a ValueError instead.
    unsupported: "error" raises ``Unsupported`` (a NotImplementedError) naming the operation that cannot be expressed;
    "run" warns with the same text, and runs ``fn`` itself.
    executor: "auto" is "native" on a CPU, unless the library does not take the function or needs more memory over the
    budget, and "python" elsewhere; ``explain()`` says which, and why. "python" runs generated PyTorch; "native" has the
    library run the program, with its head engine, in one tensor of PyTorch's allocator, on the current stream of a GPU
    (docs/gpu.md: what it needs there) or on torch.get_num_threads() threads of the CPU, with the same bits for any
    number of them; inside torch.compile it is one operator (of "auto" a graph break), inside of a CUDA graph its
    kernels. memory_budget then bounds that tensor and the copies of inputs that are not contiguous; on the CPU kernels
    take some MiB more for each thread beyond the first.

    The result has ``explain()`` and ``source()``. A second derivative is an error, and so are torch.func's transforms
    of a native function inside of torch.compile.
    """
    return make(AutoChunked, fn, memory_budget, chunks, gradients, strict, unsupported, executor)
