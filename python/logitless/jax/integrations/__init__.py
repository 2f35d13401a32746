"""Integrations of logitless.jax with training libraries: docs/use/recipes describes each. ``levanter`` is imported when
``levanter.patch()`` is called."""
