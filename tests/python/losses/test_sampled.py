"""Sampled softmax against its definition in float64."""

import numpy as np
import pytest
from loss_frameworks import RNG, error, normal

N, D, V = 9, 6, 23
HIDDEN, WEIGHT, BIAS = normal(N, D, seed=61), normal(V, D, seed=62), normal(V, seed=63)
TARGETS = np.array([3, 0, -100, 22, 3, 1, 17, -100, 5], np.int32)
IDS = np.array([3, 3, 5, 1, 1, 1, 22, 9, 0, 5, 8], np.int32)  # targets among them, once or several times
MANY = RNG(64).integers(0, V, 3000).astype(np.int32)
COUNTS = normal(V, seed=65)
SHARES = np.abs(normal(N, seed=66))


def compiled(f, function):
    """Returns a function that JAX compiles as a whole: operation by operation takes longer."""
    return f.jax.jit(function) if hasattr(f, "jax") else function


def expected(f, hidden, weight, bias, ids, sampled, own, *, remove=True, scale=1.0):
    """Returns [N]: the losses, 0 for ignored targets. sampled, own: log counts."""
    xp, targets = f.xp, f.array(TARGETS)
    z = scale * (hidden @ weight.T + bias)
    y = xp.where(targets >= 0, targets, 0)
    target = z[np.arange(N), y] - own
    others = z[:, ids] - sampled
    if remove:
        others = xp.where(f.array(ids)[None] == y[:, None], -np.inf, others)
    each = f.paper.log_p(xp.concatenate([target[:, None], others], 1))[:, 0]
    return xp.where(targets >= 0, -each, 0.0)


CASES = [
    (IDS, dict(), False), (IDS, dict(remove_accidental_hits=False, reduction="none"), True),
    (IDS, dict(token_weight=SHARES, logit_scale=0.5), True), (MANY, dict(reduction="sum", memory_budget="1MiB"), True),
    (IDS[:1], dict(normalizer=5, token_weight=SHARES), False), (IDS, dict(of_target=0.4, reduction="sum"), True),
]


@pytest.mark.parametrize("ids, options, counted", CASES, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_given_ids(f, ids, options, counted):
    options = dict(options)
    more = options.pop("of_target", 0.0)  # the target's own count may differ from that of a negative with its id
    own = (COUNTS[TARGETS.clip(0)] + more if counted else np.zeros(N)).astype(np.float32)
    sampled = COUNTS[ids] if counted else np.zeros(len(ids), np.float32)
    counts = dict(sampled_log_counts=f.array(sampled), target_log_counts=f.array(own)) if counted else {}
    reduction, shares = options.get("reduction", "mean"), options.get("token_weight", np.ones(N, np.float32))
    if "token_weight" in options:
        options["token_weight"] = f.array(shares)

    def call(hidden, weight, bias):
        given = dict(options, **counts, sampled_ids=f.array(ids))
        found = f.losses.sampled_softmax_loss(hidden, weight, f.array(TARGETS), bias, **given)
        return (found * f.array(SHARES)).sum() if reduction == "none" else found

    def formula(hidden, weight, bias):
        each = expected(f, hidden, weight, bias, ids, f.double(sampled), f.double(own), scale=options.get("logit_scale", 1.0),
                        remove=options.get("remove_accidental_hits", True))
        if reduction == "none":
            return (each * f.double(SHARES)).sum()
        each = each * f.double(shares)
        return each.sum() / (options.get("normalizer", shares[TARGETS >= 0].sum(dtype=float)) if reduction == "mean" else 1)

    spoiled = np.where(TARGETS[:, None] < 0, np.nan, HIDDEN).astype(np.float32)
    (value, gradients), (exact, exact_gradients) = (
        f.gradients(compiled(f, call), spoiled, WEIGHT, BIAS), f.exact_gradients(formula, HIDDEN, WEIGHT, BIAS))
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient


def seed_of(f, number):
    return number if f.target == "target" else np.array([number, 7], np.uint32)


def probabilities(sampler, vocab):
    ids = np.arange(vocab)
    return np.full(vocab, 1 / vocab) if sampler == "uniform" else np.log((ids + 2) / (ids + 1)) / np.log(vocab + 1)


@pytest.mark.parametrize("sampler", ["log_uniform", "uniform"])
def test_drawn_ids(f, sampler):
    """The ids have their distribution, and the loss is that of the ids with their expected counts."""
    from importlib import import_module

    from logitless._losses import sampled

    xp = import_module(f.losses.__name__.replace("losses", "_xp"))
    key, count = xp.key(seed_of(f, 5), f.xp.zeros(1)), 100_000
    draw = compiled(f, lambda key: sampled._drawn(xp, key, sampler, count, V, f.xp.zeros(1)))
    drawn = f.numpy(draw(key)).astype(int)
    p = probabilities(sampler, V)
    assert np.abs((np.bincount(drawn, minlength=V) - count * p) / np.sqrt(count * p)).max() < 4.5
    ids = f.numpy(sampled._drawn(xp, key, sampler, 40, V, f.xp.zeros(1))).astype(int)
    counts = np.log(40 * p).astype(np.float32)
    given = [f.array(a) for a in (HIDDEN, WEIGHT, TARGETS, BIAS)]
    run = compiled(f, lambda *given: f.losses.sampled_softmax_loss(*given, num_sampled=40, sampler=sampler, seed=seed_of(f, 5)))
    found = run(*given)
    counted = dict(sampled_log_counts=f.array(counts[ids]), target_log_counts=f.array(counts[TARGETS.clip(0)]))
    same = compiled(f, lambda *given: f.losses.sampled_softmax_loss(*given, sampled_ids=f.array(ids), **counted))(*given)
    assert error(f.numpy(found), f.numpy(same)) < 1e-6
    if f.target == "target":
        f.xp.manual_seed(3)
        one, other = (f.losses.sampled_softmax_loss(*given, num_sampled=40) for _ in range(2))
        assert one != other and np.isfinite(f.numpy(one))


def test_a_target_that_is_the_only_negative(f):
    """Nothing is left beside it: the loss and its gradients are 0."""
    def call(hidden, weight, bias):
        return f.losses.sampled_softmax_loss(hidden, weight, f.array(TARGETS[:1]), bias, sampled_ids=f.array(IDS[:2]))

    value, gradients = f.gradients(compiled(f, call), HIDDEN[:1], WEIGHT, BIAS)
    assert abs(f.numpy(value)) < 1e-6 and all(np.abs(f.numpy(a)).max() < 1e-6 for a in gradients)


def test_torch_rounds_16_bits_once():
    torch = pytest.importorskip("torch")
    from logitless.torch.losses import sampled_softmax_loss

    x, w = (torch.from_numpy(normal(*shape, seed=67)).bfloat16() for shape in ((300, 32), (500, 32)))
    x *= 0.3
    y, ids = (torch.from_numpy(RNG(68).integers(0, 500, count)) for count in (300, 900))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = [t.to(dtype).detach().requires_grad_() for t in (x, w)]
        sampled_softmax_loss(*given, y, sampled_ids=ids).backward()
        found.append([t.grad.double() for t in given])
    for one, other in zip(*found):
        assert (one - other).norm() < 4e-3 * other.norm()


def test_torch_stores_no_logits():
    """Logits of tokens and negatives would take 30 MiB in float32."""
    torch = pytest.importorskip("torch")
    from logitless.torch._peak import peak_of
    from logitless.torch.losses import sampled_softmax_loss

    x, w = (torch.randn(2000, 16, device="cpu").requires_grad_() for _ in range(2))
    y = torch.arange(2000, device="cpu")

    def step():
        loss = sampled_softmax_loss(x, w, y, num_sampled=4000, sampler="uniform", seed=1, memory_budget="1MiB")
        return torch.autograd.grad(loss, (x, w))

    assert peak_of(step)[0] < 4 << 20


@pytest.mark.parametrize("message, change", {
    "num_sampled: expected a whole number from 1, got None": dict(sampled_ids=None),
    "num_sampled: expected None beside sampled_ids, got 4": dict(num_sampled=4),
    "sampled_ids: expected [K], got [1, 11]": dict(sampled_ids=IDS[None]),
    "sampled_ids: expected int32 or int64": dict(sampled_ids=COUNTS),
    "sampled_ids: expected them beside their log_counts": dict(sampled_ids=None, sampled_log_counts=COUNTS),
    "target_log_counts: expected it beside the other log_counts, got None": dict(sampled_log_counts=COUNTS[IDS]),
    "sampled_log_counts: expected [11], got [23]": dict(sampled_log_counts=COUNTS, target_log_counts=SHARES),
    "sampler: expected one of 'log_uniform', 'uniform', got 'zipf'": dict(sampler="zipf"),
    "logit_scale: expected a number above 0, got 0": dict(logit_scale=0),
    "token_weight: expected [9], got [23]": dict(token_weight=COUNTS),
    "remove_accidental_hits: expected True or False, got 1": dict(remove_accidental_hits=1),
    "normalizer: expected None with reduction 'sum', got 2": dict(reduction="sum", normalizer=2),
    "{target}: expected [9], got [8]": dict(targets=TARGETS[1:]),
}.items())
def test_bad_arguments_are_named(f, message, change):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, "sampled_ids": IDS, **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    given[f.target] = given.pop("targets")
    with pytest.raises((TypeError, ValueError)) as raised:
        f.losses.sampled_softmax_loss(**given)
    assert message.format(target=f.target) in str(raised.value)


def test_bad_ids(f):
    """PyTorch names them on the CPU; elsewhere the loss is NaN."""
    ids = np.where(IDS == 9, V, IDS)
    if f.target == "target" and f.device == "cpu":
        with pytest.raises(ValueError, match=rf"sampled_ids: expected token ids in \[0, {V}\), got {V}"):
            f.losses.sampled_softmax_loss(*map(f.array, (HIDDEN, WEIGHT, TARGETS)), sampled_ids=f.array(ids))
    else:
        given = map(f.array, (HIDDEN, WEIGHT, TARGETS))
        assert np.isnan(f.numpy(f.losses.sampled_softmax_loss(*given, sampled_ids=f.array(ids))))
