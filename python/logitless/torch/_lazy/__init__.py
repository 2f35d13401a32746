"""Logits that are computed when something other than a loss reads them: ``lazy_head``.

``_patch.py`` changes a model's head for one of ``_linear.py``; ``_call.py`` is a call of it, ``_form.py`` what is made
of its logits, ``_tensor.py`` the tensor that stands for them, ``_views.py`` and ``_copies.py`` the operations that
keep it lazy, ``_losses.py`` the functions that need no logits, ``_gradient.py`` what flows back, ``_warnings.py`` says
what reads logits after all.
"""

from . import _losses  # noqa: F401  (registers its rules)
from ._linear import LazyLinear, lazy_linear
from ._patch import lazy_head, unpatch
from ._tensor import LazyLogits
from ._warnings import LazyHeadWarning

__all__ = ["LazyHeadWarning", "LazyLinear", "LazyLogits", "lazy_head", "lazy_linear", "unpatch"]
