"""Lazy logits when a tensor behind them has changed, when gradients are off, and when gradients are watched."""

import copy
import math
import pickle

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyLogits
from logitless.torch._lazy import _copies, _losses, _warnings, lazy_linear

TARGET = torch.arange(6) * 5 % 40


@pytest.fixture
def made(monkeypatch):
    """The shapes of the logits that have been computed."""
    shapes = []
    monkeypatch.setattr(_warnings, "warn_made", lambda t, *_: shapes.append(tuple(t.shape)))
    return shapes


def head(bias=False, dtype=torch.float32):
    g = oracle.generator(0)
    tensors = [torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in ((6, 8), (40, 8), (40,))]
    return tensors if bias else [*tensors[:2], None]


@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("edit", ["in place", "sgd", "data", "load"])
def test_changed_since_the_call(which, edit):
    tensors = dict(zip(("hidden", "weight", "bias"), head(bias=True)))
    x = lazy_linear(*tensors.values())
    kept = x[1:]
    made_before = lazy_linear(*tensors.values())
    real = F.linear(*tensors.values())
    assert torch.equal(made_before + 0, real)
    t = tensors[which]
    t.grad = torch.ones_like(t)
    with torch.no_grad():
        if edit == "in place":
            t.mul_(2)
        elif edit == "load":
            t.copy_(torch.ones_like(t))
        elif edit == "sgd":
            torch.optim.SGD([t], lr=0.1).step()
        else:  # like optimizers whose edits change no version
            class Silent(torch.optim.Optimizer):
                def step(self, closure=None):
                    for p in self.param_groups[0]["params"]:
                        p.data.mul_(2)

            if which == "hidden":
                pytest.skip("no optimizer steps hidden states")
            Silent([t], {}).step()
    for read in (lambda: x.sum(), lambda: x.argmax(-1), lambda: kept[0] * 1 + 0, lambda: F.cross_entropy(x, TARGET),
                 lambda: F.cross_entropy(x.float(), TARGET), lambda: x.mul_(2), lambda: x.tolist()):
        with pytest.raises(RuntimeError, match=f"LazyLogits: {which} was modified in place since the head was called"):
            read()
    assert x.shape == real.shape and x.stride() == real.stride()  # attributes that need no numbers still work
    assert torch.equal(made_before.detach(), real.detach())  # logits that exist keep their numbers


def test_a_tensor_put_in_the_place_of_the_weight_changes_nothing():
    hidden, weight, _ = head()
    linear = torch.nn.Linear(8, 40, bias=False)
    linear.weight = torch.nn.Parameter(weight.detach().clone())
    x = lazy_linear(hidden, linear.weight)
    linear.weight.data = torch.zeros(40, 8)
    assert torch.equal(x.detach() + 0, F.linear(hidden, weight).detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, made):
    hidden, weight, _ = head()
    with mode():
        x, real = lazy_linear(hidden, weight), F.linear(hidden, weight)
    for z in (x, x[1:], x.float().view(-1, 40)):
        assert not z.requires_grad and z.is_leaf and z.grad_fn is None
    assert x.is_inference() == real.is_inference()
    loss = F.cross_entropy(x, TARGET)
    assert not loss.requires_grad and torch.allclose(loss, F.cross_entropy(real, TARGET)) and not made
    assert not (x * 2).sum().requires_grad and weight.grad is None and hidden.grad is None


def test_a_teacher_gets_no_gradients():
    hidden, weight, _ = head()
    student = torch.randn(6, 40, requires_grad=True)
    with torch.no_grad():
        teacher = lazy_linear(hidden, weight)
    F.kl_div(F.log_softmax(student, -1), F.log_softmax(teacher, -1), reduction="batchmean", log_target=True).backward()
    assert student.grad is not None and weight.grad is None and hidden.grad is None


def test_frozen_sides(made):
    for frozen in (0, 1):
        tensors = head()
        tensors[frozen].requires_grad_(False)
        grads = []
        for linear in (lazy_linear, F.linear):
            F.cross_entropy(linear(*tensors), TARGET).backward()
            grads.append(tensors[1 - frozen].grad)
            tensors[1 - frozen].grad = None
        assert torch.allclose(*grads, atol=1e-6) and not made


def test_requires_grad_on_logits_of_no_grad():
    hidden, weight, _ = head()
    found = []
    for linear in (lazy_linear, F.linear):
        with torch.no_grad():
            z = linear(hidden, weight)
        z.requires_grad_()
        F.cross_entropy(z, TARGET).backward()
        F.cross_entropy(z * 2, TARGET).backward()
        found.append(z.grad)
    assert torch.allclose(*found, atol=1e-6) and weight.grad is None


def test_cheap_questions(made):
    hidden, weight, bias = head(bias=True)
    for h in (hidden, hidden.reshape(2, 3, 8), hidden[0]):
        x, real = lazy_linear(h, weight, bias), F.linear(h, weight, bias)
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_leaf", "requires_grad", "nbytes", "itemsize",
                     "_version", "is_sparse", "is_quantized"):
            assert getattr(x, name) == getattr(real, name), name
        for name in ("size", "dim", "numel", "stride", "storage_offset", "is_contiguous", "element_size", "get_device", "__len__",
                     "is_floating_point", "is_complex", "is_inference", "is_pinned", "type"):
            assert getattr(x, name)() == getattr(real, name)(), name
        assert (x._base is None) == (real._base is None) and (x.grad_fn is None) == (real.grad_fn is None)
        assert torch.is_tensor(x) and torch.is_floating_point(x) and isinstance(x, torch.Tensor) and "LazyLogits" in repr(x)
        assert x[..., 1:].shape == real[..., 1:].shape and torch.broadcast_shapes(x.shape, (1,)) == real.shape
    assert not made


def test_views_share_the_one_real_tensor():
    hidden, weight, _ = head()
    x = lazy_linear(hidden, weight)
    row, column, flat = x[2], x[:, 3], x.view(-1)
    copied = x.float().clone()
    with torch.no_grad():
        row.fill_(7.0)
    assert x[2].eq(7).all() and column[2] == 7 and flat[80:120].eq(7).all() and not copied[2].eq(7).any()
    assert row.data_ptr() == x.data_ptr() + 2 * 40 * 4 == x.detach()[2].data_ptr()
    assert column._base is x and x._version == 1 == flat._version
    assert x.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    if oracle.DEVICE == "cpu":
        numbers = x.detach().numpy()
        numbers[0, 0] = -1.0
        assert flat[0] == -1.0
        with pytest.raises(RuntimeError, match="requires grad"):
            x.numpy()


def test_data():
    hidden, weight, _ = head()
    x = lazy_linear(hidden, weight)
    loss = F.cross_entropy(x, TARGET)
    assert not x.data.requires_grad and x.data.shape == x.shape
    x.data.fill_(0.5)
    x.data[1] = 2.0
    assert x[0].eq(0.5).all() and x[1].eq(2.0).all() and x._version == 0 and x.requires_grad
    loss.backward()
    assert weight.grad is not None


def test_an_edit_after_a_loss_and_before_its_backward():
    found = []
    for linear in (lazy_linear, F.linear):
        hidden, weight, _ = head()
        z = linear(hidden, weight)
        loss = F.cross_entropy(z, TARGET)
        z.mul_(3.0)
        (loss + F.cross_entropy(z[1:], TARGET[1:])).backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-5)


def test_gradients_that_are_watched(made):
    found = []
    for linear in (lazy_linear, F.linear):
        hidden, weight, _ = head()
        z = linear(hidden, weight)
        z.retain_grad()
        seen = []
        z.register_hook(lambda g: seen.append(g.clone()))
        rows = z[1:]
        rows.register_hook(lambda g: g * 2)
        F.cross_entropy(rows, TARGET[1:]).backward()
        with torch.no_grad():
            weight.mul_(2)  # the retained gradient exists already
        found.append((z.grad, seen[0], hidden.grad, weight.grad))
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-6)
    hidden, weight, _ = head()
    z = lazy_linear(hidden, weight)
    made.clear()
    z.register_hook(lambda g: None)  # like the hooks of FSDP and DDP, which read no number
    F.cross_entropy(z, TARGET).backward()
    assert not made and hidden.grad is not None


def test_gradients_of_and_by_logits():
    found = []
    for linear in (lazy_linear, F.linear):
        hidden, weight, _ = head(dtype=torch.float64)
        z = linear(hidden, weight)
        loss = F.cross_entropy(z.view(2, 3, 40).transpose(1, 2), TARGET.view(2, 3))
        (g,) = torch.autograd.grad(loss, z, retain_graph=True)
        assert type(g) is torch.Tensor
        z.backward(g, retain_graph=True)
        (twice,) = torch.autograd.grad(loss, hidden, create_graph=True)
        twice.square().sum().backward()
        found.append((g, hidden.grad, weight.grad))
    for a, b in zip(*found):
        assert torch.allclose(a, b, atol=1e-10)


def test_a_second_backward():
    hidden, weight, _ = head()
    loss = F.cross_entropy(lazy_linear(hidden, weight), TARGET)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_weight_changed_before_the_backward():
    hidden, weight, _ = head()
    loss = F.cross_entropy(lazy_linear(hidden, weight), TARGET)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_through_functions_of_others(made):
    class Double(torch.autograd.Function):  # a loss from logits, with a custom backward
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z.square().sum()

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    class Reversal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.view_as(z)

        @staticmethod
        def backward(ctx, g):
            return -g

    for function in (Double.apply, lambda z: F.cross_entropy(Reversal.apply(z), TARGET)):
        found = []
        for linear in (lazy_linear, F.linear):
            hidden, weight, _ = head()
            function(linear(hidden, weight)).backward()
            found.append((hidden.grad, weight.grad))
        for a, b in zip(*found):
            assert torch.allclose(a, b, atol=1e-4)


def test_copies_and_pickles():
    hidden, weight, _ = head()
    x, real = lazy_linear(hidden, weight), F.linear(hidden, weight)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(x)
    with torch.no_grad():
        y = lazy_linear(hidden, weight)
    assert type(copy.deepcopy(y)) is torch.Tensor and torch.equal(copy.deepcopy(y), real.detach())
    assert torch.equal(pickle.loads(pickle.dumps(y)), real.detach())
    assert type(x.materialize()) is torch.Tensor and x.materialize().requires_grad
    assert x.materialize().data_ptr() == x.data_ptr()


def test_autocast(made):
    found = []
    for linear in (lazy_linear, F.linear):
        hidden, weight, bias = head(bias=True)
        with torch.autocast(oracle.DEVICE, torch.bfloat16):
            z = linear(hidden, weight, bias)
            assert z.dtype == torch.bfloat16
            loss = F.cross_entropy(z.float(), TARGET)
            rounded = [F.cross_entropy(z, TARGET), F.nll_loss(F.log_softmax(z, -1), TARGET), z.logsumexp(-1).sum()]
        (loss + sum(rounded)).backward()
        found.append((loss, *rounded, hidden.grad, weight.grad, bias.grad, z.detach().float()))
        if linear is lazy_linear:
            assert not made
    assert torch.equal(found[0][-1], found[1][-1])
    for a, b in zip(*found):
        assert a.dtype == b.dtype and (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


@pytest.mark.skipif(oracle.DEVICE != "cpu", reason="a GPU does not raise them")
def test_what_the_losses_refuse_is_pytorch_s_own_error():
    for call in (
        lambda z: F.cross_entropy(z, TARGET + 40),
        lambda z: F.cross_entropy(z, TARGET[1:]),
        lambda z: F.cross_entropy(z, TARGET.float()),
        lambda z: F.cross_entropy(z, TARGET, weight=torch.ones(3)),
        lambda z: F.cross_entropy(z, TARGET, reduction="most"),
        lambda z: F.cross_entropy(z, TARGET, label_smoothing=2.0),
        lambda z: F.log_softmax(z, -1).gather(-1, TARGET[:, None] - 100),
        lambda z: z.index_select(0, TARGET + 40),
        lambda z: z.view(7, 40),
        lambda z: z[10],
    ):
        errors = []
        for linear in (lazy_linear, F.linear):
            try:
                call(linear(*head()))
            except Exception as error:
                errors.append((type(error), str(error)))
        assert len(errors) == 2 and errors[0] == errors[1]


def test_numbers_of_a_device_are_not_waited_for():
    """A scale on a GPU is not read, so logits times it are computed. The meta device stands for a GPU: it has no
    number."""
    assert _copies._number(torch.tensor(2.0, device="cpu")) == 2.0
    assert _copies._number(torch.tensor(2.0, device="meta")) is None


def test_what_cannot_be_promised_is_made():
    hidden, weight, _ = head()
    assert isinstance(lazy_linear(hidden, weight), LazyLogits)
    assert type(lazy_linear(hidden[:0], weight)) is torch.Tensor  # no memory to save
    assert type(lazy_linear(hidden.to("meta"), weight.to("meta"))) is torch.Tensor


EDITED = {  # by name (an argument, an operation of logits with it, an edit of the argument)
    "scale": (lambda: torch.tensor(0.5), lambda z, a: z * a, lambda a: a.mul_(3)),
    "scale from the left": (lambda: torch.tensor(0.5), lambda z, a: a * z, lambda a: a.fill_(9)),
    "divisor": (lambda: torch.tensor(4.0), lambda z, a: z / a, lambda a: a.add_(1)),
    "softcap": (lambda: torch.tensor(3.0), lambda z, a: torch.tanh(z / a) * a, lambda a: a.mul_(2)),
    "bias": (lambda: torch.linspace(-1, 1, 40), lambda z, a: z + a, lambda a: a.zero_()),
    "indices": (lambda: torch.tensor([5, 0, 3, 3, 1, 2]), lambda z, a: z[a], lambda a: a.zero_()),
    "mask": (lambda: torch.tensor([True] * 6), lambda z, a: z[a], lambda a: a.logical_not_()),
    "indices of two": (lambda: torch.tensor([1, 1, 0, 0, 1, 0]), lambda z, a: z.view(2, 3, 40)[a, a], lambda a: a.zero_()),
    "index_select": (lambda: torch.tensor([5, 0, 3, 3, 1, 2]), lambda z, a: z.index_select(0, a), lambda a: a.zero_()),
}


@pytest.mark.parametrize("name", EDITED)
def test_an_argument_that_is_edited_later_changes_nothing(name):
    argument, make, edit = EDITED[name]
    if oracle.DEVICE != "cpu" and argument().dim() == 0:
        pytest.skip("a number on a GPU is not read")
    hidden, weight, _ = head()
    found = []
    for linear in (lazy_linear, F.linear):
        with torch.no_grad():
            a, b = argument(), argument()
            z, w = make(linear(hidden, weight), a), make(linear(hidden, weight), b)
            assert (type(z) is LazyLogits) == (linear is lazy_linear)
            edit(a), edit(b)
            assert not torch.equal(a, argument())
            found.append((F.cross_entropy(z, TARGET), w + 0))
            assert linear is not lazy_linear or not z.is_real
    for x, y in zip(*found):
        assert torch.allclose(x, y, atol=1e-5)


def other(z):
    """Returns logits of another call, of the same shape."""
    g = oracle.generator(7)
    linear = lazy_linear if type(z) is LazyLogits else F.linear
    return linear(*(torch.randn(*shape, generator=g, dtype=z.dtype) for shape in ((z.shape[0], 5), (z.shape[1], 5))))


B = torch.linspace(-1, 1, 40, dtype=torch.float64)
COMPOSED = {
    "a softcap, scaled": lambda z: (torch.tanh(z / 3) * 3) * 2,
    "a softcap, divided": lambda z: (torch.tanh(z / 3) * 3) / 2,
    "a softcap of a softcap": lambda z: torch.tanh((torch.tanh(z / 3) * 3) / 2) * 2,
    "a softcap, negated": lambda z: -(torch.tanh(z / 3) * 3),
    "a tanh, divided": lambda z: torch.tanh(z / 3) / 0.2,
    "a tanh of a tanh": lambda z: torch.tanh(torch.tanh(z)),
    "a negative softcap": lambda z: torch.tanh(z) * -2.0,
    "a bias, scaled": lambda z: (z + B) * 2,
    "a bias, divided": lambda z: (z + B) / 2,
    "a bias, softcapped": lambda z: torch.tanh((z + B) / 3) * 3,
    "a bias after a scale": lambda z: (z * 2) + B,
    "two biases": lambda z: z + B + B,
    "a bias of some vocabulary entries": lambda z: z[:, :20] + B[:20],
    "a bias of more dimensions": lambda z: (z + B[None, None])[0],
    "a bias over tokens": lambda z: (z.t() + B[:6]).t(),
    "a bias of integers": lambda z: z + torch.arange(40),
    "a bias of a float's bits": lambda z: z + B.float(),
    "vocabulary entries and their bias": lambda z: z[:, 2:9] + B[2:9],
    "a column": lambda z: z + B[:6, None],
    "a row": lambda z: z[:1] + B[None],
    "a bias with a gradient": lambda z: z + B.clone().requires_grad_(),
    "a number added": lambda z: z + torch.tensor(2.0, dtype=z.dtype),
    "times 0": lambda z: z * 0.0,
    "times infinity": lambda z: (z * math.inf).nan_to_num(),
    "negative": lambda z: z * -0.5,
    "over a vector": lambda z: z / (B + 3),
    "times itself": lambda z: z * z,
    "twice": lambda z: z + z,
    "two calls": lambda z: z * 2 + other(z) / 4,
    "two calls and a softcap": lambda z: torch.tanh((z + other(z)) / 5) * 5,
    "two calls, a softcap in one": lambda z: z + torch.tanh(other(z)) * 2,
    "three calls": lambda z: (z + other(z) * 0.5) + other(z),
    "three calls, scaled between": lambda z: (z + other(z)) * 0.5 + other(z),
    "two calls with alpha": lambda z: torch.add(z, other(z), alpha=3),
    "two calls, some vocabulary entries": lambda z: (z + other(z))[:, 3:9],
    "some vocabulary entries of two calls": lambda z: z[:, 3:9] + other(z)[:, 3:9],
    "vocabulary entries of vocabulary entries": lambda z: z[:, 4:30][:, 3:9],
    "every other vocabulary entry": lambda z: z[:, 4:30:2],
    "the last vocabulary entries": lambda z: z[:, -7:],
    "vocabulary entries of a bias": lambda z: (z + B)[:, 2:9],
    "vocabulary entries, a bias after": lambda z: z[:, 2:9] * 3,
    "log_softmax": lambda z: F.log_softmax(z, -1),
    "log_softmax, scaled": lambda z: F.log_softmax(z, -1) * -2.0,
    "log_softmax of vocabulary entries": lambda z: F.log_softmax(z[:, 2:9], -1),
    "vocabulary entries of log_softmax": lambda z: F.log_softmax(z, -1)[:, 2:9],
    "log_softmax over tokens": lambda z: F.log_softmax(z, 0),
    "log_softmax of log_softmax": lambda z: F.log_softmax(F.log_softmax(z, -1), -1),
    "log_softmax of a tanh": lambda z: F.log_softmax(torch.tanh(z), -1),
    "a bias on log_softmax": lambda z: F.log_softmax(z, -1) + B,
    "tanh of log_softmax": lambda z: torch.tanh(F.log_softmax(z, -1)) * 2,
    "two log_softmax": lambda z: F.log_softmax(z, -1) + F.log_softmax(other(z), -1),
    "a cast to integers": lambda z: z.long().double(),
    "a cast and back": lambda z: z.float().double(),
    "expanded": lambda z: z[None].expand(2, 6, z.shape[1])[1],
    "repeated rows": lambda z: z[torch.tensor([1, 1, 2, 0, 5, 1])],
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions(name):
    """Compositions that one head can express give a loss without logits, all others real logits. Values, losses and
    gradients agree."""
    losses = (
        lambda z: F.cross_entropy(z, y(z)),
        lambda z: F.cross_entropy(z, y(z), reduction="sum", weight=torch.linspace(1, 2, z.shape[1], dtype=z.dtype)),
        lambda z: F.cross_entropy(z, y(z).where(y(z) != 5, -100), label_smoothing=0.3),
        lambda z: F.nll_loss(z, y(z)) + z.gather(-1, y(z)[:, None]).square().sum() + z.gather(1, y(z)[:, None].repeat(1, 2)).sum(),
        lambda z: z.logsumexp(-1).sum() + z.logsumexp(1, keepdim=True).square().sum(),
        lambda z: z.sum(-1).square().sum() + torch.sum(z, -1, keepdim=True, dtype=torch.float64).sum(),
    )
    y = lambda z: TARGET[: z.shape[0]] % z.shape[1]  # noqa: E731
    for loss in losses:
        found = []
        for linear in (lazy_linear, F.linear):
            leaves = [t.double().detach().requires_grad_() for t in head(bias=True)]
            z = COMPOSED[name](linear(*leaves))
            value = loss(z)
            if value.requires_grad:
                value.backward()
            found.append((value.detach(), *(t.grad for t in leaves), z.detach() + 0))
        for a, b in zip(*found):
            same = a is b is None or torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
            assert same and (a is None or a.dtype == b.dtype)


def test_a_gradient_that_is_retained_is_that_of_the_backward():
    """The gradient is not recomputed when it is read."""
    found = []
    for linear in (lazy_linear, F.linear):
        hidden, weight, _ = head()
        z = linear(hidden, weight).view(2, 3, 40)
        z.retain_grad()
        F.cross_entropy(z.transpose(1, 2), TARGET.view(2, 3)).backward()
        with torch.no_grad():
            weight.mul_(2)
        found.append(z.grad)
    assert type(found[0]) is torch.Tensor and torch.allclose(*found, atol=1e-6)


def test_results_in_memory_that_is_given():
    hidden, weight, _ = head()
    with torch.no_grad():
        z, real = lazy_linear(hidden, weight), F.linear(hidden, weight)
        for function in (
            lambda z, out: torch.gather(z, -1, TARGET[:, None], out=out),
            lambda z, out: torch.logsumexp(z, -1, out=out),
        ):
            results = [torch.empty(0), torch.empty(0)]
            assert function(z, results[0]) is results[0]
            function(real, results[1])
            assert torch.allclose(*results, atol=1e-5)


def test_no_gradient_is_computed_for_what_needs_none(monkeypatch):
    """The gradient of a frozen head's weight would be as large as the weight."""
    needed = []
    loss = _losses.linear_cross_entropy

    def watched(hidden, weight, *args, **kwargs):
        needed.append((hidden.requires_grad, weight.requires_grad))
        return loss(hidden, weight, *args, **kwargs)

    monkeypatch.setattr(_losses, "linear_cross_entropy", watched)
    for which in ((True, False), (False, True)):
        hidden, weight = (t.requires_grad_(needs) for t, needs in zip(head(), which))
        F.cross_entropy(lazy_linear(hidden, weight), TARGET).backward()
        with torch.no_grad():
            F.cross_entropy(lazy_linear(hidden, weight), TARGET)
        assert needed[-2:] == [which, (False, False)]
