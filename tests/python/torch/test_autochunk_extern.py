"""Operations without a form in a tensor program: PyTorch runs them, and the rest is chunked around them."""

import re

import pytest
import torch
import torch.nn.functional as F
from generated import autochunk
from logitless.torch._peak import peak_of
from losses_battery.step import outputs_and_gradients, plan_peaks
from test_autochunk import DEVICE

from logitless.torch._autochunk import Unsupported

ROWS, DIM, VOCAB = 96, 8, 512


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device="cpu", generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def whole(below, *shape, seed=0):
    return torch.randint(0, below, shape, device="cpu", generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check_same(fn, args, budget, tolerance=1e-10):
    """Checks numbers and gradients against PyTorch. Returns the chunked function, which has run."""
    args = [a.requires_grad_() if a.is_floating_point() else a for a in args]
    chunked = autochunk(fn, memory_budget=budget)
    for found, wanted in zip(outputs_and_gradients(chunked, args), outputs_and_gradients(fn, args), strict=True):
        for a, e in zip(found, wanted, strict=True):
            if e is None:
                assert a is None
            else:
                assert a.dtype == e.dtype and (a - e).abs().max() <= tolerance * e.abs().max().clamp(min=1e-3)
    return chunked


def head_of(hidden):
    """Returns a loss over hidden(h)."""

    def loss(h, weight, target):
        return F.cross_entropy(hidden(h) @ weight.T, target)

    return loss


def head_arguments():
    return random(ROWS, DIM), random(VOCAB, DIM, seed=1), whole(VOCAB, ROWS)


def runs(chunked, name):
    """Returns how the operation runs, by explain()."""
    return re.findall(rf"aten\.{name}\S* runs as PyTorch has it, (.*)", chunked.explain())


HIDDEN = {
    "cumprod": lambda h: h.sigmoid().cumprod(-1),
    "prod": lambda h: h * h.tanh().prod(-1, keepdim=True),
    "cummax": lambda h: h.cummax(-1).values,
    "i0": lambda h: h * torch.i0(h).detach(),
    "mode": lambda h: h - h.round().mode(-1, keepdim=True).values,
    "_linalg_det": lambda h: h * torch.linalg.det(h.view(-1, DIM, DIM)).mean(),
    "convolution": lambda h: F.conv1d(h.T[None], h[:DIM, :3, None].expand(-1, -1, 3).repeat(1, 3, 1)[:, :DIM], padding=1)[0].T,
    "unfold": lambda h: F.pad(h, (0, 1)).unfold(1, 2, 1).sum(-1),
    "frexp": lambda h: h * torch.frexp(h.detach())[0],
    "scatter": lambda h: h.scatter(1, torch.arange(ROWS * 24).view(ROWS, 24) % DIM, h.detach().repeat(1, 3)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_head_is_chunked_around_it(name):
    budget = ROWS * VOCAB * 8 // 4
    chunked = check_same(head_of(HIDDEN[name]), head_arguments(), budget)
    assert runs(chunked, name), chunked.explain()
    assert chunked.last.forward.after <= budget, chunked.explain()


def test_the_source_is_the_very_call():
    chunked = autochunk(head_of(lambda h: torch.cummax(h, dim=-1)[0]))
    chunked(*head_arguments())
    source = chunked.source()
    assert re.search(r"(\w+), _ = torch\.ops\.aten\.cummax\.default\(h, -1\)", source), source


def test_several_results_are_of_one_call():
    def largest_after_where(h, weight, target):
        values, places = h.cummax(-1)
        return F.cross_entropy(values @ weight.T, target) + places.to(h.dtype).mean()

    chunked = check_same(largest_after_where, head_arguments(), 100_000)
    assert chunked.source().count("aten.cummax") == 1, chunked.source()


# --- convolutions


def picture(images, kernel, weight, target, **options):
    states = F.conv2d(images, kernel, **options).relu()
    return F.cross_entropy(states.permute(0, 2, 3, 1).flatten(0, 2) @ weight.T, target.flatten())


def pictures(count=8, channels=3, size=6, kernel=3):
    kernels = random(DIM, channels, kernel, kernel, seed=1) / 3
    return random(count, channels, size, size), kernels, random(VOCAB, DIM, seed=2), whole(VOCAB, count, size, size)


def test_a_convolution_is_cut_along_images():
    """Gradients are cut, too; the weight's gradient is a sum over images."""

    def loss(images, kernel):
        return F.conv2d(images, kernel, padding=1).exp().sum(1).log().mean()

    args = random(16, 3, 6, 6), random(64, 3, 3, 3, seed=1) / 9
    chunked = check_same(loss, args, 16 * 64 * 36 * 8 // 4)
    assert runs(chunked, "convolution.default") == ["chunk by chunk, along dimension 0"], chunked.explain()
    how = ["chunk by chunk, a sum of parts", "chunk by chunk, along dimension 0"]
    assert sorted(runs(chunked, "convolution_backward")) == how, chunked.explain()
    [call] = re.findall(r".*aten\.convolution_backward.*", chunked.source())
    assert "[True, True, False]" in call, call


def test_a_head_after_a_convolution():
    args = pictures()
    budget = args[3].numel() * VOCAB * 8 // 4
    chunked = check_same(lambda *given: picture(*given, padding=1), args, budget)
    assert chunked.last.forward.after <= budget, chunked.explain()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel, stride", [((1, 1), 1), ((2, 3), (2, 3)), ((1, 3), (1, 3))])
def test_a_convolution_of_patches_is_a_product(kernel, stride, bias):
    """Its gradients are matrix products, too; pixels left over at the borders have gradient 0."""

    def loss(images, weight, offset, target):
        return F.cross_entropy(F.conv2d(images, weight, offset if bias else None, stride=stride), target)

    shape = tuple(s // k for s, k in zip((7, 6), kernel))
    args = random(4, 3, 7, 6), random(64, 3, *kernel, seed=1), random(64, seed=2), whole(64, 4, *shape)
    big = 4 * 64 * shape[0] * shape[1] * 8
    chunked = check_same(loss, args, big // 2)
    assert "convolution" not in re.sub(r"%?\bconvolution\w*", "", chunked.source().replace("aten.", "aten_")), chunked.source()
    assert not runs(chunked, "convolution"), chunked.explain()


def test_other_convolutions_stay():
    args = pictures()
    for options in ({"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"padding": 1}):
        made = F.conv2d(args[0], args[1], **options)
        given = *args[:3], whole(VOCAB, *made.shape[:1], *made.shape[2:])
        chunked = check_same(lambda *given: picture(*given, **options), given, 50_000)
        assert runs(chunked, "convolution.default"), chunked.explain()


# --- CTC


FRAMES, SEQUENCES = 12, 8


def ctc(hidden, weight, labels, frames, lengths, **options):
    return F.ctc_loss((hidden @ weight.T).log_softmax(-1), labels, frames, lengths, **options)


def ctc_arguments():
    lengths = 1 + whole(3, SEQUENCES, seed=3)
    frames = torch.full((SEQUENCES,), FRAMES) - whole(3, SEQUENCES, seed=4)
    hidden, weight = random(FRAMES, SEQUENCES, DIM), random(VOCAB, DIM, seed=1)
    return hidden, weight, 1 + whole(VOCAB - 1, SEQUENCES, 3), frames, lengths


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum", "blank": 3}, {"reduction": "none", "zero_infinity": True}], ids=str
)
def test_ctc_is_cut_along_sequences(options):
    budget = FRAMES * SEQUENCES * VOCAB * 8 // 2
    chunked = check_same(lambda *given: ctc(*given, **options), ctc_arguments(), budget)
    assert runs(chunked, "_ctc_loss_backward") == ["chunk by chunk, along dimension 1"], chunked.explain()
    assert max(p.after for p in (chunked.last.forward, chunked.last.backward) if p) <= budget, chunked.explain()


def test_ctc_of_labels_in_a_row_and_of_numbers():
    hidden, weight, labels, frames, lengths = ctc_arguments()
    row = torch.cat([labels[i, :n] for i, n in enumerate(lengths.tolist())])
    chunked = check_same(ctc, (hidden, weight, row, frames, lengths), 10**9)
    assert runs(chunked, "_ctc_loss") == ["whole", "whole"], chunked.explain()
    numbers = tuple(frames.tolist()), tuple(lengths.tolist())
    check_same(lambda *given: ctc(*given, *numbers), (hidden, weight, labels), 10**9)


def test_ctc_that_cannot_align_is_infinite():
    hidden, weight, labels, frames, lengths = ctc_arguments()
    few = frames.clone()
    few[:2] = lengths[:2] - 1
    for zero in (False, True):
        fn = lambda *given: ctc(*given, reduction="none", zero_infinity=zero)  # noqa: E731
        expected, found = (f(hidden, weight, labels, few, lengths) for f in (fn, autochunk(fn)))
        assert torch.equal(expected.isinf(), found.isinf()) and torch.allclose(expected, found)
        assert expected.isinf().any() != zero


# --- others


def test_grouped_products_of_experts():
    def loss(h, experts, weight, target, ends):
        states = torch._grouped_mm(h, experts, ends).relu()
        return F.cross_entropy((states @ weight.T).float(), target)

    args = [random(64, 16), random(4, 16, 16, seed=1) / 4, random(VOCAB, 16, seed=2)]
    args = [a.to(torch.bfloat16) for a in args] + [whole(VOCAB, 64), torch.tensor([10, 30, 50, 64], dtype=torch.int32)]
    chunked = check_same(loss, args, 64 * VOCAB, 2**-6)
    assert "torch.ops.aten._grouped_mm.default(" in chunked.source()


@pytest.mark.skipif(DEVICE != "cpu", reason="allocations of the CPU")
def test_the_report_is_true():
    """The plan's memory is within 10 % of the bytes that PyTorch's allocator gives out."""
    f32 = [a.float() if a.is_floating_point() else a for a in pictures(size=16)]
    hidden, weight, *rest = ctc_arguments()
    cases = [
        (head_of(HIDDEN["cumprod"]), [a.float() if a.is_floating_point() else a for a in head_arguments()], 40_000),
        (lambda *given: picture(*given, padding=1), f32, 800_000),
        (lambda *given: picture(*given, padding=1), f32, None),
        (lambda *given: picture(*given, padding=1), pictures(), None),
        (ctc, [hidden.float(), weight.float(), *rest], 60_000),
    ]
    for fn, args, budget in cases:
        args = [a.requires_grad_() if a.is_floating_point() else a for a in args]
        plan = autochunk(fn, memory_budget=budget)._planned(tuple(args), {})
        for compiled, took in plan_peaks(plan, args, lambda run: peak_of(run)[0]):
            assert abs(compiled.after - took) <= 0.1 * took, f"{plan.describe()}: takes {took}"


def test_without_gradients_and_in_another_dtype():
    chunked = autochunk(lambda x: x.cumprod(-1).sum(), memory_budget=1000)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = random(7, 9).mul(2).to(dtype)
        assert torch.equal(chunked(x), x.cumprod(-1).sum())


@pytest.mark.parametrize(
    "fn, named",
    [
        (head_of(HIDDEN["i0"]), r"aten\.i0.*executor='python' takes it"),
        (lambda h, w, t: F.conv2d(h[None, None], w[None, None, :3, :3], padding=1).sum(),
         r"aten\.convolution.*patches that overlap.*executor='python' takes it"),
        (lambda h, w, t: F.conv1d(h[:, None], w.view(-1)[None, None, :33], padding=16).sum(), "33 elements a window"),
        (lambda h, w, t: ctc(h.view(12, 8, 8), w, t.view(8, 12)[:, :2], t[:8] * 0 + 12, t[:8] * 0 + 2),
         r"ctc_loss.*executor='python' takes it"),
    ],
    ids=["i0", "convolution", "long convolution", "ctc"],
)
def test_the_library_refuses_it_by_name(fn, named):
    args = [a.float() if a.is_floating_point() else a for a in head_arguments()]
    with pytest.raises(Unsupported, match=named):
        autochunk(fn, executor="native")(*args)


def test_an_operation_whose_shapes_are_not_known():
    with torch.library._scoped_library("logitless_test", "FRAGMENT") as library:
        library.define("turned(Tensor x) -> Tensor")
        library.impl("turned", lambda x: x.flip(0), DEVICE.upper())
        with pytest.raises(Unsupported, match=r"logitless_test\.turned\.default has no fake kernel"):
            autochunk(lambda x: torch.ops.logitless_test.turned(x).sum())(random(4, 6))
        library.impl("turned", torch.empty_like, "Meta")
        with pytest.raises(Unsupported, match=r"logitless_test\.turned\.default\(.*expected an ATen operation"):
            autochunk(lambda x: torch.ops.logitless_test.turned(x).sum())(random(4, 6))


def norm(x, mean, variance):
    return F.batch_norm(x, mean, variance, training=True)


@pytest.mark.parametrize(
    "fn, named",
    [
        (lambda x: torch.fft.rfft(x).abs(), r"aten\._fft_r2c\.default\(float64\[4, 6\].*dtype torch\.complex128"),
        (lambda x: x.as_strided((3,), (2,)), r"aten\.as_strided.*lie in memory"),
        (lambda x: norm(x, x[0].detach(), x[1].detach()), r"aten\.copy_.*writes into an input"),
        (lambda x: torch.binomial(x.abs().floor(), x.sigmoid()), r"aten\.binomial.*random numbers"),
    ],
    ids=["complex", "strides", "running_statistics", "random"],
)
def test_what_cannot_run_as_it_is(fn, named):
    with pytest.raises(Unsupported, match=named):
        autochunk(lambda x: fn(x).sum())(random(4, 6))
