"""Random programs over logits, run on lazy and on real ones: every difference that a program can see is an error.

A program is a list of operations; each takes one value made before (the logits are the first) and may make another.
Compared are the values, their shapes, strides, dtypes, requires_grad, is_leaf, versions and graphs, and which values
share memory. Gradients of hidden states, weight and bias are compared, those that hooks and retain_grad see, and the
classes of errors.
"""

import random

import oracle
import torch
import torch.nn.functional as F

V = 12


def _mask(z):
    return (torch.arange(z.shape[0]) % 2).bool()


def _target(z, dim=-1):
    shape = list(z.shape)
    vocab = shape.pop(dim)
    return (torch.arange(max(1, torch.Size(shape).numel())).reshape(shape) * 5) % vocab


def _at(z, dim, *ids):
    """Returns indices of a dimension. An index outside of it is raised here on a GPU, where PyTorch's error ends the use
    of the GPU in this process."""
    if oracle.DEVICE != "cpu" and max(ids) >= z.shape[dim]:
        raise IndexError(f"index {max(ids)} is out of bounds for dimension {dim} with size {z.shape[dim]}")
    return torch.tensor(ids)


def _setitem(z, index, value):
    z[index] = value


# .data is left out: an edit through it spoils the gradients of real logits.
VIEWS = {
    "view": lambda z: z.view(-1, z.shape[-1]),
    "view 3": lambda z: z.view(2, -1, z.shape[-1]),
    "view flat": lambda z: z.view(-1),
    "reshape": lambda z: z.reshape(-1, z.shape[-1]),
    "flatten": lambda z: z.flatten(0, 1),
    "positions": lambda z: z[..., :-1, :],
    "every other": lambda z: z[::2],
    "first": lambda z: z[0],
    "last": lambda z: z[:, -1],
    "narrow": lambda z: z.narrow(0, 1, z.shape[0] - 1),
    "words": lambda z: z[..., 2:9],
    "word": lambda z: z[..., 3],
    "transpose": lambda z: z.transpose(0, 1),
    "transpose vocabulary entries": lambda z: z.transpose(-1, -2),
    "permute": lambda z: z.permute(2, 0, 1),
    "movedim": lambda z: z.movedim(-1, 0),
    "t": lambda z: z.t(),
    "mT": lambda z: z.mT,
    "unsqueeze": lambda z: z.unsqueeze(1),
    "squeeze": lambda z: z.squeeze(),
    "chunk": lambda z: z.chunk(2)[1],
    "split": lambda z: z.split([1, z.shape[0] - 1])[0],
    "unbind": lambda z: z.unbind(0)[-1],
    "expand": lambda z: z.expand(3, *z.shape),
    "detach": lambda z: z.detach(),
    "view_as": lambda z: z.view_as(z),
    "diagonal": lambda z: z.diagonal(dim1=-2, dim2=-1),
    "unfold": lambda z: z.unfold(-1, 3, 2),
    "alias": lambda z: z[:],
    "new axis": lambda z: z[None],
}
COPIES = {
    "clone": lambda z: z.clone(),
    "contiguous": lambda z: z.contiguous(),
    "double": lambda z: z.double(),
    "float": lambda z: z.float(),
    "bfloat16": lambda z: z.bfloat16().to(z.dtype),
    "to": lambda z: z.to(torch.float64, copy=True),
    "times": lambda z: z * 0.5,
    "from the left": lambda z: 3 * z,
    "over": lambda z: z / 2,
    "over a tensor": lambda z: z / torch.tensor(4.0),
    "softcap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "neg": lambda z: -z,
    "mask": lambda z: z[_mask(z)],
    "pick": lambda z: z[_at(z, 0, 1, 0, 1)],
    "pick of two": lambda z: z[_at(z, 0, 1, 0), _at(z, 1, 0, 1)],
    "index_select": lambda z: z.index_select(0, _at(z, 0, 1, 0, 1)),
    "bias": lambda z: z + torch.arange(float(z.shape[-1]), dtype=z.dtype) / 10,
    "bias [1, V]": lambda z: z + torch.arange(float(z.shape[-1]), dtype=z.dtype)[None] / 10,
    "plus": lambda z: z + 1,
    "twice": lambda z: z + z,
    "log_softmax": lambda z: F.log_softmax(z, -1),
    "softmax": lambda z: z.softmax(-1),
    "exp": lambda z: z.clamp(max=3).exp(),
    "masked_fill": lambda z: z.masked_fill(z > 0, -1.0),
    "cat": lambda z: torch.cat([z, z]),
    "argmax": lambda z: z.argmax(-1),
    "topk": lambda z: z.topk(2).values,
    "square": lambda z: z.square(),
    "stack": lambda z: torch.stack([z, z])[0],
}
# transpose_, unsqueeze_, squeeze_ and detach_ are left out. On a view of any tensor subclass PyTorch fails an internal
# assertion or does nothing; test_lazy_property.py has them on logits themselves.
EDITS = {
    "mul_": lambda z: z.mul_(1.5),
    "add_": lambda z: z.add_(1.0),
    "div_": lambda z: z.div_(2.0),
    "sub_ itself": lambda z: z.sub_(z * 0.5),
    "neg_": lambda z: z.neg_(),
    "clamp_": lambda z: z.clamp_(-1, 1),
    "masked_fill_": lambda z: z.masked_fill_(z > 1, 0.25),
    "tanh_": lambda z: z.tanh_(),
    "zero_": lambda z: z.zero_(),
    "fill_": lambda z: z.fill_(2.0),
    "copy_": lambda z: z.copy_(torch.linspace(0, 1, max(1, z.numel()))[: z.numel()].reshape(z.shape)),
    "scatter_": lambda z: z.scatter_(-1, torch.zeros(z.shape[:-1] + (1,), dtype=torch.int64), -2.0),
    "index_fill_": lambda z: z.index_fill_(0, _at(z, 0, 0), 0.5),
    "a vocabulary entry": lambda z: _setitem(z, (Ellipsis, 2), -3.0),
    "a row": lambda z: _setitem(z, 0, 0.125),
    "masked": lambda z: _setitem(z, z < 0, 0.0),
    "part": lambda z: z[..., 1:3].mul_(3.0),
    "+=": lambda z: z.__iadd__(0.5),
    "out=": lambda z: torch.mul(z.detach(), 2.0, out=z),
    "foreach": lambda z: torch._foreach_mul_([z], 2.0),
    "requires_grad_": lambda z: z.requires_grad_(),
}
LOSSES = {
    "cross entropy": lambda z: F.cross_entropy(z, _target(z)),
    "cross entropy, sum": lambda z: F.cross_entropy(z.view(-1, z.shape[-1]), _target(z).view(-1), reduction="sum"),
    "smoothing": lambda z: F.cross_entropy(z.reshape(-1, z.shape[-1]), _target(z).view(-1), label_smoothing=0.2),
    "none": lambda z: F.cross_entropy(z.flatten(0, -2), _target(z).view(-1), reduction="none").sum(),
    "classes second": lambda z: F.cross_entropy(z.movedim(-1, 1), _target(z)),
    "probabilities": lambda z: F.cross_entropy(z, torch.full(z.shape, 1.0 / z.shape[-1], dtype=z.dtype)),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, -1), _target(z)),
    "gather": lambda z: -F.log_softmax(z, -1).gather(-1, _target(z)[..., None]).mean(),
    "smoothed by hand": lambda z: -F.log_softmax(z, -1).sum(-1).mean(),
    "logsumexp": lambda z: torch.logsumexp(z, -1).mean(),
    "bad target": lambda z: F.cross_entropy(z, torch.full(z.shape[:-1], 99)),
    "sum": lambda z: z.sum(),
    "mean of squares": lambda z: z.double().square().mean(),
    "max": lambda z: z.amax(),
}
if oracle.DEVICE != "cpu":  # PyTorch's error ends the use of the GPU in this process
    del LOSSES["bad target"]
KINDS = {"view": VIEWS, "copy": COPIES, "edit": EDITS, "loss": LOSSES}
ASKED = {
    # Strides of dimensions with one element or none have no meaning.
    "shape": lambda z: (z.shape, z.storage_offset(), z.dtype),
    "stride": lambda z: [s for n, s in zip(z.shape, z.stride()) if n > 1 and z.numel()],
    "requires_grad": lambda z: z.requires_grad,
    "is_leaf": lambda z: z.is_leaf,
    "grad_fn": lambda z: z.grad_fn is None,
    "_base": lambda z: z._base is None,
    "_version": lambda z: 0 if z.is_inference() else z._version,
    "grad": lambda z: z.grad if z.is_leaf or z.retains_grad else None,
    "is_contiguous": lambda z: z.is_contiguous(),
}


def program(seed: int, length: int = 9):
    """Returns [(kind, name, which value, without gradients, watched by a hook or retain_grad)]."""
    r = random.Random(seed)
    weights = r.choice([(5, 3, 2, 3), (3, 2, 4, 2), (6, 2, 0, 4), (2, 6, 1, 3)])
    steps = []
    for _ in range(length):
        kind = r.choices(list(KINDS), weights)[0]
        recent = r.random() < 0.6
        steps.append(
            (kind, r.choice(list(KINDS[kind])), None if recent else r.random(), r.random() < 0.08,
             r.choice(["", "", "", "hook", "retain"]))
        )
    return steps


def inputs(dtype, bias):
    g = oracle.generator(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(2, 3, 4).requires_grad_(), make(V, 4).requires_grad_(), make(V).requires_grad_() if bias else None


def run(logits, steps, leaves):
    """Returns all that a program observes as a list of (what, value); values are numbers, tensors or names of
    errors."""
    seen, values, losses, watched = [], [logits], [], []
    for kind, name, which, quiet, watch in steps:
        z = values[-1] if which is None else values[int(which * len(values))]
        try:
            if watch and z.requires_grad and not z.is_leaf:
                if watch == "hook":
                    z.register_hook(lambda g: watched.append(g.sum()))
                else:
                    z.retain_grad()
            with torch.set_grad_enabled(torch.is_grad_enabled() and not quiet):
                made = KINDS[kind][name](z)
        except Exception as error:
            seen.append((name, type(error).__name__))
            continue
        if kind == "loss":
            losses.append(made)
        if isinstance(made, torch.Tensor) and made is not z and made.dim() and made.dtype.is_floating_point:
            values.append(made)
        for v in values:
            seen += [(name, _asked(v, question)) for question in ASKED if question != "grad"]
    seen += [("loss", loss) for loss in losses]
    try:
        total = sum((loss.double() for loss in losses if loss.requires_grad), torch.zeros((), dtype=torch.float64))
        if total.requires_grad:
            total.backward()
    except Exception as error:
        seen.append(("backward", type(error).__name__))
    else:
        seen += [("gradient", t.grad) for t in leaves if t is not None]
        seen += [("of a value", _asked(v, "grad")) for v in values]
        seen += [("watched", g) for g in watched]
    # Values that share memory lazily share it really, and the reverse.
    with torch.no_grad():
        seen += [("value", v.detach().clone()) for v in values]
        starts = [v.detach().untyped_storage().data_ptr() for v in values]
    seen.append(("memory", [[a == b for b in starts] for a in starts]))
    return seen


def _asked(value, question):
    try:
        return ASKED[question](value)
    except Exception as error:  # for example, a view whose base was edited
        return type(error).__name__


def difference(lazily, really, rtol, atol):
    """Returns the first difference between the two runs, or None."""
    for (what, a), (also, b) in zip(lazily, really):
        if what != also or type(a) is not type(b) and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return what, a, also, b
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True):
                return what, a, b
        elif a != b:
            return what, a, b
    return None if len(lazily) == len(really) else (lazily[len(really):], really[len(lazily):])
