"""The ready-made losses, written once as functions of log-probabilities.

Every function takes ``xp``, the framework: ``torch/_xp.py`` or ``jax/_xp.py``, which have the array operations, the
checks of arrays and the calls of the head. The docstrings of the public functions are here too: {target}, {array} and
lines that begin with "torch: " or "jax: " are filled in by ``options.documentation``.
"""
