"""The frameworks under test, and comparisons of losses with their papers in float64: values and gradients.

The arrays of the problem are numpy's. A loss or a formula is a function of (hidden, weight, bias). PyTorch computes
losses in float64, too; JAX in float32, compiled."""

import functools
import os

import numpy as np
from paper_losses import Papers

B, T, D, V = 3, 6, 5, 23  # pairs, tokens, dimensions, vocabulary
RNG = np.random.default_rng
CAPPED = dict(softcap=4.0, logit_scale=0.7, temperature=1.3)


def normal(*shape, seed, scale=1.0):
    return RNG(seed).normal(size=shape).astype(np.float32) * np.float32(scale)


GIVEN = HIDDEN, WEIGHT, BIAS = normal(2 * B, T, D, seed=1), normal(V, D, seed=2), normal(V, seed=3, scale=0.3)
REF_HIDDEN, REF_WEIGHT = normal(2 * B, T, D + 2, seed=4), normal(V, D + 2, seed=5, scale=0.7)
TARGETS = RNG(6).integers(0, V, (2 * B, T)).astype(np.int32)
for i in range(2 * B):  # prompts and padding do not count
    TARGETS[i, : i % 3] = TARGETS[i, T - i % 2 :] = -100
VALID = TARGETS >= 0
ADVANTAGES = normal(2 * B, seed=7)
OLD = np.where(VALID, -3.0 - np.abs(normal(2 * B, T, seed=8)), np.nan).astype(np.float32)  # nonsense without a token


def error(found, expected):
    """Returns the relative error in the 2-norm."""
    size = np.linalg.norm(expected)
    return np.linalg.norm(np.asarray(found, float) - expected) / (size if size > 0 else 1.0)


class Framework:
    """xp: torch or jax.numpy. target: the name of the argument. exact, exact_gradient: the errors of a value and of its
    gradients. array(a): an array of numpy's as an argument of a loss; double(a): as one of a formula."""

    def __init__(self, xp, losses, target, exact, exact_gradient):
        self.xp, self.losses, self.target = xp, losses, target
        self.exact, self.exact_gradient = exact, exact_gradient
        self.paper = Papers(xp)
        self.targets = self.array(TARGETS)
        self.valid = self.array(VALID)
        self.advantages, self.old = self.array(ADVANTAGES), self.array(OLD)

    @property
    def reference(self):
        return dict(ref_hidden=self.array(REF_HIDDEN), ref_weight=self.array(REF_WEIGHT))

    def log_p(self, given, head=None):
        return self.paper.log_p(self.paper.logits(*given, **(head or {})))

    def logps(self, given, head=None, ids=None):
        return self.paper.of_targets(self.log_p(given, head), self.targets if ids is None else ids)

    def ref_logps(self, head=None):
        return self.logps((self.double(REF_HIDDEN), self.double(REF_WEIGHT)), head)

    def close(self, found, expected, tolerance=None):
        """Compares results with a formula's values."""
        for one, other in zip(found, self.values(expected), strict=True):
            assert error(self.numpy(one), other) < (tolerance or self.exact)

    def check_values(self, found, expected):
        for one, other in zip(found, expected, strict=True):
            assert error(self.numpy(one), self.numpy(other)) < self.exact

    def check_gradients(self, found, expected):
        for one, other in zip(found, expected, strict=True):
            assert error(self.numpy(one), self.numpy(other)) < self.exact_gradient


def _loss(found):
    return found[0] if isinstance(found, tuple) else found


class Torch(Framework):
    def __init__(self):
        import torch

        from logitless.torch import losses

        self.device = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")
        if self.device != "cpu":
            torch.set_default_device(self.device)
        super().__init__(torch, losses, "target", 1e-12, 1e-11)

    def array(self, a):
        made = self.xp.as_tensor(np.array(a), device=self.device)
        return made.double() if made.is_floating_point() else made

    double = array

    def single(self, a):
        return self.array(a).float()

    def rounded(self, x):
        return x.float()

    def numpy(self, x):
        return x.detach().double().cpu().numpy()

    def stopped(self, x):
        return x.detach()

    def values(self, function):
        with self.xp.no_grad():
            return [self.numpy(x) for x in function(*map(self.double, GIVEN))]

    def gradients(self, function, *arrays):
        """Returns the value of a function, and its gradients by arrays."""
        given = [self.array(a).requires_grad_() for a in arrays]
        value = _loss(function(*given))
        return value, self.xp.autograd.grad(value, given, materialize_grads=True, allow_unused=True)

    def exact_gradients(self, formula, *arrays):
        value, gradients = self.gradients(formula, *arrays)
        return self.numpy(value), [self.numpy(g) for g in gradients]

    def has_gradients(self, results):
        return any(part.requires_grad for part in results(*[self.array(a).requires_grad_() for a in GIVEN]))

    def check(self, cases):
        """Compares pairs of a loss, which may be a tuple that begins with it, and its formula. Returns what the losses
        return."""
        found = []
        for call, formula in cases:
            given = [self.array(a).requires_grad_() for a in GIVEN]
            found.append(call(*given))
            pair = _loss(found[-1]), formula(*given)
            self.check_values(pair[:1], pair[1:])
            options = dict(materialize_grads=True, allow_unused=True)
            self.check_gradients(*(self.xp.autograd.grad(x, given, **options) for x in pair))
        return found


class Jax(Framework):
    def __init__(self):
        import jax

        from logitless.jax import losses

        self.jax = jax
        self.x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        super().__init__(jax.numpy, losses, "targets", 1e-5, 5e-5)

    def array(self, a):
        return np.array(a)

    def single(self, a):
        return np.array(a, np.float32)

    def double(self, a):
        return self.xp.asarray(a, float)

    def rounded(self, x):
        return x

    def numpy(self, x):
        return np.asarray(x, float)

    def stopped(self, x):
        return self.jax.lax.stop_gradient(x)

    def values(self, function):
        with self.x64(True):
            return [self.numpy(x) for x in function(*map(self.double, GIVEN))]

    def gradients(self, function, *arrays):
        return self.jax.value_and_grad(lambda *given: _loss(function(*given)), range(len(arrays)))(*arrays)

    def exact_gradients(self, formula, *arrays):
        """Returns a formula's value and gradients in float64."""
        with self.x64(True):
            value, gradients = self.gradients(self.jax.jit(formula), *map(self.double, arrays))
            return self.numpy(value), [self.numpy(g) for g in gradients]

    def has_gradients(self, results):
        found = self.jax.grad(lambda *given: sum(part.sum() for part in results(*given)), (0, 1, 2))(*GIVEN)
        return any(gradient.any() for gradient in found)

    def check(self, cases):
        """Compiles the losses as one program, and the formulas as another. The gradients are those of a sum in which
        each has its own weight."""
        shares = [1.0 + 0.37 * i for i in range(len(cases))]

        def run(functions, arrays):
            def total(*given):
                found = [function(*given) for function in functions]
                return sum(share * _loss(one) for share, one in zip(shares, found)), found

            return self.jax.jit(self.jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)

        calls, formulas = zip(*cases)
        with self.x64(True):
            (_, expected), exact = run(formulas, list(map(self.double, GIVEN)))
            expected, exact = [self.numpy(e) for e in expected], [self.numpy(g) for g in exact]
        (_, found), gradients = run(calls, GIVEN)
        self.check_values([_loss(one) for one in found], expected)
        self.check_gradients(gradients, exact)
        return found


@functools.cache
def framework(name):
    return {"torch": Torch, "jax": Jax}[name]()
