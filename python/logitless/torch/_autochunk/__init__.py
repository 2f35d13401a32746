"""Chunks any function of tensors: values that would dominate memory exist one chunk at a time.

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
from typing import TYPE_CHECKING, overload

from logitless._autochunk.function import P, R, make
from logitless._autochunk.options import Keywords, Unsupported
from logitless.torch._autochunk.function import AutoChunked

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
    """Returns ``fn`` with its large values computed chunk by chunk, forward and backward. Also a decorator.

    fn: a function of tensors, an ``nn.Module``, a method of one, or a function that refers to one. It returns tensors.
        Arguments may be nested, and other arguments must be hashable. It is traced for each new set of shapes, dtypes,
        devices and other arguments, and must compute the same whenever these are the same.
    memory_budget: bytes, or text such as "512MiB", that values may take beyond inputs and results (outputs, gradients).
        None: chunk wherever nothing is recomputed. On a GPU the library takes a quarter of the largest value, or as
        little of it as is not far slower (docs/use/autochunk.md).
    chunks: the number of chunks of every loop, instead of a budget. None or 0: the compiler chooses.
    gradients: when they are computed.
        "forward": with the outputs; backward multiplies them by the upstream gradient. This needs one differentiable
        output of one element, and holds the gradients from forward to backward.
        "backward": in backward, which recomputes the values that it needs.
        "auto": "forward" where possible, unless a value is fp16: loss scaling enters through the upstream gradient.
    strict: raise ValueError if no plan meets the budget, or if a large value cannot be chunked. Otherwise a missed
        budget is a warning, and the plan of the best balance of memory and time runs.
    unsupported: "error" raises ``Unsupported`` (a NotImplementedError) that names the operation without a form in the
        compiler. "run" warns with the same text and runs ``fn`` itself.
    executor: how the program runs; ``explain()`` names the choice of "auto" and its reason.
        "auto": "native", unless the library does not support the function, or lacks what it needs on a GPU
        (docs/use/gpu.md); and unless PyTorch multiplies fp32 tensors of the function in TF32. "python" too where it alone
        meets the budget, or misses it with a better balance of memory and time.
        "python": generated PyTorch.
        "native": the library runs the program with its head engine, in one tensor of PyTorch's allocator. It uses the
        current stream of a GPU (requirements: docs/use/gpu.md), or torch.get_num_threads() threads of the CPU. Its results
        do not depend on the number of threads. Inside torch.compile it is one operator ("auto" is a graph break);
        inside a CUDA graph, its kernels. memory_budget then bounds that tensor and the copies of inputs that are not
        contiguous. On the CPU, kernels take some MiB more for each thread beyond the first.

    The result has ``explain()`` and ``source()``. Derivatives of its gradients raise errors. So do torch.func's transforms of
    a native function inside torch.compile.
    """
    return make(AutoChunked, fn, memory_budget, chunks, gradients, strict, unsupported, executor)
