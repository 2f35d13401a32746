"""autochunk with executor="native", against the original functions and generated code."""

import threading

import pytest

torch = pytest.importorskip("torch")

import test_autochunk as cases
import torch.nn.functional as F
from test_autochunk import DEVICE, DIM, ROWS, VOCAB, arguments, check_same, copies, cross_entropy, random, run, z_loss

from logitless import _library as c
from logitless._autochunk.native import Machine, program
from logitless.torch import autochunk
from logitless.torch._autochunk import Unsupported, function, native
from logitless.torch._autochunk.memory import Recorder

BUDGET = 64 << 10
cuda = pytest.mark.skipif(DEVICE != "cuda", reason="no GPU under test (LOGITLESS_TEST_DEVICE=cuda)")


def natively(fn, **options):
    return autochunk(fn, executor="native", **options)


def gradients(function, args):
    """Returns outputs, and the gradients of their sum by all inputs that have one."""
    made = function(*args)
    return made, torch.autograd.grad(made.sum(), [a for a in args if a.requires_grad])


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip((one[0], *one[1]), (other[0], *other[1]), strict=True))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("fn", cases.FUNCTIONS, ids=lambda f: f.__name__)
def test_float64(fn):
    args = arguments(fn, torch.float64)
    chunked = natively(fn, memory_budget="128KiB")
    check_same(fn, chunked, args, 1e-12)
    assert chunked.source().startswith("graph ") and "loop c0" in chunked.source()
    assert "run by the library" in chunked.explain()


@pytest.mark.parametrize("budget", [None, "64KiB"])
@pytest.mark.parametrize("fn", cases.FUNCTIONS, ids=lambda f: f.__name__)
def test_narrow_floats(fn, budget):
    """fp32 is exact to its rounding. 16-bit results are as close to the exact numbers as those of the function
    itself."""
    # With 16 bits, contrastive has chunks by number: the budget gives as many, after a search as long as all else here.
    few = budget is not None and fn is cases.contrastive
    chunked = natively(fn, chunks=8) if few else natively(fn, memory_budget=budget)
    check_same(fn, chunked, arguments(fn, torch.float32), 1e-5)
    for dtype, rounding in ((torch.bfloat16, 2**-7), (torch.float16, 2**-9)):
        args = arguments(fn, dtype)
        doubles = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
        exact, plain, mine = ([*o, *g] for o, g in (run(fn, doubles), run(fn, args), run(chunked, args)))
        for e, p, m in zip(exact, plain, mine):
            if e is not None:
                assert m.dtype == p.dtype == dtype
                assert (m - e).abs().max() <= 1.5 * (p - e).abs().max() + rounding * e.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_head_engine_serves_losses_of_logits_in_fp32(dtype):
    def upcast(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()

    args = random(256, 32, dtype=dtype, scale=0.1), random(4000, 32, dtype=dtype), cases.targets(256, 4000)
    chunked = natively(upcast, gradients="forward")
    doubles = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    loss, found = gradients(chunked, args)
    assert "head engine" in chunked.explain()
    exact, expected = gradients(upcast, doubles)
    assert abs(loss - exact) <= 1e-5 * exact
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    for f, e in zip(found, expected):
        assert (f - e).abs().max() <= rounding * e.abs().max()


@pytest.mark.parametrize("budget", ["48KiB", "64KiB", "300KiB"])
@pytest.mark.parametrize("fn", [z_loss, cases.dpo, cases.mlp], ids=lambda f: f.__name__)
def test_the_budget_bounds_what_is_allocated(fn, budget, threads):
    if DEVICE != "cpu" and budget != "300KiB":
        pytest.skip("a product of a GPU has more for itself")
    threads(1)
    args = [a.detach() for a in arguments(fn, torch.float32)]
    chunked = natively(fn, memory_budget=budget)
    chunked.explain(*[a.requires_grad_() if a.is_floating_point() else a for a in args])
    plan = chunked._planned(args, {})
    for compiled in (plan.forward, plan.backward):
        if compiled is None:
            continue
        result = plan.traced.outputs[0]
        cotangent = torch.ones(result.shape, dtype=result.dtype, device=DEVICE)
        named = dict(zip(plan.traced.names, args)) | {"cotangent0": cotangent}
        inputs = [named[p].detach() for p in compiled.parameters]
        with Recorder(inputs) as recorder:
            results = compiled.function(*inputs)
        limit = int(budget.removesuffix("KiB")) << 10
        assert recorder.peak(results) == max(compiled.after, 1)
        met = compiled.after <= limit
        assert met == ("NOT met" not in compiled.describe(limit))
        assert met or fn is cases.mlp, plan.describe()


@pytest.mark.skipif(DEVICE != "cpu", reason="threads are the CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("budget", [None, BUDGET])
def test_the_same_bits_for_any_number_of_threads(dtype, budget, threads):
    args = arguments(z_loss, dtype)
    found = []
    for count in (1, 2, 3):
        threads(count)
        chunked = natively(z_loss, memory_budget=budget)
        found += [gradients(chunked, args), gradients(chunked, args)]
    assert all(same_bits(found[0], other) for other in found[1:])


def test_calls_from_several_threads():
    args = arguments(z_loss, torch.float32)
    chunked = natively(z_loss)
    expected, found = gradients(chunked, args), []

    def call():
        found.extend(gradients(chunked, args) for _ in range(5))

    workers = [threading.Thread(target=call) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 20 and all(same_bits(expected, other) for other in found)


def test_autograd():
    args = arguments(z_loss, torch.float32)
    for mode in ("forward", "backward"):
        loss = natively(z_loss, gradients=mode)(*args)
        first = torch.autograd.grad(loss, args[:2], retain_graph=True)
        twice = torch.autograd.grad(2 * loss, args[:2])
        for a, b in zip(first, twice):
            torch.testing.assert_close(2 * a, b)
    # Two uses in one graph, and a second derivative.
    chunked = natively(cross_entropy)
    hidden, weight, target = copies(args)
    (chunked(hidden, weight, target) + 3 * chunked(hidden, weight, target)).backward()
    expected = torch.autograd.grad(cross_entropy(*args), args[0])[0]
    torch.testing.assert_close(hidden.grad, 4 * expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="second derivatives"):  # a gradient penalty would be left out
        torch.autograd.grad(chunked(*args), args[0], create_graph=True)[0].sum().backward()


def test_without_gradients_and_with_other_results():
    def several(hidden, weight, target):
        logits = hidden @ weight.T
        return {"largest": logits.argmax(-1), "hit": logits.argmax(-1) == target, "sum": logits.sum(-1), "n": 3}

    hidden, weight, target = arguments(several, torch.float32)
    target = target.clamp(min=0)
    expected = several(hidden, weight, target)
    made = natively(several)(hidden.detach(), weight.detach(), target)
    assert made["n"] == 3
    assert made["largest"].dtype == torch.int64 and torch.equal(made["largest"], expected["largest"])
    assert made["hit"].dtype == torch.bool and torch.equal(made["hit"], expected["hit"])
    torch.testing.assert_close(made["sum"], expected["sum"].detach(), rtol=1e-5, atol=1e-5)


def test_inputs_that_are_not_contiguous():
    hidden, weight, target = arguments(z_loss, torch.float32)
    turned = hidden.detach().t().contiguous().t().requires_grad_()
    unaligned = torch.empty(VOCAB * DIM + 1, device=DEVICE)[1:].view(VOCAB, DIM)
    with torch.no_grad():
        unaligned.copy_(weight)
    assert not turned.is_contiguous() and unaligned.data_ptr() % 16
    chunked = natively(z_loss)
    expected = gradients(chunked, [hidden, weight, target])
    assert same_bits(expected, gradients(chunked, [turned, unaligned.requires_grad_(), target]))
    # The copy of a tensor that is not contiguous counts as memory.
    planned = [natively(z_loss, chunks=5)._planned([h, weight, target], {}) for h in (hidden, turned)]
    assert planned[1].forward.after - planned[0].forward.after == ROWS * DIM * 4
    assert planned[1].source() == planned[0].source()


def test_modules():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(DIM, VOCAB), torch.nn.GELU(), torch.nn.Linear(VOCAB, 3)).to(DEVICE)
    x = random(ROWS, DIM, dtype=torch.float32)
    layer(x).square().sum().backward()
    expected = [p.grad for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = None
    natively(layer, memory_budget=BUDGET)(x).square().sum().backward()
    for p, e in zip(layer.parameters(), expected):
        torch.testing.assert_close(p.grad, e, rtol=1e-4, atol=1e-5)


compiles = pytest.mark.skipif(
    not hasattr(torch._dynamo, "nonstrict_trace"), reason="torch without nonstrict_trace breaks the graph"
)


@compiles
@pytest.mark.parametrize("gradients_when", ["forward", "backward"])
def test_torch_compile_has_no_graph_break(gradients_when):
    args = arguments(z_loss, torch.float32)
    chunked = natively(z_loss, gradients=gradients_when)

    def step(hidden, weight, target):
        return 2 * chunked(hidden * 1.5, weight, target=target)

    expected = gradients(step, args)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same_bits(expected, gradients(compiled, args))
    # Calls without gradients; other shapes; compiled calls stay valid when the cache of programs is cleared.
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), expected[0].detach())
    shorter = [args[0][:20].detach().requires_grad_(), args[1], args[2][:20]]
    assert same_bits(gradients(step, shorter), gradients(compiled, shorter))
    native._runner.cache_clear()
    program.cache_clear()
    assert same_bits(expected, gradients(compiled, args))


@compiles
def test_torch_compile_of_a_module_and_what_it_cannot_see():
    torch.manual_seed(0)
    layer = torch.nn.Linear(DIM, VOCAB).to(DEVICE)

    @autochunk(executor="native", memory_budget=BUDGET)
    def loss(hidden, target):
        return F.cross_entropy(layer(hidden), target)

    hidden, _, target = arguments(z_loss, torch.float32)
    loss(hidden, target).backward()
    expected, layer.weight.grad = layer.weight.grad, None
    torch._dynamo.reset()
    torch.compile(lambda *a: loss(*a) * 1, backend="aot_eager", fullgraph=True)(hidden, target).backward()
    assert torch.equal(layer.weight.grad, expected)

    held = torch.ones(VOCAB, device=DEVICE)
    scaled = natively(lambda hidden: (hidden.sum(-1, keepdim=True) * held).exp().sum())
    torch.testing.assert_close(scaled(hidden), (hidden.sum(-1, keepdim=True) * held).exp().sum())
    with pytest.raises(Exception) as raised:
        torch.compile(lambda x: scaled(x) * 1, backend="aot_eager", fullgraph=True)(hidden)
    # PyTorch's error comes first in the chain.
    error, texts = raised.value, []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("holds tensors of its own, [600]; pass them as arguments" in text for text in texts)


def test_the_operator():
    args = [a.detach() for a in arguments(cross_entropy, torch.float32)]
    chunked = natively(cross_entropy)
    chunked(*args)
    request = chunked.last.forward.request
    named = dict(zip(chunked.last.traced.names, args))
    inputs = [named[p] for p in chunked.last.forward.parameters]
    numbers = request.text, request.budget, request.chunks, request.chunk, request.machine.head_engine
    torch.library.opcheck(torch.ops.logitless.program, (inputs, *numbers))


def test_programs_that_were_evicted():
    args = arguments(z_loss, torch.float32)
    chunked = natively(z_loss)
    expected = gradients(chunked, args)
    for _ in range(2):
        native._runner.cache_clear()
        program.cache_clear()
        assert same_bits(expected, gradients(chunked, args))


def test_refusals():
    hidden, weight, target = arguments(cross_entropy, torch.float32)
    chunked = natively(cross_entropy)
    with pytest.raises(ValueError, match="executor: expected one of auto, python, native, got 'eager'"):
        autochunk(cross_entropy, executor="eager")
    with pytest.raises(Unsupported, match="dtype torch.uint8 has no form in a tensor program"):
        natively(lambda x: (x * 2.0).sum())(torch.ones(3, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(Unsupported, match="dtype torch.complex64 has no form"):
        natively(lambda x: (x * 2).real.sum())(torch.ones(3, dtype=torch.complex64, device=DEVICE))
    with pytest.raises(Unsupported, match="aten.nextafter"):
        natively(lambda x: torch.nextafter(x, x))(hidden.detach())
    with pytest.raises(Unsupported, match=f"returns a tensor on meta; expected it on {hidden.device}"):
        natively(lambda x: x.sum().to("meta"))(hidden)
    with pytest.raises(NotImplementedError, match="runs on cpu and cuda"):
        chunked(*(torch.empty_like(a, device="meta") for a in (hidden, weight, target)))
    with pytest.raises(ValueError, match="strict: forward_and_gradients takes"):
        natively(cross_entropy, memory_budget=8, strict=True)(hidden, weight, target)


@cuda
def test_a_cuda_graph():
    args = copies(arguments(z_loss, torch.bfloat16))
    chunked = natively(z_loss)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = gradients(chunked, args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(chunked, args)
    # Launches of the graph stay valid when the cache of programs is cleared.
    native._runner.cache_clear()
    program.cache_clear()
    with torch.no_grad():
        for _ in range(2):
            made[0].zero_()
            for g in made[1]:
                g.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(expected, made)

    fresh = natively(lambda *a: 2 * z_loss(*a))
    with pytest.raises(RuntimeError, match="run it once before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fresh(*args)


@cuda
def test_streams_and_torch_compile_with_cuda_graphs():
    args = arguments(z_loss, torch.bfloat16)
    chunked = natively(z_loss)
    expected = gradients(chunked, args)
    side = torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = gradients(chunked, args)
        torch.cuda.current_stream().wait_stream(side)
        assert same_bits(expected, found)
    compiled = torch.compile(lambda *a: chunked(*a) * 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bits(expected, gradients(compiled, args))


def test_gradients_of_the_forward_are_multiplied_where_they_are():
    """Gradients are scaled in place, except where another backward follows or the results belong to someone else."""
    args = arguments(z_loss, torch.float32)
    wanted = [a for a in args if a.requires_grad]
    loss = 3.0 * natively(z_loss)(*args)
    made = {t.data_ptr() for t in loss.grad_fn.next_functions[0][0].saved_tensors if t.numel()}
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    again = torch.autograd.grad(loss, wanted, retain_graph=True)
    last = torch.autograd.grad(loss, wanted)
    assert all(same_bits(first, other) for other in (again, last))
    assert not made & {g.data_ptr() for g in first} and made == {g.data_ptr() for g in last}


def test_a_gpu_keeps_a_product_within_the_memory_of_before(monkeypatch):
    """A softmax over learnt keys: with its scores kept there are 6 matrix products, 7 without."""
    monkeypatch.setattr(native, "machine_of", lambda device: Machine(c.DEVICE_CUDA, 90, threads=0, head_engine=True))

    def memory(x, keys, values):
        return torch.softmax(x @ keys.T, -1) @ values

    args = [torch.empty(n, 1024, dtype=torch.bfloat16, requires_grad=True) for n in (2048, 32768, 32768)]
    plan = autochunk(memory, executor="native")._planned(tuple(args), {})
    assert plan.kept_bytes == 2 * 2048 * 32768
    monkeypatch.setattr(function, "_may_keep", lambda limits, device: False)
    before = autochunk(memory, executor="native")._planned(tuple(args), {})
    assert plan.seconds <= 0.9 * before.seconds
    assert plan.kept_bytes + plan.backward.after <= max(before.forward.after, before.backward.after)
