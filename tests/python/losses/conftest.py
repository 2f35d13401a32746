import jax_settings  # noqa: F401
import pytest


@pytest.fixture(params=["torch", "jax"])
def f(request):
    pytest.importorskip(request.param)
    import loss_frameworks

    return loss_frameworks.framework(request.param)
