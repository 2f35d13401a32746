"""docs/use/recipes/torchtitan.md: its losses with a lazy head."""

import types

import pytest
import torch
from expecting import expected_shares
from logitless.torch import _engine
from recipes.models import Made, snippet, under_fsdp

loss = pytest.importorskip("torchtitan.components.loss", exc_type=ImportError)


def step(wrapper):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 300, bias=False), torch.randn(2, 16, 16, requires_grad=True)
    labels = torch.randint(0, 300, (2, 16))
    labels[0, :3] = -100
    wrapper.set_lm_head(head)
    value, _ = wrapper(hidden, labels, torch.tensor(29.0))
    value.backward()
    with torch.no_grad():
        assert wrapper(hidden.detach(), labels, torch.tensor(29.0))[0] == pytest.approx(value.item(), rel=1e-6)  # validation
    return value.item(), hidden.grad, head.weight.grad


@pytest.mark.parametrize("chunks", [1, 4])
def test_lazy_loss(chunks, monkeypatch):
    from logitless.torch.integrations.torchtitan import LazyLoss

    expected, *wanted = step(loss.ChunkedLossWrapper.Config(num_chunks=4).build())
    seen = expected_shares(monkeypatch, _engine)
    with Made() as made:
        wrapper = LazyLoss.Config(num_chunks=chunks, expected_ignored=0.25).build()
        assert type(wrapper) is LazyLoss and isinstance(wrapper, loss.ChunkedLossWrapper)  # the trainer asks for it
        found, *gradients = step(wrapper)
    assert set(seen) == {0.25} and made.count == 0 and made.calls == 2 * chunks and found == pytest.approx(expected, rel=1e-6)
    for got, want in zip(gradients, wanted):
        assert (got - want).norm() < 1e-5 * want.norm()


def test_page():
    assert snippet("torchtitan.md")["config"].build().num_chunks == 1


def test_refusals():
    from logitless.torch.integrations.torchtitan import LazyLoss

    compiled = types.SimpleNamespace(enable=True, components=["model", "loss"], backend="inductor")
    with pytest.raises(ValueError, match=r"expected no 'loss' beside LazyLoss, got \['model', 'loss'\]"):
        LazyLoss.Config().build(compile_config=compiled)
    head = types.SimpleNamespace(weight=types.SimpleNamespace(device_mesh=types.SimpleNamespace(mesh_dim_names=("fsdp", "tp"))))
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        LazyLoss.Config().build().set_lm_head(head)


def test_fsdp():
    under_fsdp("torchtitan")
