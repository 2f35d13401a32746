"""Losses of a large vocabulary for PyTorch, without the logits.

``linear_cross_entropy`` replaces ``torch.nn.functional.linear_cross_entropy`` and ``cut_cross_entropy``'s call by a
change of import; ``LinearCrossEntropy`` is the module; ``linear_logprobs`` gives differentiable log-probabilities,
entropies and log-sum-exps; ``lazy_head`` makes a Hugging Face model compute its loss so, without a change to its code;
``autochunk`` does it for any function; ``losses`` has those of preferences, policies and distillation ready.
``FarFieldHead`` takes gradients of a training run from the words that matter. ``Sharding`` says which words a rank has, ``deal_words``
which it had better have, ``configure_exchanges`` how ranks of one host exchange.
"""

from typing import TYPE_CHECKING


from ._lazy import LazyHeadWarning, LazyLogits, lazy_head, unpatch
from ._distributed import sharded_head
from ._ranks import Sharding, configure_exchanges, deal_words
from .far_field import FarFieldHead
from .loss import LinearCrossEntropy, linear_cross_entropy, linear_logprobs

if TYPE_CHECKING:
    from . import losses
    from ._autochunk import AutoChunked, Unsupported, autochunk
    from ._compile.run import explain_compiled

__all__ = [
    "AutoChunked",
    "FarFieldHead",
    "LazyHeadWarning",
    "LazyLogits",
    "LinearCrossEntropy",
    "Sharding",
    "Unsupported",
    "lazy_head",
    "linear_cross_entropy",
    "autochunk",
    "configure_exchanges",
    "deal_words",
    "explain_compiled",
    "linear_logprobs",
    "losses",
    "sharded_head",
    "unpatch",
]


def __getattr__(name: str):
    if name == "explain_compiled":
        from ._compile.run import explain_compiled

        return explain_compiled
    if name in ("AutoChunked", "Unsupported", "autochunk"):  # brings PyTorch's compiler with it, which takes seconds to import
        from . import _autochunk

        return getattr(_autochunk, name)
    if name == "losses":
        import importlib

        return importlib.import_module(".losses", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
