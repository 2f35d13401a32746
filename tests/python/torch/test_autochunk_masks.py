"""autochunk of x[mask]: a mask selects rows, so their number depends on values. Sums over those rows are tested,
too."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from generated import autochunk
from test_autochunk import DEVICE, check_same, random, whole

from logitless.torch._autochunk import Unsupported

EXECUTORS = ["python", "native"]
B, T, D, V = 4, 12, 6, 20


def hidden_states(h, w, t, mask):
    """The head runs on the selected tokens alone."""
    return F.cross_entropy(h[mask] @ w.T, t[mask])


def logits(h, w, t, mask):
    z = (h @ w.T)[mask].double()
    return F.cross_entropy(z.view(-1, V), t[mask], label_smoothing=0.1, reduction="sum") / mask.sum()


def token_losses(h, w, t, mask):
    loss = F.cross_entropy(F.linear(h, w).view(-1, V), t.view(-1), reduction="none")
    kept = loss[mask.view(-1)]
    return kept.mean() + kept.square().sum() / kept.numel(), torch.masked_select(loss, mask.view(-1)).exp().mean()


def log_probabilities(h, w, t, mask):
    logp = F.log_softmax(F.linear(h[mask], w), -1)
    chosen = logp.gather(-1, t.view(-1)[mask.view(-1)].unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (entropy * 0.1 - chosen * chosen.detach().exp()).mean() + logp[:, 1:3].mean(0).square().sum()


def distances(h, w, t, mask):
    kl = F.kl_div(F.log_softmax(F.linear(h[mask], w), 1), F.softmax(F.linear(h * 2, w)[mask], 1), reduction="batchmean")
    other = F.mse_loss(h[mask], (h * 2)[mask]) + F.smooth_l1_loss(h[mask], h.cos()[mask], reduction="sum")
    labels = F.one_hot(t, V)[mask].to(h.dtype)
    bce = F.binary_cross_entropy_with_logits(F.linear(h[mask], w), labels)
    return kl + other + bce + F.cross_entropy(F.linear(h[mask], w), labels)


def elements(h, w, t, mask):
    """Gradients at rows left out would be 0 * inf: log(0) and 1 / 0."""
    x = F.linear(h * mask[..., None], w).square()
    kept = x[mask]
    one = kept.log().mean() + (1 / kept[..., :4]).sum()
    return one + x[x > 0.5].sqrt().mean() + (kept > 0.1).sum(), kept[:, 0].sum()


def written_back(h, w, t, mask):
    """x[mask] -= 1 is a write of x[mask] - 1, as the losses of the kept tokens are written beside zeros."""
    loss, z = h.new_zeros(B, T), F.linear(h, w)
    loss[mask] = F.cross_entropy(z[mask], t[mask], reduction="none")
    z[z > 0.5] *= 2.0
    below = (z.detach() * 3).long()
    below[(below > 0) * (below == below.clamp(max=3))] -= 1
    return loss.sum(1).square().mean() + (z * below).mean()


FUNCTIONS = [hidden_states, logits, token_losses, log_probabilities, distances, elements, written_back]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_float64(fn, executor):
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(3), device="cpu").to(DEVICE) < 0.4
    args = random(B, T, D), random(V, D), whole(V, B, T), mask
    check_same(fn, autochunk(fn, executor=executor, chunks=3), args, 1e-12)


def test_no_rows_are_nan():
    args = random(B, T, D), random(V, D), whole(V, B, T), torch.zeros(B, T, dtype=torch.bool)
    chunked = autochunk(hidden_states)
    assert hidden_states(*args).isnan() and chunked(*args).isnan()


def test_half_sums_are_rounded_once():
    x = random(64, 8).detach().to(torch.bfloat16)
    mask = x[:, 0] > 0
    assert torch.equal(autochunk(lambda x, mask: x[mask].mean())(x, mask), x[mask].mean())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_logits_do_not_exist(executor):
    rows, dim, vocab = 512, 16, 2048
    h, w = random(rows, dim, dtype=torch.float32), random(vocab, dim, dtype=torch.float32)
    args = h, w, whole(vocab, rows), torch.arange(rows) % 3 > 0
    for fn in (hidden_states, logits_of_tokens):
        plan = autochunk(fn, executor=executor, memory_budget="1MiB")
        assert "NOT met" not in plan.explain(*args), fn.__name__


def logits_of_tokens(h, w, t, mask):
    return F.cross_entropy(F.linear(h, w)[mask], t[mask])


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda x, m: x[m], "returns x.mask., whose size depends on values; expected a sum or mean"),
        (lambda x, m: x[m].sort(0)[0].sum(), r"test_autochunk_masks.py:\d+: .*sort of x.mask.*torch.where"),
        (lambda x, m: (x[m] * x).sum(), "mul of x.mask. .*expected the same mask on both"),
        (lambda x, m: (x[m] * x[x[:, 0] > 0]).sum(), "rows by two masks"),
        (lambda x, m: x[m].softmax(0).sum(), "softmax of x.mask. along its rows"),
        (lambda x, m: x[m][0].sum(), "index into the rows"),
        (lambda x, m: x[m].T.sum(), "T of x.mask."),
        (lambda x, m: x.sum() / len(x[m]), r"expected mask.sum\(\)"),
        (lambda x, m: x[m].sum() if x[m].sum() > 0 else x.sum(), "expected torch.where"),
        (lambda x, m: x[m].view(-1).sum(), "view of x.mask."),
        (lambda x, m: (x.T @ x[m]).sum(), "a product of x.mask."),
        (lambda x, m: x[m.nonzero()].sum(), "nonzero.*expected a mask over all rows"),
        (lambda x, m: (x * 1).__setitem__(~m, x[m]), r"writing y.mask. has a form into x.mask."),
        (lambda x, m: torch.bincount(m.long(), x[:, 0]).sum(), r"bincount.*expected torch.zeros\(n\).index_add_"),
    ],
    ids="output sort rows masks dim index attribute len branch view product nonzero written bincount".split(),
)
def test_refusals_name_what_would_do(fn, why):
    with pytest.raises(Unsupported, match=why):
        autochunk(fn)(random(9, 18), torch.arange(9) > 3)
