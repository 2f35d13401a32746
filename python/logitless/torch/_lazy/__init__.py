"""Lazy logits, which are computed only if something other than a loss reads them: ``lazy_head``.

``_patch.py`` replaces a model's head by one of ``_linear.py``. ``_call.py`` is a call of it, and ``_form.py`` the
formula computed from its logits. ``_tensor.py`` is the tensor that represents them. ``_views.py`` and ``_copies.py``
have the operations that keep it lazy, ``_losses.py`` the functions that need no logits. ``_gradient.py`` is the
gradient that flows back. ``_warnings.py`` reports what reads logits after all.
"""

from . import _losses  # noqa: F401  (registers its rules)
from ._linear import LazyLinear, lazy_linear
from ._patch import lazy_head, unpatch
from ._tensor import LazyLogits
from ._warnings import LazyHeadWarning

__all__ = ["LazyHeadWarning", "LazyLinear", "LazyLogits", "lazy_head", "lazy_linear", "unpatch"]
