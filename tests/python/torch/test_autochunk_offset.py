"""Logits with a large common offset, which losses and gradients do not see: by every executor they are what the logits
without the offset give, as PyTorch's own are."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F

from logitless.torch import autochunk
from logitless.torch._compile import register

register()
DEVICE = torch.get_default_device().type  # conftest.py
ROWS, DIM = 70, 24
MOST = 1e-6, 1e-5, 1e-5, 1e-5  # relative: of the loss, and of each gradient in the 2-norm


def cross_entropy(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t)


def spelled_out(h, w, b, t):
    z = F.linear(h, w, b)
    return (z.logsumexp(-1) - z.gather(1, t[:, None])[:, 0]).mean()


def negated(h, w, b, t):
    z = F.linear(h, w, b)
    return (-z.gather(1, t[:, None]).squeeze(1) + z.logsumexp(-1)).mean()


def log_probs(h, w, b, t):
    return -F.linear(h, w, b).log_softmax(-1).gather(1, t[:, None]).mean()


def entropy(h, w, b, t):
    z = F.linear(h, w, b).log_softmax(-1)
    return -(z.exp() * z).sum(-1).mean() + F.nll_loss(z, t)


def smoothed(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, label_smoothing=0.1)


def problem(vocab, offset, dtype=torch.float32):
    """Whole sixteenths: fp32 holds the logits exactly, whatever the offset here."""
    generator = torch.Generator("cpu").manual_seed(3)

    def whole(*shape):
        return (4 * torch.randn(shape, generator=generator, device="cpu")).round() / 4

    h, w, b = whole(ROWS, DIM), whole(vocab, DIM) / 2, whole(vocab) + offset
    t = torch.randint(0, vocab, (ROWS,), generator=generator, device="cpu")
    return [x.to(DEVICE, dtype).requires_grad_() for x in (h, w, b)] + [t.to(DEVICE)]


def run(fn, args):
    value = fn(*args)
    return [value.detach(), *torch.autograd.grad(value, args[:3])]


EXECUTORS = {
    "auto": autochunk,
    "native": lambda fn: autochunk(fn, executor="native"),
    "chunks": lambda fn: autochunk(fn, executor="native", chunks=3),
    "python": lambda fn: autochunk(fn, executor="python"),
    "compile": lambda fn: torch.compile(
        lambda *a: fn(*a), backend="logitless", options={"memory_budget": "600KiB", "min_bytes": "64KiB", "inner": "aot_eager"}
    ),
}
FORMS = (cross_entropy, spelled_out, negated, log_probs, entropy, smoothed)


def cases():
    for executor in EXECUTORS:
        for fn in FORMS:
            # Generated code has one operation for a softmax, not for log-probabilities that several things read.
            if executor in ("python", "compile") and fn in (entropy, smoothed):
                continue
            # Below and above what the head engine takes; what is small stays PyTorch's under torch.compile.
            for vocab in (300, 4000) if executor != "compile" else (4000,):
                yield pytest.param(EXECUTORS[executor], fn, vocab, id=f"{executor}-{fn.__name__}-{vocab}")


@pytest.mark.parametrize("executor, fn, vocab", list(cases()))
def test_losses_and_gradients(executor, fn, vocab):
    chunked = executor(fn)
    wanted = run(fn, problem(vocab, 0.0, torch.float64))
    for offset in (0.0, 1e4, 1e5):
        for found, exact, most in zip(run(chunked, problem(vocab, offset)), wanted, MOST, strict=True):
            error = (found.double() - exact).norm() / exact.norm()
            assert error < most, (offset, error)
