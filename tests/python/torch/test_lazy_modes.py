"""Lazy heads under modes of PyTorch, with the loss and gradients of real logits. There are no logits where PyTorch
itself computes nothing else, and real logits where a tracer or a transform takes over."""

import contextlib
import io

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyHeadWarning, LazyLogits, lazy_head
from logitless.torch._lazy import _warnings, lazy_linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Y = torch.arange(6) * 5 % 40
LOSSES = {
    "view": lambda z: F.cross_entropy(z.view(-1, 40), Y),
    "shift": lambda z: F.cross_entropy(z.double()[..., :-1, :].contiguous().view(-1, 40), Y[:4]),
    "flatten": lambda z: F.cross_entropy(z.to(torch.float64).flatten(0, 1), Y),
    "softcap": lambda z: F.cross_entropy((torch.tanh(z / 3.0) * 3.0).transpose(1, 2), Y.view(2, 3)),
    "gather": lambda z: -torch.log_softmax(z, -1).gather(-1, Y.view(2, 3, 1)).mean(),
    "logsumexp": lambda z: z[:, 1:].reshape(-1, 40)[Y[:4] > 5].logsumexp(-1).sum(),
    "smoothing": lambda z: -torch.log_softmax(z.float(), -1).sum(-1).mean(),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, -1).view(-1, 40), Y),
    "rows": lambda z: sum(F.cross_entropy(a.squeeze(0), Y[:3]) for a in z.chunk(2)),
    "bias": lambda z: F.cross_entropy((z + torch.arange(40.0, dtype=torch.float32, device=z.device) / 9).view(-1, 40), Y),
}


class Dispatch(TorchDispatchMode):
    """Fails if a dispatch mode sees the meta tensor behind lazy logits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        assert not (isinstance(made, torch.Tensor) and made.is_meta), func
        return made


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def pack(t):
    assert type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta
    return t.detach().clone().numpy(force=True), t.device


@contextlib.contextmanager
def setting(put, value, before):
    put(value)
    try:
        yield
    finally:
        put(before)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast(oracle.DEVICE, torch.bfloat16),
    "autocast off": lambda: torch.autocast(oracle.DEVICE, enabled=False),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda p: torch.from_numpy(p[0]).to(p[1])),
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none are expected"),
    "dispatch": Dispatch,
    "functions": Functions,
    "device": lambda: torch.device(oracle.DEVICE),
    "meta": lambda: torch.device("meta"),
    "dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "forward_ad": torch.autograd.forward_ad.dual_level,
}


def leaves():
    g = oracle.generator(0)
    return torch.randn(2, 3, 8, generator=g).requires_grad_(), torch.randn(40, 8, generator=g).requires_grad_()


@pytest.fixture
def made(monkeypatch):
    """The shapes of logits, or of gradients of logits, that have been computed."""
    shapes = []
    monkeypatch.setattr(_warnings, "warn_made", lambda t, *_, **__: shapes.append(tuple(t.shape)))
    return shapes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes(mode, made):
    if oracle.DEVICE != "cpu" and mode == "deterministic":
        pytest.skip("PyTorch's own cross entropy raises")
    close = 2e-2 if mode == "autocast" else 1e-5
    for name, loss in LOSSES.items():
        found = []
        for linear in (lazy_linear, F.linear):
            hidden, weight = leaves()
            with MODES[mode]():
                value = loss(linear(hidden, weight))
                if value.requires_grad:
                    value.backward()
            found.append((value.detach(), hidden.grad, weight.grad))
        for a, b in zip(*found):
            assert (a is None) == (b is None), name
            assert a is None or a.dtype == b.dtype and (a.double() - b.double()).norm() <= close * b.double().norm(), name
        assert not made, name


def test_an_edit_of_hidden_states_in_inference_mode():
    """An edit in inference mode changes no version."""
    with torch.inference_mode():
        hidden, weight = (t.detach() * 1 for t in leaves())
        x, real = lazy_linear(hidden, weight), F.linear(hidden, weight)
        hidden.mul_(2)
        assert torch.equal(x + 0, real)


@pytest.mark.parametrize("loss", ["gather", "nll"])
def test_an_edit_after_a_loss_that_saves_its_input(loss):
    """PyTorch raises an error, except where hooks have stored the saved tensors."""
    for hooked in (False, True):
        found = []
        for linear in (lazy_linear, F.linear):
            hidden, weight = leaves()
            with MODES["hooks"]() if hooked else contextlib.nullcontext():
                z = F.log_softmax(linear(hidden, weight), -1)
                value = F.nll_loss(z.view(-1, 40), Y) if loss == "nll" else z.gather(-1, Y.view(2, 3, 1)).sum()
                z.mul_(2)
            if hooked:
                value.backward()
                found.append(weight.grad)
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    value.backward()
        assert not hooked or torch.allclose(*found, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_detection_finds_a_nan(made):
    hidden, weight = leaves()
    loss = F.cross_entropy(lazy_linear(hidden, weight).double().view(-1, 40), Y)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
        (loss * float("nan")).backward()
    assert not made
    with torch.autograd.detect_anomaly():
        z = lazy_linear(hidden, weight)
        seen = []
        z.register_hook(lambda g: seen.append((g.isnan(), torch.isnan(g))))  # the caller reads each number
        F.cross_entropy(z.view(-1, 40), Y).backward()
    assert all(a.shape == z.shape and not a.any() for a in seen[0]) and made


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, made):
    for name, loss in LOSSES.items():
        for whole in (True, False):
            found = []
            for linear in (lazy_linear, F.linear):
                hidden, weight = leaves()
                z = lambda h, w: linear(h.tanh(), w)  # noqa: E731
                if whole:
                    value = checkpoint(lambda h, w: loss(z(h, w)), hidden, weight, use_reentrant=reentrant)
                else:
                    value = loss(checkpoint(z, hidden, weight, use_reentrant=reentrant))
                value.backward()
                found.append((value.detach(), hidden.grad, weight.grad))
            assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(*found)), name
            # A reentrant checkpoint of the head alone runs it without gradients, so its logits do not know their head.
            assert not made or (reentrant and not whole), name
            made.clear()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 40)

    def forward(self, x):
        return F.cross_entropy(self.lm_head(self.body(x).tanh()), torch.arange(6))


TRACERS = {
    "make_fx": lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x),
    "make_fx, fake": lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(
        model, tracing_mode="fake", _allow_non_fake_inputs=True
    )(x),
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
    "jit.script": lambda model, x: lambda y: F.cross_entropy(torch.jit.script(model.lm_head)(model.body(y).tanh()), torch.arange(6)),
    "replica": lambda model, x: torch.nn.DataParallel(model, device_ids=[0] if oracle.DEVICE == "cuda" else None),
    "vmap": lambda model, x: lambda y: torch.vmap(model)(y[None])[0],
    "tangent": lambda model, x: lambda y: dual(model, y),
}


def dual(model, y):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(model(torch.autograd.forward_ad.make_dual(y, y.cos()))).tangent


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore")
def test_what_traces_or_transforms_a_model_with_a_lazy_head(tracer):
    g = oracle.generator(1)
    first, then = torch.randn(6, 8, generator=g), torch.randn(6, 8, generator=g)
    real, lazy = Model(), lazy_head(Model())
    wanted = dual(real, then) if tracer == "tangent" else real(then)
    assert torch.allclose(TRACERS[tracer](lazy, first)(then), wanted, rtol=1e-5)
    assert isinstance(lazy.lm_head(then), LazyLogits)


def test_gradients_of_a_batch_of_upstream_gradients():
    for loss in (lambda z: F.cross_entropy(z, Y, reduction="none"), lambda z: z.double().logsumexp(-1), lambda z: (z * 2).sum(-1)):
        found = []
        for linear in (lazy_linear, F.linear):
            hidden, weight = leaves()
            rows = loss(linear(hidden, weight).view(-1, 40))
            found.append(torch.autograd.grad(rows, (hidden, weight), torch.eye(6, dtype=rows.dtype), is_grads_batched=True))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found))


def test_data_parallel_replicas_are_lazy(made):
    model = lazy_head(Model())
    replica = model.lm_head._replicate_for_data_parallel()
    replica.weight, replica.bias = (t * 1 for t in model.lm_head.parameters())  # no parameters, like broadcast
    x = torch.randn(6, 8)
    F.cross_entropy(replica(x), torch.arange(6)).backward()
    head = Model().lm_head
    F.cross_entropy(head(x), torch.arange(6)).backward()
    assert torch.allclose(model.lm_head.weight.grad, head.weight.grad, atol=1e-6) and not made


def big():
    g = oracle.generator(2)
    return torch.randn(700, 8, generator=g).requires_grad_(), torch.randn(6200, 8, generator=g).requires_grad_()


READERS = {
    "argmax": lambda z: z.argmax(-1),
    "softmax": lambda z: z.softmax(-1),
    "tolist": lambda z: z.tolist(),
    "numpy": lambda z: z.detach().numpy(force=True),
    "mul": lambda z: z.mul_(2),
    "kl_div": lambda z: F.kl_div(z, torch.full((700, 6200), 1.0 / 6200), reduction="sum"),
    "add": lambda z: z + 1,
    "getitem": lambda z: z[:, torch.arange(6200) > 3],
    "reduce_ex": lambda z: torch.save(z.detach(), io.BytesIO()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_warning_names_what_reads_the_logits_and_where(name):
    with pytest.warns(LazyHeadWarning, match=rf"computed after all, read by {name} at {__file__}:\d+$") as seen:
        READERS[name](lazy_linear(*big()))
    assert [w.filename for w in seen] == [__file__]


def test_a_warning_of_a_gradient_and_of_real_logits():
    hidden, weight = big()
    target = torch.zeros(700, dtype=torch.int64)
    z = lazy_linear(hidden, weight)
    z.register_hook(lambda g: print(g.norm()))
    with pytest.warns(LazyHeadWarning, match=r"gradients of logits \[700, 6200\] \(16 MiB\) are computed after all, read by "):
        F.cross_entropy(z, target).backward()
    with pytest.warns(LazyHeadWarning, match=r"logits .* under a transform of torch.func$"):
        torch.func.grad(lambda w: F.cross_entropy(lazy_linear(hidden, w), target))(weight)
    with pytest.warns(LazyHeadWarning, match=r"logits .* of hidden states .*Tensor and a weight .*Odd$"):
        lazy_linear(hidden, weight.detach().as_subclass(type("Odd", (torch.Tensor,), {})))
    transformers = pytest.importorskip("transformers")
    library = transformers.trainer_pt_utils  # the line in a library, and the line of its caller
    with pytest.warns(LazyHeadWarning, match=rf"read by \w+ at .*trainer_pt_utils.py:\d+, called from {__file__}:\d+$") as seen:
        library.numpy_pad_and_concatenate(*[library.nested_numpify(lazy_linear(*big()).detach())] * 2)
    assert [w.filename for w in seen] == [__file__]
