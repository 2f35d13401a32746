"""Log-probabilities of given token ids, for sampling and evaluation."""

from __future__ import annotations

from .invariance import check
from .options import flag, head_of


def selective_log_softmax(xp, hidden, weight, index, bias, *, batch_invariant, **head):
    """``log_softmax(logits, -1).gather(-1, index)`` of a head, without the logits: TRL's function of this name, applied
    to hidden states.

    Args:
        hidden: [..., D], {floats}. weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits. bias: [V].
        index: [...] or [..., K], int32 or int64: one or K token ids per token.
        batch_invariant: raises NotImplementedError if a token's result could depend on other tokens of the call: for the
            exceptions below.
        {head}
        temperature: also {an_array} [...], a number for each token.

    Returns:
        Log-probabilities, float32{exact}, shaped as index; 0 for ``ignore_index``. With gradients.

    Results are batch-invariant, bit for bit. The log-probability of a token depends only on its hidden state, the head,
    its token id and the options; on a GPU on all K of its ids. It does not depend on the number, order or values of
    other tokens. Nor does it depend on whether gradients are computed, on the memory budget, or on the number of
    threads. It does depend on the dtype and the kernel, and so on the machine (``logitless.kernels()``;
    ``LOGITLESS_CPU`` and ``LOGITLESS_GPU_KERNELS`` pin one).

    torch: Exceptions are PyTorch's own operations, and on a GPU float32, the kernel ``cublas`` and a sharded vocabulary. A
    torch: quantised weight, and a tensor as temperature with a bias or softcap, or in 16 bits on a GPU, take those
    torch: operations.
    jax: Exceptions are JAX's own operations, a sharded vocabulary, and on a GPU float32 and the kernel ``cublas``. An array
    jax: as temperature with a bias or softcap, or in 16 bits on a GPU, takes those operations.

    Cost: one GEMM forward, three backward. Memory: the plan's workspace, within ``memory_budget``.

    Raises: as ``linear_logprobs``; ValueError and TypeError that name the argument.
    """
    found = head_of(head, xp)
    if flag("batch_invariant", batch_invariant):
        check(xp.NAMES, xp.computation(hidden, weight, bias, found))
    try:
        return xp.log_probs(hidden, weight, index, bias, found)
    except (TypeError, ValueError) as error:  # the argument by its name here
        name = xp.NAMES.target + ":"
        if str(error).startswith(name):
            raise type(error)("index:" + str(error)[len(name) :]) from None
        raise
