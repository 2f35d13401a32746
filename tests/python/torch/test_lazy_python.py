"""Python, NumPy and pickle read lazy logits and their gradients as they read real ones."""

import copy
import io
import math
import operator
import pickle

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import LazyLogits
from logitless.torch._lazy import _form, lazy_linear
from logitless.torch._lazy._gradient import LazyGradient

Y = torch.arange(6) * 5 % 40


def saved(z):
    buffer = io.BytesIO()
    torch.save(z, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def refused(function):
    """Returns the class of the error that function raises, or its result."""
    try:
        return function()
    except Exception as error:
        return type(error)


ASKED = {
    "format": lambda z: f"{z[0, 0]:.3f}{z[1, 2]:10.2e}" + "{:+.1f}".format(z.sum()) + "%.2f" % z[0, 0],
    "format of many": lambda z: refused(lambda: f"{z[0]:.3f}"),
    "str of one": lambda z: str(z[0, 0].detach()),
    "numbers": lambda z: [int(z[0, 0]), float(z[0, 1]), bool(z[0, 2]), complex(z[0, 3]), z[0, 4].item()],
    "numbers of many": lambda z: [refused(lambda f=f: f(z)) for f in (int, float, bool, complex, operator.index)],
    "index": lambda z: operator.index(z.argmax(-1)[0]),
    "math": lambda z: [math.exp(z[0, 0]), math.floor(z[0, 1]), math.isnan(z[0, 2])],
    "tolist": lambda z: z.tolist() + [z[0, 0].tolist()],
    "numpy": lambda z: [z.detach().numpy(force=True), z.numpy(force=True)],
    "iteration": lambda z: [*z, next(iter(z)), *zip(z, z), *enumerate(z), list(reversed(z)), sum(z), max(z[0])],
    "iteration of one": lambda z: refused(lambda: list(z[0, 0])),
    "in": lambda z: [z[0].max() in z, 1e9 in z, refused(lambda: "a" in z)],
    "len": lambda z: [len(z), refused(lambda: len(z[0, 0]))],
    "hash": lambda z: [hash(z) == id(z), {z: 1}[z]],
    "comparisons": lambda z: [z == z, z != z, z < 0.5, 0.5 <= z, torch.zeros(6, 40) > z, z == None, z == "a"],  # noqa: E711
    "arithmetic": lambda z: [1 - z, 1 / z, z**2, 2**z, z // 2, z % 2, abs(z), -z, +z, ~(z > 0), (z > 0) & (z < 1), z @ z.T],
    "indices": lambda z: [
        z[None], z[...], z[..., None], z[torch.tensor([0, 2])], z[[0, 2]], z[torch.arange(6) > 2], z[True], z[False], z[z > 0],
        z[torch.tensor([0, 1]), torch.tensor([3, 4])], z[torch.tensor(2)], z[-1, -1], z[::2, ::3], z[1, ..., torch.tensor([1])],
        z[range(2)], z[np.int64(1)], z[torch.tensor([1, 0], dtype=torch.int32)], z[:, torch.tensor([3, 1])], z[2][..., 5:7],
    ],
    "bad indices": lambda z: [refused(lambda i=i: z[i]) for i in ("a", 1.5, 7, (0, 0, 0), (0, 40), torch.tensor(9))],
    "pickle": lambda z: [pickle.loads(pickle.dumps(z.detach(), protocol)) for protocol in (2, 5)],
    "pickle of a view": lambda z: pickle.loads(pickle.dumps(z.detach()[1:, :3])),
    "torch.save": lambda z: saved({"a": z.detach(), "b": z.detach()[1:]}),
    "deepcopy": lambda z: [copy.deepcopy(z.detach()), copy.copy(z)],
    "new": lambda z: [z.new_zeros(3), z.new_tensor([1.0]), torch.zeros_like(z), torch.ones(3).type_as(z), z.type()],
    "as_tensor": lambda z: [torch.as_tensor(z), torch.tensor(z.detach()), torch.stack([z[0], z[1]])],
    "setitem": lambda z: operator.setitem(z, (0, 0), 1.0) or z,
    "iadd": lambda z: operator.iadd(z.detach(), 1),
    "memory": lambda z: [z.untyped_storage().nbytes(), z.data_ptr() != 0, z.nbytes, z.is_contiguous(), z.stride()],
    "subclass": lambda z: z.detach().as_subclass(torch.Tensor) + 0,
    "parameter": lambda z: torch.nn.Parameter(z.detach()) + 0,
}
if oracle.DEVICE == "cpu":
    ASKED["arrays"] = lambda z: [
        np.asarray(z.detach()), np.array(z.detach(), dtype=np.float64), np.exp(z.detach()), np.ones((6, 40), np.float32) + z.detach(),
        np.float64(2) * z.detach(), np.float32(z.detach()[0, 0]), np.from_dlpack(z.detach()), torch.from_dlpack(z.detach()),
        np.stack([z.detach()[0], z.detach()[1]]), z[np.arange(6) > 2], z[np.array([0, 2])], bytes(z.detach().numpy())[:0],
    ]
else:
    del ASKED["bad indices"]  # an index outside ends PyTorch's use of a GPU
    del ASKED["in"]  # there, one row of a GEMM has other last bits than the same row of the full GEMM


def plain(value):
    """Converts for comparisons: tensors and arrays become (shape, dtype, requires_grad, numbers)."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad, value.detach().double().numpy(force=True)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return [plain(v) for v in value.values()]
    return value


def assert_same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif isinstance(a, (float, complex, np.ndarray, np.generic)):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert a == b


def leaves():
    g = oracle.generator(0)
    return torch.randn(6, 8, generator=g).requires_grad_(), torch.randn(40, 8, generator=g).requires_grad_()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_logits(name, mode):
    found = []
    for linear in (lazy_linear, F.linear):
        with mode():
            z = linear(*leaves())
        assert (type(z) is LazyLogits) == (linear is lazy_linear)
        found.append(plain(refused(lambda: ASKED[name](z))))
    assert_same(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ASKED)
def test_gradients(name):
    found = []
    for linear in (lazy_linear, F.linear):
        z = linear(*leaves())

        def hook(g):
            assert (type(g) is LazyGradient) == (linear is lazy_linear)
            found.append(plain(refused(lambda: ASKED[name](g.clone() if name == "setitem" else g))))

        z.register_hook(hook)
        F.cross_entropy(z, Y).backward()
    assert_same(*found)


def test_what_reads_one_logit_computes_its_row(monkeypatch):
    made = []
    value = _form.Form.value
    monkeypatch.setattr(_form.Form, "value", lambda form: made.append(tuple(value(form).shape)) or value(form))
    hidden, weight = leaves()
    z, real = lazy_linear(hidden, weight), F.linear(hidden, weight)
    assert f"{z[0, 0]:.3f}" == f"{real[0, 0]:.3f}" and str(z[1, 2]) == str(real[1, 2].detach())
    assert torch.allclose(z[2, 3:9][::2] * 1, real[2, 3:9][::2]) and not z.is_real and set(made) <= {(40,), (6,)}
    one = z[3, 5]
    with torch.no_grad():
        z.mul_(2)
    assert torch.allclose(one.detach(), 2 * real[3, 5]) and z.is_real
    (one * 3).backward()
    assert torch.allclose(weight.grad, torch.autograd.grad(real[3, 5] * 3, weight)[0])
