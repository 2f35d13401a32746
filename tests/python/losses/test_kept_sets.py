"""linear_kept_logprobs in both frameworks, against a masked softmax of full logits in float64."""

import importlib

import numpy as np
import pytest
from loss_frameworks import B, BIAS, HIDDEN, RNG, T, TARGETS, V, VALID, WEIGHT, error, normal

N = 2 * B * T
KEPT = RNG(71).random((2 * B, T, V)) < 0.3
KEPT[..., 2] = True
np.put_along_axis(KEPT, np.maximum(TARGETS, 0)[..., None], True, -1)
KEPT[2, 3] = np.arange(V) == TARGETS[2, 3]  # the target alone
KEPT[4, 2] = True  # the whole vocabulary
TEMPERATURE = np.exp(normal(2 * B, T, seed=72, scale=0.3))
SHARES = normal(2 * B, T, 3, seed=73)


def head(f):
    return importlib.import_module(f.losses.__name__.rpartition(".")[0])


def padded(kept):
    """Returns kept_ids [..., K] of sets [..., V], in an order of their own."""
    order = RNG(74).permuted(np.broadcast_to(np.arange(V), kept.shape), axis=-1)
    ids = np.where(np.take_along_axis(kept, order, -1), order, -1)
    return dict(kept_ids=ids.astype(np.int32))


def listed(kept):
    counts = kept.reshape(N, V).sum(-1)
    ids = np.concatenate([np.nonzero(kept)[-1], [5, -1]])  # padding after the last set
    return dict(kept_ids=ids.astype(np.int32), kept_offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32))


def call(f, hidden, weight, bias, temperature, kept, targets=TARGETS, **options):
    given = {name: f.array(value) for name, value in kept.items()}
    found = head(f).linear_kept_logprobs(
        hidden, weight, f.array(targets), bias, temperature=temperature, **given, **options)
    return f.xp.stack(found, -1)


def formula(f, hidden, weight, bias, temperature, sets=KEPT, **options):
    z = f.paper.logits(hidden, weight, bias, **options) / temperature[..., None]
    rows = f.array(VALID)[..., None]
    kept = f.array(np.where(VALID[..., None], sets, True))
    e = f.xp.where(kept, f.xp.exp(z), 0.0)
    lse = f.xp.log(e.sum(-1))
    log_p = z - lse[..., None]
    entropy = -f.xp.where(kept, f.xp.exp(log_p) * log_p, 0.0).sum(-1)
    return f.xp.where(rows, f.xp.stack([f.paper.of_targets(log_p, f.targets), entropy, lse], -1), 0.0)


@pytest.mark.parametrize("form, options", [
    (padded, {}), (listed, dict(softcap=4.0, logit_scale=0.7)),
], ids=["padded", "listed"])
def test_values_and_gradients(f, form, options):
    shares, arrays = f.array(SHARES), (HIDDEN, WEIGHT, BIAS, TEMPERATURE)
    value, gradients = f.gradients(lambda *a: (call(f, *a, form(KEPT), **options) * shares).sum(), *arrays)
    exact, exact_gradients = f.exact_gradients(lambda *a: (formula(f, *a, **options) * shares).sum(), *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    t = f.array(TEMPERATURE)
    found = call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), t, form(KEPT), **options)
    f.close([found], lambda *given: [formula(f, *given, f.double(TEMPERATURE), **options)])


def test_a_set_without_its_target(f):
    """The log-probability is -inf, without a gradient; entropy and lse are those of the set."""
    sets = KEPT.copy()
    sets[1, 3], sets[3, 2] = False, np.arange(V) == (TARGETS[3, 2] + 1) % V  # no entry; another one
    at = dict(temperature=1.0, kept=listed(sets))

    def total(*arrays):
        found = call(f, *arrays, **at)
        return (f.xp.where(f.xp.isfinite(found), found, 0.0) * f.array(SHARES)).sum()

    found = f.numpy(call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), **at))
    assert found[1, 3].tolist() == [-np.inf, 0, -np.inf] and found[3, 2, 0] == -np.inf and abs(found[3, 2, 1]) < 1e-6
    z = f.numpy(f.paper.logits(*map(f.double, (HIDDEN, WEIGHT, BIAS))))
    assert abs(found[3, 2, 2] - z[3, 2, (TARGETS[3, 2] + 1) % V]) < 1e-5
    _, (d_hidden, *_) = f.gradients(total, HIDDEN, WEIGHT, BIAS)
    other = (TARGETS[3, 2] + 1) % V
    assert not f.numpy(d_hidden)[1, 3].any()
    assert error(f.numpy(d_hidden)[3, 2], SHARES[3, 2, 2] * WEIGHT[other]) < 1e-5


def test_a_confident_token_has_all_digits(f):
    """1 - p is 1e-9 of its gradient: differences to 1 would be 0 in float32."""
    hidden, weight = np.array([[20.0, 0.0]], np.float32), np.array([[1.0, 0.1], [-0.03, 0.2], [9, 9]], np.float32)
    ids = f.array(np.array([[0, 1]], np.int32))

    def loss(x):
        return head(f).linear_kept_logprobs(x, f.array(weight), f.array(np.zeros(1, np.int32)), kept_ids=ids)[0].sum()

    value, (gradient,) = f.gradients(loss, hidden)
    rest = np.exp(-20.6)
    assert abs(f.numpy(value) / -rest - 1) < 1e-5
    assert error(f.numpy(gradient)[0], rest * (weight[0] - weight[1])) < 1e-5


@pytest.mark.parametrize("message, change", {
    "kept_ids: expected [6, 6, 'K'] without kept_offsets, got [36]": dict(kept_ids=np.zeros(N, np.int32)),
    "kept_ids: expected [M] beside kept_offsets, got [6, 6, 23]": dict(kept_offsets=np.zeros(N + 1, np.int32)),
    "kept_offsets: expected [37], got [36]": dict(kept_offsets=np.zeros(N, np.int32)),
    "kept_ids: expected int32 or int64": dict(kept_ids=np.zeros((2 * B, T, 2), np.float32)),
    "temperature: expected [6, 6], got [6]": dict(temperature=TEMPERATURE[0]),
    "temperature: expected a number above 0, got 0": dict(temperature=0),
    "softcap: expected a number above 0": dict(softcap=-1.0),
    "{target}: expected [6, 6], got [6]": dict(target=TARGETS[0]),
    "weight: expected [V, 5]": dict(weight=WEIGHT[:, 1:]),
}.items())
def test_bad_arguments_are_named(f, message, change):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGETS, **padded(KEPT), **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    given[f.target] = given.pop("target")
    with pytest.raises((TypeError, ValueError)) as raised:
        head(f).linear_kept_logprobs(**given)
    assert message.format(target=f.target) in str(raised.value)


def test_torch_names_bad_entries_and_serves_16_bits():
    torch = pytest.importorskip("torch")
    from logitless.torch import linear_kept_logprobs

    x, w, y, ids = map(torch.from_numpy, (HIDDEN, WEIGHT, TARGETS, padded(KEPT)["kept_ids"]))
    with pytest.raises(ValueError, match=f"kept_ids: expected token ids below {V}, got {V}"):
        linear_kept_logprobs(x, w, y, kept_ids=torch.where(ids == 2, V, ids))
    with pytest.raises(ValueError, match="kept_offsets: expected numbers that rise from 0 to at most 3"):
        linear_kept_logprobs(x, w, y, kept_ids=ids[0, 0, :3], kept_offsets=torch.arange(N + 1, device="cpu"))
    half = [t.bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in half]
    for given in (half, exact):
        linear_kept_logprobs(*given, y, kept_ids=ids)[0].sum().backward()
    for one, other in zip(half, exact):
        assert one.grad.dtype is torch.bfloat16 and error(one.grad.float().numpy(), other.grad.numpy()) < 4e-3
    found = [linear_kept_logprobs(*given, y, kept_ids=ids)[2].detach().numpy() for given in (half, exact)]
    assert error(found[0], found[1]) < 1e-6
