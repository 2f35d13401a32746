"""The Python of docs/use/recipes/fp32_head.md prints the table of the page."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyLogits, _engine, backend, lazy_head

PAGE = Path(__file__).parents[3] / "docs/use/recipes/fp32_head.md"


def test_the_page(capsys):
    text = PAGE.read_text()
    stated = [float(n) for n in re.findall(r"\| (\de-\d\d) \|", text)]
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(stated) == 4
    for found, said in zip(printed, stated):
        assert said / 4 < found < 4 * said


class Model(torch.nn.Module):
    """A bf16 model. cast: an fp32 head whose hidden states a hook widens, as TRL's cast_lm_head_to_fp32 does."""

    def __init__(self, hidden, weight, cast=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = torch.nn.Embedding(60, 32, dtype=hidden), torch.nn.Linear(32, 300, dtype=weight)
        if cast:
            self.lm_head.register_forward_pre_hook(lambda module, given: (given[0].float(),))

    def forward(self, ids):
        self.logits = self.lm_head(self.embed(ids))
        return F.cross_entropy(self.logits.float().flatten(0, 1), ids.flatten() * 5)


def step(model, compiled=False):
    ids = torch.arange(60).view(3, 20) * 7 % 60
    loss = (torch.compile(model, backend="aot_eager") if compiled else model)(ids)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("hidden, weight, cast", [(FULL, HALF, False), (HALF, FULL, False), (HALF, FULL, True)])
def test_lazy_heads_of_two_dtypes(hidden, weight, cast, monkeypatch):
    """Loss and gradients are those of fp32 logits, and each gradient has its tensor's dtype. The library multiplies the
    tensors as they are; what reads the logits gets them in fp32."""
    planned, tensor_struct = [], _engine.tensor_struct
    monkeypatch.setattr(_engine, "tensor_struct", lambda name, t: planned.append((name, t.dtype)) or tensor_struct(name, t))
    model = Model(hidden, weight, cast)
    wanted = step(model.float())
    lazy = Model(hidden, weight, cast)
    found = step(lazy_head(lazy))
    by_kernels = {("hidden", FULL if cast else hidden), ("weight", weight)} <= set(planned)
    assert by_kernels or backend(torch.empty(0, dtype=FULL)).name == "portable"
    assert isinstance(lazy.logits, LazyLogits) and not lazy.logits.is_real and lazy.logits.dtype == FULL
    for one, other, p in zip(found, wanted, [None, *lazy.parameters()]):
        assert p is None or one.dtype == p.dtype
        assert (one.float() - other).norm() <= (1e-6 if p is None else 5e-3 if p.dtype == HALF else 1e-5) * other.norm()
    assert torch.allclose(lazy.logits.materialize(), model.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden, weight", [(FULL, HALF), (HALF, FULL)])
def test_compiled_heads_of_two_dtypes(hidden, weight):
    torch._dynamo.reset()
    for one, other in zip(step(lazy_head(Model(hidden, weight)), True), step(lazy_head(Model(hidden, weight)))):
        assert one.dtype == other.dtype and (one - other).norm() <= 1e-2 * other.norm()
