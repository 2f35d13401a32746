import jax_settings  # noqa: F401
