"""Large-vocabulary losses for PyTorch, without the logits.

``linear_cross_entropy`` replaces ``torch.nn.functional.linear_cross_entropy`` and ``cut_cross_entropy``'s function by a
change of import. ``LinearCrossEntropy`` is the module. ``linear_logprobs`` returns differentiable log-probabilities,
entropies and log-sum-exps. ``linear_sample`` samples tokens, and ``linear_top_logprobs`` returns the best entries.
``QuantizedWeight`` is a frozen weight in 8 bits.
``linear_kept_logprobs`` replays the sets of token ids that a sampler kept.
``lazy_head`` makes a Hugging Face model compute its loss without logits, and needs no change to its code; ``check``
measures what that saves. ``autochunk`` chunks any function. ``losses`` has ready-made losses for preferences, policies
and distillation. ``FarFieldHead`` computes a training run's gradients from a block-sparse softmax. ``Sharding``
describes the vocabulary shard of a rank. ``interleave_vocab`` interleaves the vocabulary for load balance.
``configure_exchanges`` sets how ranks of one host exchange data. ``backend`` returns the implementation that serves a
tensor.
"""

import importlib
from typing import TYPE_CHECKING

from ._backend import Backend, backend
from ._lazy import LazyHeadWarning, LazyLogits, lazy_head, unpatch
from .dtensor import sharded_head
from .ranks import Sharding, configure_exchanges, interleave_vocab
from .far_field import FarFieldHead
from .loss import LinearCrossEntropy, linear_cross_entropy, linear_logprobs
from .quantized import QuantizedWeight

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
    "QuantizedWeight",
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


# Names that are imported at their first use: autochunk imports PyTorch's compiler, which takes seconds.
_LATER = {
    "AutoChunked": "._autochunk",
    "Check": "._check",
    "Unsupported": "._autochunk",
    "autochunk": "._autochunk",
    "check": "._check",
    "explain_compiled": "._compile.run",
    "linear_kept_logprobs": ".kept",
    "linear_sample": ".sampling",
    "linear_top_logprobs": ".sampling",
    "losses": ".losses",
}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name], __name__)
    return module if name == "losses" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
