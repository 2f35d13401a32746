import jax_settings  # noqa: F401
import pytest


@pytest.fixture(params=["torch", "jax"])
def f(request):
    pytest.importorskip(request.param)
    import loss_frameworks

    return loss_frameworks.framework(request.param)


@pytest.fixture
def portable(f, monkeypatch):
    """Takes the framework's own operations."""
    monkeypatch.setenv("LOGITLESS_BACKEND", "portable")
    clear = f.jax.clear_caches if hasattr(f, "jax") else int
    clear()
    yield
    clear()
