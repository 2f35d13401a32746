"""Large-vocabulary losses without the logits.

``logitless.torch`` and ``logitless.jax`` hold the losses; each imports its framework when it is imported. This module
needs numpy alone::

    from logitless.torch import linear_cross_entropy
    loss = linear_cross_entropy(hidden, weight, target)

Functions of this module describe the library, and raise ImportError where it cannot be loaded. ``build_info`` says
why not.
"""

from __future__ import annotations

from ._build_info import BuildInfo, build_info
from ._communicator import Communicator
from ._compiler import Program
from ._library import LogitlessError, explain, kernels, library_path, version

__version__: str
__all__ = [
    "BuildInfo", "Communicator", "Program", "LogitlessError", "build_info", "explain", "kernels", "library_path", "version",
    "__version__",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return version()
    except ImportError:  # an installation without the library
        import importlib.metadata

        return importlib.metadata.version("logitless")


def __dir__() -> list[str]:
    return [*__all__, *({"torch", "jax"} & set(globals()))]
