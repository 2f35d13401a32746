"""Integrations with training libraries; docs/use/recipes describes each.

``trl`` and ``verl`` replace the libraries' scoring of tokens, and import them when patched. ``torchtune``,
``torchtitan`` and ``axolotl`` define classes of their interfaces, and import them at once.
"""
