"""Tests an installed wheel; tools/try_wheel.sh runs it. An argument "torch" tests the loss on the CPU."""

import sys
from pathlib import Path

import numpy
import logitless

folder = Path(logitless.__file__).parent
assert logitless.library_path() == folder / "lib" / "liblogitless.so", logitless.library_path()
assert "torch" not in sys.modules and "jax" not in sys.modules
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
assert not [path for path in loaded if "libcu" in path or "libnv" in path], loaded
print(f"logitless {logitless.version()}, numpy {numpy.__version__}: kernels {', '.join(logitless.kernels())}")
assert "4096 tokens x 32000 vocabulary entries" in logitless.explain(4096, 512, 32000)

if "torch" in sys.argv[1:]:
    import torch
    from logitless.torch import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
    target = torch.randint(0, 500, (64,))
    found = linear_cross_entropy(hidden, weight, target)
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.t(), target)
    assert abs(found - wanted) <= 1e-5 * wanted, (found, wanted)
    for ours, theirs in zip(*[torch.autograd.grad(loss, (hidden, weight)) for loss in (found, wanted)]):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    print(f"torch {torch.__version__}: loss and gradients of linear_cross_entropy are cross_entropy's")
