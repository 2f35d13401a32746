"""PyTorch operations that generated code uses: softmaxes with log-sum-exps, elements at an index of each row, sums of
batched products. The tests count operations on big values, bytes and rounds."""

import re

import oracle
import pytest
import torch
import torch.nn.functional as F
from generated import autochunk
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, DIM, VOCAB = 48, 8, 700


class BigOperations(TorchDispatchMode):
    """Counts the operations that read or make at least so many elements. Operations that only create views do not
    count."""

    VIEWS = ("t", "transpose", "permute", "view", "_unsafe_view", "slice", "unsqueeze", "squeeze", "detach", "empty")

    def __init__(self, numbers: int):
        super().__init__()
        self.numbers, self.names = numbers, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        tensors = [t for t in (*args, made) if isinstance(t, torch.Tensor)]
        if name not in self.VIEWS and max((t.numel() for t in tensors), default=0) >= self.numbers:
            self.names.append(name)
        return made


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator(oracle.DEVICE).manual_seed(seed)
    hidden = torch.randn(ROWS, DIM, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=dtype, requires_grad=True)
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    target[::7] = -100
    return hidden, weight, target


def check_same(function, chunked, args, tolerance=1e-12):
    wanted = [a for a in args if a.requires_grad]
    expected, found = function(*args), chunked(*args)
    pairs = [(found, expected)]
    if wanted:
        cotangent = torch.randn_like(expected)
        pairs += zip(torch.autograd.grad(found, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent))
    for f, e in pairs:
        assert (f - e).abs().max() <= tolerance * e.abs().max()


def focal(hidden, weight, target):
    nll = F.cross_entropy(hidden @ weight.T, target, reduction="none")
    return ((1 - torch.exp(-nll)) ** 2 * nll).mean()


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("function", [focal, z_loss], ids=lambda f: f.__name__)
def test_a_cross_entropy_is_nine_operations_on_the_logits(function):
    args = inputs()
    chunked = autochunk(function, chunks=4)
    check_same(function, chunked, args)
    numbers = ROWS // 4 * VOCAB
    with BigOperations(numbers) as counted, torch.no_grad():
        chunked.last.run(chunked.last.forward, args)
    # Matrix product, target's logit, maximum, softmax, its maximum, times a row, the target's element, two products of
    # gradients.
    assert len(counted.names) == 4 * 9, counted.names
    # No other value of the size of a chunk's logits is in memory.
    assert chunked.last.forward.after < 1.2 * numbers * 8


def masked_softmax(q, k, v):
    """Masked scores are far below 0, or -inf."""
    scores = q @ k.T
    place = torch.arange(scores.shape[1])
    scores = torch.where((place[None, :] - place[: scores.shape[0], None]).abs() < 9, scores, -3e38)
    return torch.softmax(scores.masked_fill(place % 5 == 0, float("-inf")), -1) @ v


def entropy(hidden, weight):
    logs = F.log_softmax(hidden @ weight.T, -1)
    return -(logs.exp() * logs).sum(-1)


def columns(hidden, weight):
    return torch.softmax(hidden @ weight.T, 0).square().sum(1)


def test_softmaxes_are_pytorch_s():
    hidden, weight, _ = inputs()
    check_same(masked_softmax, masked := autochunk(masked_softmax, chunks=3), (hidden, weight, torch.randn_like(weight)))
    assert "torch.softmax(" in masked.source() and "logsumexp" not in masked.source() and ".exp" not in masked.source()
    check_same(entropy, logs := autochunk(entropy, chunks=3), (hidden, weight))
    assert "torch.log_softmax(" in logs.source()
    check_same(columns, autochunk(columns, memory_budget="100KiB"), (hidden, weight))


def kept_softmax(hidden, weight):
    """The logits are read after their softmax."""
    logits = hidden @ weight.T
    lse = logits.logsumexp(-1)
    return (logits.softmax(-1) * logits).sum(-1) + lse + (logits - lse[:, None]).square().sum(-1)


def test_logits_that_something_reads_afterwards_stay():
    hidden, weight, _ = inputs()
    check_same(kept_softmax, autochunk(kept_softmax, chunks=3), (hidden, weight))


def rows_of_infinities(logits):
    return logits.mul(1.0).logsumexp(-1)


def test_log_sum_exps_of_infinities_and_of_nothing():
    logits = torch.randn(6, 40)
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3, 5] = float("nan")
    logits[4, ::2] = float("-inf")
    found, expected = autochunk(rows_of_infinities, chunks=2)(logits), logits.logsumexp(-1)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert autochunk(rows_of_infinities)(torch.randn(6, 0)).eq(float("-inf")).all()


def margins(hidden, weight, target):
    """Labels out of range match no entry; two such values are added."""
    logits = hidden @ weight.T
    place = torch.arange(logits.shape[1])
    hit = (place == target[:, None]).to(logits.dtype)
    other = (place == (target[:, None] + 1)).to(logits.dtype)
    scale = logits.detach().sum(-1, keepdim=True)
    return ((logits - hit * scale).exp() * 1e-3 + torch.where(hit > 0, scale, 0) + torch.where(other > 0, scale, 0)).sum(-1)


@pytest.mark.parametrize("budget", ["96KiB", "24KiB"])
def test_numbers_at_an_index_that_may_be_outside(budget):
    args = inputs()
    check_same(margins, autochunk(margins, memory_budget=budget), args, 1e-10)


def batched(x, up, down):
    """Weights of several experts, whose gradients are sums over all chunks."""
    return torch.einsum("enf,efd->nd", torch.tanh(torch.einsum("nd,edf->enf", x, up)), down)


def test_sums_of_batched_products_are_added_to_in_place():
    args = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((64, 8), (3, 8, 500), (3, 500, 8))]
    chunked = autochunk(batched, chunks=32)
    check_same(batched, chunked, args)
    # [E, F, D] and [E, D, F] are sums that are updated in place, and not made in each round.
    with BigOperations(3 * 500 * 8) as counted, torch.no_grad():
        backward = chunked.last.backward
        cotangent = torch.ones(64, 8, dtype=torch.float64)
        backward.function(*chunked.last.inputs(backward, [a.detach() for a in args], [cotangent]))
    assert "einsum" not in chunked.source()
    assert counted.names.count("baddbmm_") + counted.names.count("addmm_") == 2 * 32
    assert counted.names.count("add_") == 0


def apart(a, b):
    """Contracted dimensions are not adjacent, and batch dimensions are not first."""
    return torch.einsum("ibjc,cbkj->bki", a, b), torch.einsum("ibjc,ibjc->b", a, a), torch.einsum("ibjc,cbkj->", a, b)


def test_products_of_any_dimensions():
    a, b = torch.randn(5, 3, 4, 6, dtype=torch.float64), torch.randn(6, 3, 7, 4, dtype=torch.float64)
    for found, expected in zip(autochunk(apart)(a, b), apart(a, b)):
        torch.testing.assert_close(found, expected)


def experts(x, router, up, down):
    shares = F.softmax(x @ router, -1)
    units = F.gelu(torch.einsum("nd,edf->enf", x, up))
    return torch.einsum("enf,efd,ne->nd", units, down, shares)


def rounds(compiled):
    return max(-(-r["extent"] // r["chunk"]) for r in compiled.regions)


def test_a_budget_is_met_without_chunks_of_one_row():
    args = [torch.randn(*s) for s in ((1024, 64), (64, 4), (4, 64, 2048), (4, 2048, 64))]
    args = [a.requires_grad_() for a in args]
    chunked = autochunk(experts, memory_budget="8MiB")
    plan = chunked._planned(tuple(args), {})
    assert max(plan.forward.after, plan.backward.after) <= 8 << 20
    assert rounds(plan.backward) <= 64, plan.describe()


def correlations(first, projector, second):
    one, two = first @ projector, second @ projector
    c = (one - one.mean(0)).T @ (two - two.mean(0))
    return (torch.diagonal(c) - 1).square().sum() + 0.005 * c.square().sum()


@pytest.mark.parametrize("executor", ["python", "native"])
def test_a_budget_that_is_not_met_names_one_that_is(executor):
    args = [torch.randn(*s, requires_grad=True) for s in ((256, 16), (16, 512), (256, 16))]
    text = autochunk(correlations, memory_budget="256KiB", executor=executor).explain(*args)
    assert "NOT met" in text
    [least] = re.findall(r"not chunked: .*\[[\d, ]+\]: .*for which a budget of (\d+) would do", text)
    assert "NOT met" not in autochunk(correlations, memory_budget=int(least), executor=executor).explain(*args)


def test_a_budget_that_is_not_met_is_no_reason_for_more_work():
    """The projections alone exceed the budget: the best plan recomputes almost nothing."""
    args = [torch.randn(*s, requires_grad=True) for s in ((256, 16), (16, 512), (256, 16))]
    for executor in ("python", "native"):
        text = autochunk(correlations, memory_budget="256KiB", executor=executor).explain(*args)
        more = [float(share) for share in re.findall(r"([\d.]+) % more multiply-adds", text)]
        assert "NOT met" in text and sum(more) < 5, text


def pairs(hidden, weight, target):
    """A loss of pairs of sequences: each needs all rows, so the vocabulary is cut."""
    log_probs = F.log_softmax(hidden.view(4, -1, DIM) @ weight.T, -1)
    index = target.clamp(min=0).view(4, -1, 1)
    total = log_probs.gather(-1, index).squeeze(-1).sum(-1)
    return F.softplus(total[2:] - total[:2]).mean()


def test_a_cut_vocabulary_is_counted_and_reduced_in_its_memory():
    """Elements at an index are written for every type of counter; log-sum-exps come after the last reader of the
    logits."""
    args = inputs()
    chunked = autochunk(pairs, memory_budget=VOCAB * ROWS * 8 // 6)
    check_same(pairs, chunked, args)
    text = chunked.source()
    assert ", 700 in " in chunked.explain() and "2 phases" in chunked.explain()
    assert "_put_(" in text and " == " not in text and ".logsumexp(" not in text and "_softmax_(" in text, text


def test_a_put_by_indices_of_another_loop():
    """The gradient of a matrix by loops along its rows reads indices that an earlier loop made: the best wrong class."""
    def hinge(hidden, weight, target):
        scores = hidden @ weight.T
        right = scores.gather(1, target[:, None]).squeeze(1)
        wrong = scores.scatter(1, target[:, None], float("-inf"))
        return F.relu(1.0 + wrong.max(dim=1).values - right).mean()

    hidden, weight = (torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (512, 4096))
    target = torch.randint(0, 4096, (512,))
    wanted = torch.autograd.grad(hinge(hidden, weight, target), (hidden, weight))
    chunked = autochunk(hinge)
    found = torch.autograd.grad(chunked(hidden, weight, target), (hidden, weight))
    assert len(chunked.last.forward.regions) == 2, chunked.explain()
    for a, e in zip(found, wanted, strict=True):
        assert (a - e).abs().max() <= 2**-6 * e.abs().max()
