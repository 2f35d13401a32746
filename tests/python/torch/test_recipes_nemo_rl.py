"""docs/use/recipes/nemo_rl.md: the function that scores tokens, alone and by NeMo-RL's own caller on two ranks."""

import importlib.util

import pytest
import torch
from logitless.torch.integrations import nemo_rl as recipe
from recipes.models import run_worker


class OneRank:
    def size(self):
        return 1

    def rank(self):
        return 0


def test_formula():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 2, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    target = torch.randint(0, 50, (2, 9))
    found = recipe.HiddenStatesToLogprobs.apply(hidden, target, weight, 0, 50, None, OneRank())
    expected = (hidden @ weight.T).log_softmax(-1).transpose(0, 1).gather(-1, target[..., None])[..., 0]
    assert found.shape == (2, 9) and torch.allclose(found, expected, atol=2e-5)
    for got, want in zip(*(torch.autograd.grad(x.sin().sum(), (hidden, weight)) for x in (found, expected))):
        assert (got - want).norm() < 2e-5 * want.norm()
    assert not recipe.HiddenStatesToLogprobs.apply(hidden, target, weight, 0, 50, None, OneRank(), True).requires_grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_patch(ranks):
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("could not import 'nemo_rl'")
    run_worker("nemo_rl_worker.py", ranks)
