"""What training libraries need of logitless beyond a call: docs/recipes says which library needs what.

``trl`` and ``verl`` put the library where those compute the scores of tokens, and import them when asked to.
``torchtune``, ``torchtitan`` and ``axolotl`` hold classes of their interfaces, and import theirs at once.
"""
