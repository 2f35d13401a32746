"""Losses of a large vocabulary for PyTorch, without the logits.

``linear_cross_entropy`` replaces ``torch.nn.functional.linear_cross_entropy`` and ``cut_cross_entropy``'s call by a
change of import; ``LinearCrossEntropy`` is the module; ``linear_logprobs`` gives differentiable log-probabilities,
entropies and log-sum-exps; ``lazy_head`` makes a Hugging Face model compute its loss so, without a change to its code;
``autochunk`` does it for any function.
"""

from .lazy import LazyHeadWarning, LazyLogits, lazy_head, unpatch
from .loss import LinearCrossEntropy, linear_cross_entropy, linear_logprobs

__all__ = [
    "LazyHeadWarning",
    "LazyLogits",
    "LinearCrossEntropy",
    "lazy_head",
    "linear_cross_entropy",
    "linear_logprobs",
    "unpatch",
]
