"""Integrations with training libraries; docs/use/recipes describes each.

``trl``, ``verl`` and ``nemo_rl`` replace the libraries' scoring of tokens, ``unsloth`` a loss, and ``megatron`` that of a
model. They import the libraries when patched. ``transformers``, ``torchtune``, ``torchtitan`` and ``axolotl`` define classes of their
interfaces, and import them at once.
"""
