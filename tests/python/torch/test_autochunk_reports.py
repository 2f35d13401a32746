"""Reports of memory by a chunked function: budgets that are not met, the memory of the original function, and values
that a report leaves out."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import DEVICE

from logitless import _library as c
from logitless._autochunk.locations import brief
from logitless._autochunk.native import Machine
from logitless._autochunk.options import Limits, Unsupported
from logitless._autochunk.plan import compile_text
from logitless.torch import autochunk

TOKENS, DIM, VOCAB = 256, 16, 2048
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def loss(hidden, weight, target):
    logits = (hidden @ weight.T).float()
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()


def arguments(dtype=torch.float32):
    hidden, weight = (torch.rand(rows, DIM, dtype=dtype, requires_grad=True) for rows in (TOKENS, VOCAB))
    return hidden, weight, torch.arange(TOKENS)


of_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="the budgets are for plans of a CPU")


@of_the_cpu
@pytest.mark.parametrize("executor", ["native", "python"])
def test_a_budget_that_is_not_met_is_a_warning(executor):
    """A plan over the budget warns once, with the budget, its memory and a budget that works. It is an error with
    strict."""
    args = torch.rand(64, 512, requires_grad=True), torch.rand(64, 512, requires_grad=True)

    def missed(a, b):
        return ((a.T @ b) @ (b.T @ a)).square().sum()

    chunked = autochunk(missed, memory_budget=4096, executor=executor)
    with pytest.warns(UserWarning, match=r"autochunk: \w+ takes .*iB beyond .* memory_budget is 4.0 KiB: .*would do") as warned:
        chunked(*args)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunked(*args)
        chunked.explain()
        autochunk(missed, executor=executor)(*args)
        least = int(re.search(r"a budget of (\d+) would do", str(warned[0].message))[1])
        warnings.filterwarnings("ignore", "autochunk: .* meets memory_budget")  # in more time
        autochunk(missed, memory_budget=least, executor=executor)(*args)
    with pytest.raises(ValueError, match="strict: .* memory_budget is 4.0 KiB"):
        autochunk(missed, memory_budget=4096, strict=True, executor=executor)(*args)


@of_the_cpu
def test_a_missed_budget_takes_few_chunks():
    """The least plan of a covariance has chunks of 2 rows, which add to all of it 256 times; within a tenth of its memory
    one has 8."""
    def vicreg(a, b):
        total = F.mse_loss(a, b)
        for x in (a, b):
            x = x - x.mean(0)
            covariance = (x.T @ x) / (x.shape[0] - 1)
            off = covariance.square().sum() - covariance.diagonal().square().sum()
            total = total + F.relu(1 - torch.sqrt(x.var(0) + 1e-4)).mean() + off / x.shape[1]
        return total

    args = [torch.rand(512, 2048, requires_grad=True) for _ in range(2)]
    text = autochunk(vicreg, memory_budget=4 << 20, executor="native").explain(*args)
    assert "NOT met" in text and max(int(n) for n in re.findall(r" in (\d+) chunks of ", text)) <= 32, text


@of_the_cpu
def test_the_price_of_a_budget_is_reported():
    """Chunks of few rows, each of which adds to all of the weight's gradient, meet a small budget, and a warning says in
    what time. The budget that it names has a plan that is nearly as fast as the fastest."""
    args = arguments()[:2]

    def confidence(hidden, weight):
        return (hidden @ weight.T).softmax(-1).square().sum(-1).log().mean()

    chunked = autochunk(confidence, memory_budget="32KiB", executor="native")
    with pytest.warns(UserWarning, match=r"meets memory_budget .* predicted to take [\d.]+ times as long as the fastest plan"):
        chunked(*args)
    said = re.search(r"predicted to take ([\d.]+) times .*hold .*%\w+ .*; a budget of (\d+) \(", chunked.explain())
    assert float(said[1]) >= 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = autochunk(confidence, memory_budget=int(said[2]), executor="native").explain(*args)
    assert "predicted to take" not in text and "NOT met" not in text


@of_the_cpu
@pytest.mark.parametrize("executor", ["native", "python"])
def test_a_budget_of_a_quarter_costs_little(executor):
    """The fastest plan runs that fits beside the scratch of matrix products: chunks of some rows, not of one. Calls of
    generated code take time, too."""
    def decoupled_contrastive(a, b):
        own = torch.eye(a.shape[0], dtype=torch.bool).repeat(1, 2)
        similarity = torch.cat((a @ a.T, a @ b.T), 1).masked_fill(own, -torch.inf)
        return (similarity.logsumexp(1) - (a * b).sum(1)).mean()

    args = [torch.rand(1024, 64, requires_grad=True) for _ in range(2)]
    text = autochunk(decoupled_contrastive, memory_budget=1400 << 10, executor=executor).explain(*args)
    times = max(map(float, re.findall(r"predicted to take ([\d.]+) times", text)), default=1.0)
    assert "NOT met" not in text and (times < 4 if executor == "native" else 1 < times < 6), text


def size(number: str, unit: str) -> float:
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_explain_begins_with_what_the_function_takes(executor, gradients):
    """The memory of the function itself, as PyTorch's allocator counts it: logits, their softmax, two gradients of
    them, and sums."""
    from logitless.torch._peak import peak_of

    args = arguments()

    def whole():
        made = loss(*args)
        return made, *torch.autograd.grad(made, args[:2])

    whole()  # a GPU's library takes its workspace once
    took, _ = peak_of(whole)
    text = autochunk(loss, executor=executor, gradients=gradients).explain(*args)
    said = re.search(r"\nthe function itself takes ([\d.]+) (\w+) beyond inputs and results, this ([\d.]+) (\w+), ([\d.]+) % less\n", text)
    assert size(said[1], said[2]) == pytest.approx(took, rel=0.1)
    after = max(size(*found) for found in re.findall(r"without loops, ([\d.]+) (\w+) with", text))
    assert size(said[3], said[4]) == pytest.approx(after)
    assert float(said[5]) == pytest.approx(100 * (1 - after / size(said[1], said[2])), abs=0.5)


def test_gradients_of_two_readers_are_added_in_place():
    """A value that two operations read takes two gradients, and no third matrix for their sum."""
    from logitless.torch._peak import peak_of

    def of_topk(h, w, y):
        z = h @ w.T
        return (z.topk(5, -1).values.logsumexp(-1) - z.gather(1, y[:, None])[:, 0]).mean()

    args = arguments()
    took, _ = peak_of(lambda: torch.autograd.grad(of_topk(*args[:3]), args[:2]))
    said = re.search(r"the function itself takes ([\d.]+) (\w+)", autochunk(of_topk, executor="python").explain(*args[:3]))
    assert size(said[1], said[2]) == pytest.approx(took, rel=0.1)


@pytest.mark.parametrize("budget", [None, "512KiB" if DEVICE == "cpu" else "2MiB"])
def test_what_does_not_matter_is_left_out(budget):
    """Rows of 1 KiB and logits of the head engine, which takes bf16 on a GPU, are not reported as failures."""
    args = arguments(torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    text = autochunk(loss, executor="native", memory_budget=budget).explain(*args)
    assert "on the head engine" in text and "not chunked" not in text


def test_what_matters_is_reported():
    first, second = (torch.rand(32, 512, requires_grad=True) for _ in range(2))

    def whole(a, b):
        c = a.T @ b
        return (c.flatten()[7:-5].reshape(-1, 4).softmax(0) * 2).sum()

    text = autochunk(whole, executor="native", memory_budget=2048).explain(first, second)
    found = re.findall(r"not chunked: .*f32\[([\d, ]+)\]", text)
    assert found and all(eval("*".join(shape.split(","))) * 4 > 0.01 * 2**20 for shape in found)


LONG = "fast = autochunk(lambda a, b=(1, 2): f(a)[0], memory_budget=3); print(fast(x).item(), fast(y).item(), fast(z).item())"


@pytest.mark.parametrize("code, shown", [
    ("y = f(lambda x: x)", "y = f(lambda x: x)"),  # a short line as it is
    (LONG, "lambda a, b=(1, 2): f(a)[0]"),
    (LONG.replace("f(a)[0]", "f(')', a)"), "lambda a, b=(1, 2): f(')', a)"),
    (LONG.replace("f(a)[0]", "[a, b]") + "  # lambda", "lambda a, b=(1, 2): [a, b]"),
    (LONG.replace("memory_budget=3", "lambda: 3"), LONG.replace("memory_budget=3", "lambda: 3")[:99] + "…"),  # two lambdas
    ("z = " + "x + " * 30 + "(", ("z = " + "x + " * 30)[:99] + "…"),  # it goes on in the next line
])
def test_a_long_line_of_code_is_cut(code, shown):
    assert brief(code) == shown and len(shown) <= 100


def test_checked_arguments_of_distributions_are_refused_with_the_remedy():
    z, target = torch.randn(4, 8), torch.arange(4)
    with pytest.raises(Unsupported, match="validate_args=False"):
        # The default is another one once torch.compile ran.
        autochunk(lambda z: torch.distributions.Categorical(logits=z, validate_args=True).log_prob(target).sum())(z)


PRODUCT = """graph forward(%h: bf16[1024, 512], %w: bf16[4096, 512]) {
  %z = dot %h, %w contract(1; 1) : f32[1024, 4096]
  %p = sigmoid %z
  %g = cast %p : bf16[1024, 4096]
  %s = reduce_sum %p dims(1)
  return s: %s, g: %g
}
"""


def test_explanations_name_epilogues_and_times():
    """A plan for a GPU, which need not be here: what is fused into which product, and the predicted times."""
    machine = Machine(c.DEVICE_CUDA, 90, threads=0)
    made = compile_text(PRODUCT, "forward", ["h", "w"], lambda program: (program.text, program.arena_bytes), Limits(0),
                        machine, function=lambda request: print, locations={"z": "loss.py:3: z = h @ w.T"})
    text = made.describe(0)
    assert "  loss.py:3: z = h @ w.T: z: the kernel of the product 1024 x 4096 x 512 also computes sigmoid; row sum to s; stores g" in text
    assert 1e-6 < made.seconds <= made.plain_seconds < 1e-3 and re.search(r"  predicted: \S+ ms; without loops \S+ ms\n", text), text
