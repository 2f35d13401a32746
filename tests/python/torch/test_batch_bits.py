"""A token's log-probability, entropy, lse and loss have the same bits in any batch: with any number of tokens, position, mask,
neighbours, memory budget, and with or without gradients. So a sampler and a trainer agree exactly."""

import pytest
import torch
from logitless.torch import linear_cross_entropy, linear_logprobs
from logitless.torch.losses import selective_log_softmax

pytestmark = pytest.mark.native
DEVICE = torch.get_default_device().type  # conftest.py
# Products of fp32 are cuBLAS's on a GPU, whose order of sums goes by the number of tokens (docs/use/exact.md).
DTYPES = [*([torch.float32] if DEVICE == "cpu" else []), torch.bfloat16, torch.float16]
TOKENS, DIM, VOCAB = 700, 136, 1200  # an odd number of Hopper's vocabulary tiles


@pytest.fixture(scope="module", params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def head(request):
    generator = torch.Generator("cpu").manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cpu")

    hidden, weight = normal(TOKENS, DIM), normal(VOCAB, DIM) / 4
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator, device="cpu")
    return hidden.to(DEVICE, request.param), weight.to(DEVICE, request.param), target.to(DEVICE)


def bits(hidden, weight, target, **options):
    """Returns log-probabilities, which each call that has them gives, with and without gradients, entropies and lse."""
    log_prob, entropy, lse = linear_logprobs(hidden, weight, target, **options)
    loss = linear_cross_entropy(hidden, weight, target, reduction="none", **options)
    wanted = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    for other in (
        linear_logprobs(*wanted, target, **options)[0].detach(),
        -loss,
        -linear_cross_entropy(*wanted, target, reduction="none", **options).detach(),
        selective_log_softmax(hidden, weight, target, batch_invariant=True, **options),
    ):
        assert torch.equal(other, log_prob)
    return log_prob, entropy, lse


def same(found, expected, rows):
    for a, b in zip(found, expected):
        assert torch.equal(a, b[rows])


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 128, 129, 255, 256, 257, 600])
def test_any_number_of_tokens_anywhere(head, tokens):
    hidden, weight, target = head
    expected = bits(*head)
    for first in (0, 3, TOKENS - tokens):
        rows = slice(first, first + tokens)
        same(bits(hidden[rows].contiguous(), weight, target[rows].contiguous()), expected, rows)


LOSS = dict(softcap=5.0, label_smoothing=0.1, z_loss=0.01, reduction="none", return_argmax=True, return_lse=True)
RISING = torch.linspace(0.5, 2, TOKENS)  # temperatures, and weights of targets


@pytest.mark.parametrize("tokens", [1, 128])
@pytest.mark.parametrize("call", {
    "smoothed": lambda rows, h, w, y, b: linear_cross_entropy(h, w, y, b, **LOSS),
    "weighted_targets": lambda rows, h, w, y, b: linear_cross_entropy(
        h, w, torch.stack([y, y // 2], -1), b, target_weight=RISING[rows, None].expand(-1, 2), reduction="none",
        return_target_logits=True),
    "capped_targets": lambda rows, h, w, y, b: linear_logprobs(
        h, w, torch.stack([y, y // 2, y // 3], -1), b, softcap=5.0, logit_scale=0.7),
    "temperatures": lambda rows, h, w, y, b: bits(h, w, y, temperature=RISING[rows]),
    "wide_weight": lambda rows, h, w, y, b: bits(h, w.float(), y),
}.items(), ids=lambda item: item[0])
def test_few_tokens_of_other_heads(head, call, tokens):
    hidden, weight, target = head
    if call[0] in ("temperatures", "wide_weight") and DEVICE != "cpu":
        pytest.skip("refused beside batch_invariant: test_losses.py")
    bias = torch.linspace(-1, 1, VOCAB, device=DEVICE).to(hidden.dtype if DEVICE == "cpu" else torch.float32)
    rows = slice(9, 9 + tokens)
    expected = call[1](slice(None), *head, bias)
    same(call[1](rows, hidden[rows], weight, target[rows], bias), expected, rows)


def test_any_order(head):
    hidden, weight, target = head
    rows = torch.randperm(TOKENS, device=DEVICE)
    same(bits(hidden[rows], weight, target[rows]), bits(*head), rows)


@pytest.mark.parametrize("ignored", [0.1, 0.6, 0.95])
def test_any_mask(head, ignored):
    hidden, weight, target = head
    expected = bits(*head)
    counts = torch.rand(TOKENS, device=DEVICE) >= ignored
    found = bits(hidden, weight, torch.where(counts, target, -100))
    for a, b in zip(found, expected):
        assert torch.equal(a[counts], b[counts]) and not a[~counts].any()


@pytest.mark.parametrize("factor", [6.0, 40.0])
def test_any_neighbours(head, factor):
    """Larger logits of other tokens leave the range in which exponentials are summed at first."""
    hidden, weight, target = head
    rows = torch.arange(TOKENS, device=DEVICE) % 3 == 0
    same([x[rows] for x in bits(torch.where(rows[:, None], hidden, factor * hidden), weight, target)], bits(*head), rows)
    large = bits(factor * hidden, weight, target)
    same(bits(factor * hidden[rows], weight, target[rows]), large, rows)


def test_any_budget(head):
    expected = bits(*head)
    for budget in ("3MiB", "8MiB", "1GiB"):
        same(bits(*head, memory_budget=budget), expected, slice(None))
    same(linear_logprobs(*head, memory_budget="384KiB"), expected, slice(None))  # of the logits' 3.3 MiB
