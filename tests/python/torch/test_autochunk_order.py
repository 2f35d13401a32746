"""autochunk of ordered operations (running sums, sorting, diagonals, writing by index, margins) and random numbers."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from generated import autochunk
from test_autochunk import DEVICE, check_same, random, whole

from logitless.torch._autochunk import Unsupported

EXECUTORS = ["python", "native"]
ROWS, COLUMNS = 24, 20


def sums(x, i):
    counted = ((x > 0).cumsum(1) * x).sum() + (i.cumsum(0) * x[:, 0]).sum()
    ends = (x.flip(1).logcumsumexp(1).flip(1) - x).mean() - torch.logcumsumexp(x * 2, 0).sum() / 7
    logs = x.logcumsumexp(1).sin().sum() + (x.flip(1, 0) * x).sum() + ends
    labels = F.one_hot(i, COLUMNS)
    moved = ((x.softmax(1).cumsum(1) - labels.cumsum(1)) ** 2).sum() + (labels.flip(1).cumsum(1).flip(1) * x).sum()
    return x.cumsum(1).exp().mean() + x.cumsum(0).sin().sum() + counted + logs + moved


def sorting(x, i):
    values, index = x.topk(3, 1)
    ordered = (x.sort(1, descending=True)[0] * torch.arange(COLUMNS)).sum() + (x.sort(0)[0] ** 2)[:5].sum()
    some = x.kthvalue(4, 1)[0].exp().sum() + x.median(1)[0].exp().sum() + x.median() * 3 + x.quantile(0.3, 1).sum()
    picked = (x * 2).gather(1, x.topk(4, 1, largest=False)[1]).exp().sum()
    return values.exp().sum() + ordered + some + picked, index, x.argsort(1), torch.bucketize(x, x[0].sort()[0])


def diagonals(x, i):
    square = x.T @ x
    one = square.diagonal().exp().mean() + square.diagonal(2).sin().sum() + x.diagonal(-3).exp().sum() + square.trace()
    two = (torch.eye(ROWS, COLUMNS, dtype=x.dtype) * x).sum() + torch.diag_embed(x[:4]).exp().sum()
    three = (F.one_hot(i, COLUMNS) * x).sum() + torch.diag(x[0]).exp().sum() + x[:, 1::3].exp().sum()
    return one + two + three + x.tril(-1).exp().sum() + x.triu(1).exp().sum()


def writes(x, i):
    rows, some = x.clone(), torch.tensor([3, 1, 7])
    rows[some] = x[:3] * 2
    columns = x.clone()
    columns[:, some] = x[:, 4:7].sin()
    columns[x > 1] = 2.0
    one = rows.exp().mean() + columns.exp().mean() + x.index_fill(1, some, 2.0).exp().mean()
    two = x.index_copy(0, some, x[5:8] * 3).exp().mean() + x.index_add(1, some, x[:, :3]).exp().mean()
    three = x.masked_scatter(x > 0, x * 2).sin().sum() + x.scatter_reduce(1, i[:, None], x[:, :1], "sum").exp().mean()
    order = x.argsort(1)
    wide = (x.scatter(1, order, x * 2) * torch.arange(COLUMNS)).sum() + x.scatter_add(1, order % 4, x).exp().mean()
    return one + two + three + wide + (torch.zeros_like(x).scatter(1, order[:, :18], 1.0) * x).sum()


def margins(x, i):
    weights = x[0].detach().abs()
    one = F.multi_margin_loss(x, i) + F.multi_margin_loss(x, i, p=2, margin=0.7, reduction="sum")
    return one + (F.multi_margin_loss(x, i, weight=weights, reduction="none") * x[:, 0]).sum()


def roundings(x, i):
    kept = torch.floor(x / 0.3) + torch.div(x, 0.3, rounding_mode="trunc") + (x * 3).round()
    wholes = (i.div(2, rounding_mode="floor") * i).sum()
    return (kept * x).sum() + (x.ceil() * x).sum() + x.tanh().erfinv().sin().sum() + wholes


def running(x, i):
    """Products and running extremes, some of zeros; hazards and stick breaking are such."""
    gated = torch.where(i[:, None] > 4, x, x.round())
    share = x.sigmoid()
    broken = share[:, :-1] * (1 - share[:, 1:]).cumprod(1)
    one = (gated.cumprod(1) * x).sum() + x.cumprod(0).sin().sum() + broken.log().mean()
    two = gated.prod(1).sin().sum() + x.prod(0, keepdim=True).sin().sum() + (0.5 * x[:3]).prod()
    top, at = gated.cummax(1)
    least, place = x.cummin(0)
    return one + two + (top * x).sum() + (least.sin() * x).sum(), at, place, i.cummax(0)[0]


def remainders(x, i):
    by = x[0].detach() + 0.05
    quotients = torch.fmod(x, 0.3) + x % -0.7 + torch.remainder(x, by) + x.detach() // 0.3 + torch.fmod(x, x.flip(1) + 0.01)
    return (quotients * x).sum() + (x.detach() // by * x).sin().sum()


def segments(x, i):
    index, few = (i % 6)[:, None].expand(-1, COLUMNS), (i % 5)[:, None].repeat(1, 9)
    into, total = x[:6] * 0.5, 0.0
    for own in (True, False):
        for kind in ("sum", "mean", "amax", "amin"):
            total = total + into.scatter_reduce(0, index, x, kind, include_self=own).exp().mean()
        total = total + x.scatter_reduce(1, few, x[:, :9].round(), "amax", include_self=own).sin().sum()
        total = total + x.scatter_reduce(1, few, x[:, :9], "prod", include_self=own).sin().sum()
    index = i[:8] % 6
    total = total + into.detach().index_reduce(0, index, x[:8].detach(), "mean").sum()
    return total + torch.zeros(ROWS, 6).to(x).index_add(1, index, x[:, :8]).exp().mean()


def windows(x, i):
    image = x.view(2, 3, 8, 10)
    read = [x.unfold(1, 3, 1), x.unfold(0, 4, 3), x.unfold(1, 2, 5)]
    one = sum((part.exp().mean(-1) ** 2).sum() for part in read)
    two = F.avg_pool1d(x[None], 3, 1, 1).sin().sum() + F.avg_pool2d(image, 3, 2, 1, count_include_pad=False).sin().sum()
    three = F.max_pool2d(image.round(), 3, 2, 1).exp().sum() + F.max_pool1d(x[None], 5, 1, dilation=2).sin().sum()
    top, at = F.max_pool2d(image, (2, 3), return_indices=True)
    blocks = F.unfold(image, (3, 2), dilation=(1, 2), padding=1, stride=2)
    four = blocks.sin().sum() + F.fold(x.view(4, 12, 10), (3, 9), (2, 3), padding=1, stride=(2, 2)).exp().mean()
    return one + two + three + four + top.exp().mean() + F.adaptive_avg_pool2d(image, (4, 5)).exp().sum(), at


def convolutions(x, i):
    """Along one axis: of all channels, of each channel alone, of groups."""
    rows, numbers = x.view(4, 6, 20), x.reshape(-1)
    one = F.conv1d(rows, numbers[:72].view(4, 6, 3), numbers[:4], padding=1)
    two = F.conv1d(rows, numbers[9:33].view(6, 1, 4), numbers[:6], padding=3, groups=6)
    three = F.conv1d(rows, numbers[:90].view(9, 2, 5), stride=3, dilation=2, padding=4, groups=3)
    return one.sin().sum() + two.exp().mean() + (three**2).sum(), F.conv1d(rows[0], numbers[:12].view(1, 6, 2))


def penalties(x, i):
    """Squares of gradients by the input, whose gradients are second derivatives."""
    made = torch.logcumsumexp(x, 1).sin().sum() + x.cumprod(1).sum() + torch.cumprod(x, 0).sin().mean()
    [slope] = torch.autograd.grad(made, x, create_graph=True)
    return slope.square().sum() + made


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "fn",
    [sums, sorting, diagonals, writes, margins, roundings, running, remainders, segments, windows, convolutions, penalties],
    ids=lambda f: f.__name__,
)
def test_float64(fn, executor):
    args = random(ROWS, COLUMNS, scale=1.0), whole(COLUMNS, ROWS)
    check_same(fn, autochunk(fn, executor=executor), args, 1e-12)


def chosen(hidden, weight):
    """The largest logits of each row, with a running sum over the sorted values."""
    logits = hidden @ weight.T
    top, index = logits.topk(24, 1)
    kept = torch.zeros_like(logits).scatter(1, index, 1.0)
    return (top.softmax(1).cumsum(1) ** 2).mean() + (logits.log_softmax(1) * kept).mean()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_are_sorted_in_chunks(executor):
    args = random(48, 8, scale=1.0), random(300, 8, scale=1.0)
    chunked = autochunk(chosen, chunks=4, executor=executor)
    check_same(chosen, chunked, args, 1e-12)
    assert "4 chunks" in chunked.explain()
    found = chunked.source()
    assert "topk(" in found[found.index("for ") :] if executor == "python" else "= sort" in found[found.index("loop") :]


def test_a_scan_between_flips_is_one_from_the_end():
    def fn(x):
        return (x.cumsum(1).sin() * x.flip(1).cumsum(1).flip(1).exp()).sum()

    chunked, args = autochunk(fn, executor="native"), [random(ROWS, COLUMNS).requires_grad_()]
    check_same(chunked, fn, args, 1e-10)
    text = chunked.source()
    assert " = flip " not in text and text.count("reverse(1)") == 2


def test_running_log_sums_and_their_gradient_are_two_scans():
    def fn(x):
        return (x.flip(1).logcumsumexp(1).flip(1) - x).mean()

    chunked, args = autochunk(fn, executor="native"), [random(ROWS, COLUMNS).requires_grad_()]
    check_same(chunked, fn, args, 1e-10)
    text = chunked.source()
    assert " = flip " not in text and text.count(" = cumlse ") == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU compares take less time")
def test_the_gradient_of_topk_is_put_where_it_belongs():
    def fn(x):
        return (x.topk(3, 1)[0] ** 2).sum()

    chunked, args = autochunk(fn, executor="native"), [random(ROWS, COLUMNS).requires_grad_()]
    check_same(chunked, fn, args, 1e-10)
    assert " = put " in chunked.source() and " = eq " not in chunked.source()


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, PyTorch leaves open which of equal rows is written")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_last_of_equal_rows_is_written(executor):
    index = torch.tensor([2, 0, 2, 1, 0])

    def write(x, rows):
        made = x.clone()
        made[index] = rows
        return made

    x, rows = random(4, 3), random(5, 3, seed=1)
    expected = x.detach().clone()
    for place, row in zip(index.tolist(), rows.detach()):
        expected[place] = row
    assert torch.equal(autochunk(write, executor=executor)(x.detach(), rows.detach()), expected)


# --- random numbers


def dropped(hidden, weight, target):
    logits = F.dropout(hidden, 0.25) @ weight.T
    return F.cross_entropy(F.dropout(logits, 0.5), target)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_masks_do_not_depend_on_chunks(executor):
    args = random(40, 8, dtype=torch.float32), random(300, 8, dtype=torch.float32), whole(300, 40)
    results = []
    for options in ({}, {"chunks": 4}, {"chunks": 5, "gradients": "backward"}):
        torch.manual_seed(5)
        loss = autochunk(dropped, executor=executor, **options)(*args)
        results.append([loss, *torch.autograd.grad(loss, args[:2])])
    for result in results[1:]:
        for found, expected in zip(result, results[0]):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.manual_seed(6)
    assert autochunk(dropped, executor=executor)(*args) != results[0][0]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("train", [True, False])
def test_dropout_as_one_operation(train, executor):
    """F.dropout is native_dropout on a GPU, and several operations on a CPU: the numbers are the same."""
    x = random(40, 50, dtype=torch.float32, scale=1.0)
    results = []
    for fn in (lambda x: torch.native_dropout(x, 0.25, train)[0], lambda x: F.dropout(x, 0.25, train)):
        torch.manual_seed(5)
        made = autochunk(fn, executor=executor, chunks=4)(x)
        results.append((made, *torch.autograd.grad(made.square().sum(), x)))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
    assert (results[0][0] == 0).any() == train


def masks(x):
    return F.dropout(torch.ones_like(x), 0.3), torch.rand_like(x), torch.randn_like(x), torch.randint(3, 9, x.shape)


def test_masks_are_those_of_the_library():
    """Both executors draw the same numbers; f64 has more random bits than f32."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.zeros(30, 200, dtype=dtype)
        made = []
        for options in ({}, {"chunks": 3}, {"executor": "native"}):
            torch.manual_seed(1)
            made.append(autochunk(masks, **options)(x))
        for one, two, three in zip(*made):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
            torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-6)
        mask, flat, normal, integers = made[0]
        assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.7, dtype=dtype).item()}
        assert abs((mask > 0).double().mean() - 0.7) < 0.02
        assert 0 <= flat.min() and flat.max() < 1 and abs(flat.double().mean() - 0.5) < 0.02
        assert abs(normal.double().mean()) < 0.05 and abs(normal.double().std() - 1) < 0.05
        assert integers.unique().tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_other_distributions(executor):
    def draw(p):
        order, gumbel = torch.randperm(500), F.gumbel_softmax(p.log()[:, None].expand(-1, 3), hard=True)
        waits = torch.empty(400, 100).exponential_(2.0)
        return order, torch.multinomial(p.expand(4000, 5), 2), waits, torch.bernoulli(p.expand(4000, 5)), gumbel

    torch.manual_seed(3)
    p = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05])
    order, drawn, waits, coins, gumbel = autochunk(draw, executor=executor)(p)
    assert torch.equal(order.sort()[0], torch.arange(500)) and not torch.equal(order, torch.arange(500))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    torch.testing.assert_close(drawn[:, 0].bincount() / 4000, p, atol=0.03, rtol=0)
    torch.testing.assert_close(coins.mean(0), p, atol=0.03, rtol=0)
    assert waits.min() > 0 and abs(waits.mean() - 0.5) < 0.02
    assert torch.equal(gumbel.sum(1), torch.ones(5)) and torch.isfinite(gumbel).all()


def test_a_call_draws_what_the_seed_says():
    x = torch.ones(50, 50)
    chunked = autochunk(lambda x: F.dropout(x))
    torch.manual_seed(4)
    one, two = chunked(x), chunked(x)
    assert not torch.equal(one, two)
    torch.manual_seed(4)
    assert torch.equal(chunked(x), one) and torch.equal(chunked(x), two)
    assert torch.equal(autochunk(lambda x: F.dropout(x, training=False))(x), x)


def squares(x):
    return (F.dropout(x, 0.5) * 3).square().sum()


def test_random_numbers_under_transforms():
    """vmap gives each example its numbers, and a gradient has those of its value."""
    x = torch.ones(6, 40, dtype=torch.float64)
    for gradients in ("auto", "backward"):
        chunked = autochunk(squares, gradients=gradients)
        gradient, value = torch.func.grad_and_value(chunked)(x)
        assert set(gradient.unique().tolist()) == {0.0, 72.0} and gradient.sum() == 2 * value
        each = torch.func.vmap(torch.func.grad(chunked), randomness="different")(x)
        assert set(each.unique().tolist()) == {0.0, 72.0} and not torch.equal(each[0], each[1])
        same = torch.func.vmap(torch.func.grad(chunked), randomness="same")(x)
        assert torch.equal(same, same[:1].expand_as(same))
        with pytest.raises(RuntimeError, match="randomness"):
            torch.func.vmap(chunked)(x)


# --- refusals


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.exp()).sin(), x, use_reentrant=False).sum()


def test_maxima_of_bools():
    def fn(x):
        mask = x > 0.5
        top, place = mask.max(1)
        least = mask.min(0).values
        return top, place, least, mask.amax(0), mask.amin((0, 1)), mask.to(torch.int32).argmax(1)

    x = random(5, 4)
    for found, wanted in zip(autochunk(fn)(x), fn(x), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda x: torch.poisson(x), "poisson.*expected those of rand"),
        (lambda x: torch.rand(3, generator=torch.Generator(DEVICE)) * x[0, 0], "generator of its own"),
        (checkpointed, "leave the checkpoint out"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_refusals_name_what_would_do(fn, why):
    with pytest.raises(Unsupported, match=why):
        autochunk(fn)(random(9, 18))
