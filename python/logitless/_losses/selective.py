"""Log-probabilities of given token ids, for sampling and evaluation."""

from __future__ import annotations

from .options import flag, head_of


def selective_log_softmax(xp, hidden, weight, index, bias, *, batch_invariant, **head):
    """``log_softmax(logits, -1).gather(-1, index)`` of a head, without the logits: TRL's function of this name, applied
    to hidden states.

    Args:
        hidden: [..., D], {floats}. weight: [V, D], of the same dtype. bias: [V].
        index: [...] or [..., K], int32 or int64: one or K token ids per token.
        torch: batch_invariant: raises NotImplementedError if a token's result could depend on other tokens of the call:
        torch:     on a GPU, and for float64. See below.
        jax: batch_invariant: raises NotImplementedError if a token's result could depend on other tokens of the call:
        jax:     on a GPU. See below.
        {head}
            temperature may be {an_array} [...], a number for each token.

    Returns:
        Log-probabilities, float32{exact}, shaped as index; 0 for ``ignore_index``. With gradients.

    Results are batch-invariant on a CPU, bit for bit. The log-probability of a token depends only on its hidden state,
    the head, its token id and the options. It does not depend on the number, order or values of other tokens. Nor does
    it depend on whether gradients are computed, on the memory budget, or on the number of threads. It does depend on
    the dtype and the kernel, and so on the machine (``logitless.kernels()``; ``LOGITLESS_CPU`` pins one).

    Cost: one GEMM forward, three backward. Memory: the plan's workspace, within ``memory_budget``.

    Raises: as ``linear_logprobs``; ValueError and TypeError that name the argument.
    """
    found = head_of(head, xp)
    if flag("batch_invariant", batch_invariant):
        xp.check_batch_invariance(hidden)
    try:
        return xp.log_probs(hidden, weight, index, bias, found)
    except (TypeError, ValueError) as error:  # the argument by its name here
        name = xp.NAMES.target + ":"
        if str(error).startswith(name):
            raise type(error)("index:" + str(error)[len(name) :]) from None
        raise
