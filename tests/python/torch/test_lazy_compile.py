"""Lazy heads under torch.compile and torch.export: whole graphs, right results, and no logits where only the loss
leaves."""

import pytest
import torch
import torch.nn.functional as F
from expecting import expected_shares
from logitless.torch import _engine, lazy_head
from torch._dynamo.backends.common import aot_autograd

V = 300
IDS = torch.arange(24).view(2, 12) * 7 % V


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.body, self.lm_head = torch.nn.Embedding(V, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, V)

    def forward(self, ids):
        z = self.lm_head(self.body(self.embed(ids)).tanh())
        y = ids.roll(-1, 1)
        if self.kind == "edited":
            z[..., 3] = -1.0
        elif self.kind == "an edited view":
            z.transpose(0, 1).mul_(2.0)
        elif self.kind == "softcap":
            z = torch.tanh(z / 5.0) * 5.0
        elif self.kind == "shift":
            z, y = z[..., :-1, :].contiguous(), ids[:, 1:]
        loss = F.cross_entropy(z.float().view(-1, V), y.reshape(-1), label_smoothing=0.1)
        return loss, z


def sizes():
    """Returns a backend, and the shapes of the values in its graphs."""
    shapes = []

    def compiler(graph, inputs):
        shapes.extend(tuple(n.meta["val"].shape) for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
        return graph

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler), shapes


@pytest.mark.parametrize("kind", ["plain", "shift", "softcap", "edited", "an edited view"])
@pytest.mark.parametrize("logits", [False, True])
def test_compiled(kind, logits):
    torch._dynamo.reset()
    real, lazy = Model(kind), lazy_head(Model(kind))
    wanted, z = real(IDS)
    wanted.backward()
    backend, shapes = sizes()
    compiled = torch.compile(lambda ids: lazy(ids) if logits else lazy(ids)[0], fullgraph=True, backend=backend)
    found = compiled(IDS)
    loss = found[0] if logits else found
    loss.backward()
    assert torch.allclose(loss, wanted, rtol=1e-5)
    for p, q in zip(real.parameters(), lazy.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)
    if logits:
        assert torch.allclose(found[1], z, atol=1e-6)
        with torch.no_grad():
            lazy.lm_head.weight.mul_(2)  # the returned logits are numbers by now
        target = torch.zeros(found[1].shape[0] * found[1].shape[1], dtype=torch.int64)
        assert torch.allclose(F.cross_entropy(found[1].view(-1, V), target), F.cross_entropy(z.view(-1, V), target), rtol=1e-5)
    elif "edited" not in kind and torch.__version__ >= (2, 13):  # earlier versions keep them in the graph
        assert all(torch.Size(s).numel() < 20 * V or s == (V, 16) for s in shapes), shapes


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    lazy = lazy_head(Model("shift"))
    program = torch.export.export(lazy, (IDS,), strict=strict)
    wanted = Model("shift")(IDS)
    for a, b in zip(program.module()(IDS), wanted):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_compiled_language_model(monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64, use_cache=False,
    ))
    wanted = model(input_ids=IDS, labels=IDS)
    lazy_head(model, expected_ignored=0.28125)
    seen = expected_shares(monkeypatch, _engine)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=IDS, labels=IDS)
    found.loss.backward()
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-5) and torch.allclose(found.logits, wanted.logits, atol=1e-5)
    assert set(seen) == {0.28125}
    assert torch.export.export(model, (), dict(input_ids=IDS, labels=IDS)) is not None
