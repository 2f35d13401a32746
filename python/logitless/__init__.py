"""Large-vocabulary losses without the logits.

``logitless.torch`` and ``logitless.jax`` hold the losses; each imports its framework when it is imported. This module
needs numpy alone::

    from logitless.torch import linear_cross_entropy
    loss = linear_cross_entropy(hidden, weight, target)

Functions of this module describe the library that was loaded.
"""

from ._communicator import Communicator
from ._compiler import Program
from ._library import LogitlessError, explain, kernels, library_path, version

__version__ = version()
__all__ = ["Communicator", "Program", "LogitlessError", "explain", "kernels", "library_path", "version", "__version__"]
