"""What training libraries need of logitless.jax beyond a call: docs/recipes says which library needs what. ``levanter``
is imported when ``levanter.patch()`` is called."""
