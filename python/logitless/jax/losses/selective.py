"""Log-probabilities of given token ids, for sampling and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.typing import ArrayLike

from ..._losses import HEAD, HeadKeywords, flag, head_of, takes
from ..head import linear_logprobs

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _check_invariance() -> None:
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"batch_invariant: expected the CPU, got {jax.default_backend()}: on a GPU the bits of a token depend on "
            "how many tokens there are with it, where cuBLAS multiplies, and with the Hopper kernels on whether a sum "
            "of one of the 256 around it leaves fp32's range"
        )


@takes(HEAD)
def selective_log_softmax(
    hidden: ArrayLike,
    weight: ArrayLike,
    index: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    batch_invariant: bool = False,
    **head: Unpack[HeadKeywords],
) -> jax.Array:
    """``log_softmax(logits, -1).gather(-1, index)`` of a head, without the logits: TRL's function of this name, applied
    to hidden states.

    Args:
        hidden: [..., D], float32, bfloat16 or float16. weight: [V, D], of the same dtype. bias: [V].
        index: [...] or [..., K], int32 or int64: one or K token ids per token.
        batch_invariant: raises NotImplementedError if a token's result could depend on other tokens of the call: on a
            GPU. See below.
        {head}

    Returns:
        Log-probabilities, float32, shaped as index; 0 for ``ignore_index``. With gradients.

    Results are batch-invariant on a CPU, bit for bit. The log-probability of a token depends only on its hidden state,
    the head, its token id and the options. It does not depend on the number, order or values of other tokens. Nor does
    it depend on whether gradients are computed, on the memory budget, or on the number of threads. It does depend on
    the dtype and the kernel, and so on the machine (``logitless.kernels()``; ``LOGITLESS_CPU`` pins one).

    Cost: one GEMM forward, three backward. Memory: the plan's workspace, within ``memory_budget``.

    Raises: as ``linear_logprobs``; ValueError and TypeError that name the argument.
    """
    found = head_of(head)
    if flag("batch_invariant", batch_invariant):
        _check_invariance()
    try:
        return linear_logprobs(hidden, weight, index, bias, **found._asdict())[0]
    except (TypeError, ValueError) as error:  # the argument by its name here
        if str(error).startswith("targets:"):
            raise type(error)("index:" + str(error)[len("targets:") :]) from None
        raise
