"""What training libraries need of logitless.jax beyond a call: docs/recipes says which library needs what. None of
them imports the library it is for before it is asked to change something of it."""
