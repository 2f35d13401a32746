"""Large-vocabulary losses for PyTorch, without the logits.

``linear_cross_entropy`` replaces ``torch.nn.functional.linear_cross_entropy`` and ``cut_cross_entropy``'s function by a
change of import. ``LinearCrossEntropy`` is the module. ``linear_logprobs`` returns differentiable log-probabilities,
entropies and log-sum-exps. ``linear_sample`` samples tokens, and ``linear_top_logprobs`` returns the best entries.
``linear_kept_logprobs`` replays the sets of token ids that a sampler kept.
``lazy_head`` makes a Hugging Face model compute its loss without logits, and needs no change to its code; ``check``
measures what that saves. ``autochunk`` chunks any function. ``losses`` has ready-made losses for preferences, policies
and distillation. ``FarFieldHead`` computes a training run's gradients from a block-sparse softmax. ``Sharding``
describes the vocabulary shard of a rank. ``interleave_vocab`` interleaves the vocabulary for load balance.
``configure_exchanges`` sets how ranks of one host exchange data. ``backend`` returns the implementation that serves a
tensor.
"""

from typing import TYPE_CHECKING


from ._backend import Backend, backend
from ._lazy import LazyHeadWarning, LazyLogits, lazy_head, unpatch
from .dtensor import sharded_head
from .ranks import Sharding, configure_exchanges, interleave_vocab
from .far_field import FarFieldHead
from .loss import LinearCrossEntropy, linear_cross_entropy, linear_logprobs

if TYPE_CHECKING:
    from . import losses
    from ._check import Check, check
    from ._autochunk import AutoChunked, Unsupported, autochunk
    from ._compile.run import explain_compiled
    from .kept import linear_kept_logprobs
    from .sampling import linear_sample, linear_top_logprobs

__all__ = [
    "AutoChunked",
    "Backend",
    "Check",
    "FarFieldHead",
    "LazyHeadWarning",
    "LazyLogits",
    "LinearCrossEntropy",
    "Sharding",
    "Unsupported",
    "lazy_head",
    "linear_cross_entropy",
    "autochunk",
    "backend",
    "check",
    "configure_exchanges",
    "interleave_vocab",
    "explain_compiled",
    "linear_kept_logprobs",
    "linear_logprobs",
    "linear_sample",
    "linear_top_logprobs",
    "losses",
    "sharded_head",
    "unpatch",
]


def __getattr__(name: str):
    if name == "explain_compiled":
        from ._compile.run import explain_compiled

        return explain_compiled
    if name in ("AutoChunked", "Unsupported", "autochunk"):  # it imports PyTorch's compiler, which takes seconds
        from . import _autochunk

        return getattr(_autochunk, name)
    if name == "linear_kept_logprobs":
        from .kept import linear_kept_logprobs

        return linear_kept_logprobs
    if name in ("linear_sample", "linear_top_logprobs"):
        from . import sampling

        return getattr(sampling, name)
    if name in ("Check", "check"):
        from . import _check

        return getattr(_check, name)
    if name == "losses":
        import importlib

        return importlib.import_module(".losses", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
