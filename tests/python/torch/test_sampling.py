"""linear_sample against exact probabilities, and linear_top_logprobs against the logits."""

import math

import pytest
import torch

import logitless.torch.sampling as sampling
from logitless.torch import _xp as xp
from logitless.torch import linear_logprobs, linear_sample, linear_top_logprobs
from logitless.torch._noise import gumbel, uniform
from logitless.torch.losses._formulas import chunked

DRAWS = 20000


def head(tokens, dim, vocab, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (tokens, dim), (vocab, dim), (vocab,)
    made = [torch.randn(*shape, generator=g, device="cpu") for shape in shapes]
    return [t.to(dtype).to(torch.get_default_device()) for t in made]


def logits(hidden, weight, bias, softcap=None, logit_scale=1.0):
    z = (hidden.double() @ weight.double().T + bias.double()) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def kept(z, top_k=None, top_p=None, min_p=None):
    """Returns whether each entry of a row is kept, by the definitions."""
    keep = torch.ones_like(z, dtype=torch.bool)
    if top_k is not None:
        keep &= z >= z.sort(descending=True).values[top_k - 1]
    if top_p is not None:
        p = z.masked_fill(~keep, -math.inf).softmax(0)
        order = p.argsort(descending=True)
        total, chosen = 0.0, torch.zeros_like(keep)
        for i in order:
            chosen[i] = True
            total += p[i].item()
            if total >= top_p:
                break
        keep &= chosen
    if min_p is not None:
        p = z.softmax(0)
        keep &= p >= min_p * p.max()
    return keep


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.5),
        dict(temperature=3.0, softcap=2.0, logit_scale=0.7),
        dict(top_k=5),
        dict(top_p=0.8),
        dict(top_k=9, top_p=0.6, temperature=2.0),
        dict(min_p=0.05),
        dict(min_p=0.02, top_p=0.95, top_k=20),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_have_the_probabilities_of_the_softmax(options, dtype):
    """A chi-square statistic over the entries that are expected at least 8 times."""
    hidden, weight, bias = head(1, 8, 40, dtype)
    filters = {k: v for k, v in options.items() if k in ("top_k", "top_p", "min_p")}
    shape = {k: v for k, v in options.items() if k in ("softcap", "logit_scale")}
    z = logits(hidden, weight, bias, **shape)[0] / options.get("temperature", 1.0)
    keep = kept(z, **filters)
    p = z.masked_fill(~keep, -math.inf).softmax(0)
    made = linear_sample(hidden.expand(DRAWS, -1), weight, bias, seed=7, **options)
    found = torch.bincount(made.tokens, minlength=40).double()
    assert found[~keep].sum() == 0
    often = p * DRAWS >= 8
    statistic = ((found - p * DRAWS)[often] ** 2 / (p * DRAWS)[often]).sum().item()
    free = int(often.sum()) - 1
    assert statistic < free + 5 * math.sqrt(2 * free) + 5


def test_a_flat_distribution_over_many_entries():
    """Noise of few bits would prefer the first of equal entries."""
    draws, vocab = 3000, 20000
    tokens = linear_sample(torch.zeros(draws, 4), torch.ones(vocab, 4), seed=1).tokens.double()
    assert abs(tokens.mean().item() / (vocab / 2) - 1) < 5 / math.sqrt(3 * draws)
    assert abs(tokens.var().item() / (vocab**2 / 12) - 1) < 0.1
    expected = vocab * (1 - math.exp(-draws / vocab))
    assert abs(tokens.unique().numel() - expected) < 100


def test_noise_is_that_of_a_gumbel_distribution():
    noise = gumbel(torch.tensor([1, 2]), torch.arange(64), 4096).double().flatten().sort().values
    exact = torch.exp(-torch.exp(-noise))
    steps = (torch.arange(noise.numel()) + 0.5) / noise.numel()
    assert (exact - steps).abs().max() < 1.95 / math.sqrt(noise.numel())  # Kolmogorov-Smirnov, 0.001


def test_entries_that_share_a_result_of_philox_are_independent():
    """Chi-square statistics of counts over equally likely cells, each of several bits of two or eight entries."""
    u = uniform()(torch.arange(1000, 1256)[:, None], torch.tensor(7), torch.arange(4096)[None]).double()
    u = u.view(256, 128, 4, 4, 2).transpose(2, 3).reshape(-1, 8)  # 32 entries are four of eight
    first, second = ((u * 2**bits).long() % 16 for bits in (4, 20))  # bits of the shared result, and of the other one
    others = first.view(256, 128, 4, 8).roll(1, 0).view(-1, 8)  # of the token before
    pairs = [(x[:, i], y[:, j]) for x in (first, second) for y in (first, second, others) for i in range(8) for j in range(8)
             if x is not y or i < j]  # fmt: skip
    cells = [16 * a + b for a, b in pairs] + [(digits >> 3 << torch.arange(8)).sum(1) for digits in (first, second)]
    for counts in (torch.bincount(c, minlength=256).double() for c in cells):
        expected = len(u) / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_does_not_depend_on_its_batch_and_has_the_bits_of_training(dtype):
    hidden, weight, bias = head(300, 24, 1000, dtype)
    options = dict(top_k=50, top_p=0.9, seed=5)
    counter = torch.arange(300) + 12345
    whole = linear_sample(hidden, weight, bias, counter=counter, **options)
    pick = torch.tensor([299, 3, 17, 150])
    some = linear_sample(hidden[pick], weight, bias, counter=counter[pick], **options)
    assert torch.equal(some.tokens, whole.tokens[pick])
    small = linear_sample(hidden, weight, bias, counter=counter, memory_budget="640KiB", **options)
    assert torch.equal(small.tokens, whole.tokens)
    for made, budget in ((whole, None), (small, "640KiB")):
        assert torch.equal(made.log_prob, linear_logprobs(hidden, weight, whole.tokens, bias, memory_budget=budget)[0])
    assert not torch.equal(linear_sample(hidden, weight, bias, counter=counter + 300, **options).tokens, whole.tokens)


MIXED = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("backend", ["", "portable"])
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_two_dtypes_have_the_bits_of_training(dtypes, backend, monkeypatch):
    """Log-probabilities are those of linear_logprobs for the same tensors, and tokens those of the widened head."""
    monkeypatch.setenv("LOGITLESS_BACKEND", backend)
    hidden, weight, bias = head(90, 24, 1000, torch.float32)
    hidden, weight = hidden.to(dtypes[0]), weight.to(dtypes[1])
    forbidden = torch.zeros(1000).masked_fill(torch.arange(1000) % 3 == 0, -math.inf)
    for options in (dict(top_k=50, top_p=0.9), dict(temperature=0.0), dict(temperature=0.0, logit_bias=forbidden)):
        tokens, log_prob = linear_sample(hidden, weight, bias, seed=5, **options)
        assert torch.equal(log_prob, linear_logprobs(hidden, weight, tokens, bias)[0])
        assert torch.equal(tokens, linear_sample(hidden.float(), weight.float(), bias, seed=5, **options).tokens)
    made = linear_top_logprobs(hidden, weight, tokens, bias, k=6)
    assert torch.equal(made.top_ids, linear_top_logprobs(hidden.float(), weight.float(), k=6, bias=bias).top_ids)
    if not (hidden.is_cuda or backend):  # the target's may differ by a rounding there
        assert torch.equal(made.log_prob, log_prob)
    assert torch.equal(made.top_log_probs, linear_logprobs(hidden, weight, made.top_ids, bias)[0]) or hidden.is_cuda


def least_kept(z, top_k, top_p):
    """Returns the least entry that top_k and top_p keep of each row [N, 1], in float64."""
    ordered = z.sort(descending=True).values[:, :top_k]
    p = ordered.softmax(1)
    kept = (p.cumsum(1) - p < top_p) | (top_p >= 1)
    return torch.where(kept, ordered, math.inf).amin(1, keepdim=True)


def on_the_librarys_kernels(hidden, monkeypatch):
    """Refuses programs and a second GEMM on a GPU."""
    if hidden.is_cuda:
        monkeypatch.setattr(sampling, "chunked", None)
        monkeypatch.setattr(xp, "log_probs", None)


@pytest.mark.parametrize(
    "options",
    [
        dict(), dict(temperature=0.0), dict(temperature=0.4, min_p=0.05), dict(softcap=4.0, logit_scale=0.7),
        dict(temperature=torch.linspace(0, 2, 300), min_p=torch.linspace(0, 0.2, 300)), dict(logit_bias=torch.arange(1000) / 500.0),
        dict(top_k=20), dict(top_p=0.7), dict(top_k=30, top_p=0.9, min_p=0.01, temperature=2.0),
        dict(top_k=500, top_p=torch.linspace(0.01, 1, 300), temperature=torch.linspace(0, 2, 300)),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_have_the_largest_scores(options, monkeypatch):
    """On a GPU without a program and without a second GEMM."""
    hidden, weight, bias = head(300, 24, 1000, torch.bfloat16)
    options = {k: v.to(hidden.device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    counter = torch.arange(300) * 3 + (1 << 32) - 400
    shape = {k: v for k, v in options.items() if k in ("softcap", "logit_scale")}
    z = logits(hidden, weight, bias, **shape) + options.get("logit_bias", 0.0)
    temperature = torch.as_tensor(options.get("temperature", 1.0)).double().expand(300)[:, None]
    z = (z - z.amax(1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
    noise = gumbel(torch.tensor(xp.mixed(9)), counter, 1000).double()
    least = torch.as_tensor(options.get("min_p", 0.0)).double().expand(300)[:, None].log()
    score = z + torch.where(temperature > 0, noise, 0.0)
    top_p = torch.as_tensor(options.get("top_p", 1.0)).double().expand(300)[:, None]
    bounds = [least_kept(z, options.get("top_k", 1000), torch.where(top_p < 1, top_p + by, 1.0)) for by in (1e-5, -1e-5)]
    on_the_librarys_kernels(hidden, monkeypatch)
    made = linear_sample(hidden, weight, bias, seed=9, counter=counter, **options)
    found, surely = made.tokens[:, None], (z >= least + 1e-4) & (z >= bounds[1] + 1e-4)
    assert ((z >= least - 1e-4) & (z >= bounds[0] - 1e-4)).gather(1, found).all()
    assert (score.gather(1, found)[:, 0] >= score.masked_fill(~surely, -math.inf).amax(1) - 1e-3).all()
    assert torch.equal(made.log_prob, linear_logprobs(hidden, weight, made.tokens, bias, **shape)[0])


def test_parameters_of_each_token():
    hidden, weight, bias = head(60, 8, 40)
    hidden = hidden[:1].expand(60, -1).reshape(6, 10, 8)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 1.0])[:, None].expand(6, 10)
    top_p = torch.tensor([1.0, 1.0, 0.3, 1.0, 1.0, 0.01])[:, None].expand(6, 10)
    both = linear_sample(hidden, weight, bias, temperature=temperature, top_p=top_p, seed=2)
    counter = torch.arange(60).view(6, 10)
    for i in range(6):
        one = linear_sample(
            hidden[i], weight, bias, temperature=float(temperature[i, 0]), top_p=float(top_p[i, 0]), seed=2,
            counter=counter[i],
        )
        assert torch.equal(one.tokens, both.tokens[i])
    best = logits(hidden[0], weight, bias).argmax(-1)
    assert torch.equal(both.tokens[0], best) and torch.equal(both.tokens[5], best)
    assert torch.equal(linear_sample(hidden[0], weight, bias, temperature=0).tokens, best)


def test_a_bias_of_logits_forbids_entries():
    hidden, weight, bias = head(500, 8, 40)
    forbidden = torch.zeros(40).masked_fill(torch.arange(40) % 2 == 0, -math.inf)
    made = linear_sample(hidden, weight, bias, logit_bias=forbidden, seed=3)
    assert (made.tokens % 2 == 1).all()
    assert torch.equal(made.log_prob, linear_logprobs(hidden, weight, made.tokens, bias)[0])


def test_seeds_and_generators():
    hidden, weight, bias = head(200, 8, 40)
    draw = lambda **given: linear_sample(hidden, weight, bias, **given).tokens  # noqa: E731
    a, b = (draw(generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    assert torch.equal(a, draw(generator=torch.Generator().manual_seed(1))) and not torch.equal(a, b)
    torch.manual_seed(0)
    first = draw()
    assert not torch.equal(first, draw())
    torch.manual_seed(0)
    assert torch.equal(first, draw())
    assert torch.equal(draw(seed=-3), draw(seed=-3)) and not torch.equal(draw(seed=3), draw(seed=3 + (1 << 40)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_log_probabilities(dtype, monkeypatch):
    hidden, weight, bias = head(50, 16, 300, dtype)
    if dtype == torch.bfloat16:
        on_the_librarys_kernels(hidden, monkeypatch)
    hidden = hidden.view(5, 10, 16)
    target = torch.randint(300, (5, 10))
    made = linear_top_logprobs(hidden, weight, target, bias, k=7, logit_scale=0.5)
    exact = logits(hidden, weight, bias, logit_scale=0.5).log_softmax(-1)
    values, ids = exact.topk(7)
    torch.testing.assert_close(made.top_log_probs.double(), values, rtol=1e-5, atol=1e-5)
    assert (exact.gather(-1, made.top_ids) - values).abs().max() < 1e-5  # the same ids, but for near ties
    alone = linear_logprobs(hidden, weight, target, bias, logit_scale=0.5)[0]
    if hidden.device.type == "cpu":
        assert torch.equal(made.log_prob, alone)
    torch.testing.assert_close(made.log_prob, alone, rtol=1e-5, atol=1e-5)
    again = linear_logprobs(hidden, weight, made.top_ids, bias, logit_scale=0.5)[0]
    assert torch.equal(again, made.top_log_probs) and (made.top_log_probs.diff(dim=-1) <= 0).all()
    assert linear_top_logprobs(hidden, weight, bias=bias, k=300).top_ids.sort(-1).values.equal(
        torch.arange(300).expand(5, 10, 300)
    )


def test_equal_entries_are_in_the_order_of_their_ids():
    for vocab, dtype in ((9, torch.float32), (5000, torch.bfloat16)):  # the latter are more than a thread block sorts
        made = linear_top_logprobs(torch.zeros(3, 4, dtype=dtype), torch.ones(vocab, 4, dtype=dtype), k=9)
        assert made.top_ids.tolist() == [list(range(9))] * 3 and made.log_prob is None


@pytest.mark.parametrize(
    "given, error, text",
    [
        (dict(temperature=-1.0), ValueError, "temperature: expected a number from 0, got -1.0"),
        (dict(temperature=torch.ones(3)), ValueError, r"temperature: expected \[4\] or \[\], got \[3\]"),
        (dict(top_k=0), ValueError, "top_k: expected a whole number from 1, got 0"),
        (dict(top_k=41), ValueError, "top_k: expected at most 40"),
        (dict(top_p=0.0), ValueError, "top_p: expected a number above 0 to 1, got 0.0"),
        (dict(min_p=2.0), ValueError, "min_p: expected a number from 0 to 1, got 2.0"),
        (dict(logit_bias=torch.zeros(3)), ValueError, r"logit_bias: expected \[40\], got \[3\]"),
        (dict(seed=1.5), TypeError, "seed: expected an int or None, got 1.5"),
        (dict(seed=1, generator=torch.Generator()), ValueError, "generator: expected None beside a seed"),
        (dict(generator=3), TypeError, "generator: expected a torch.Generator or None, got int"),
        (dict(counter=torch.zeros(4)), TypeError, "counter: expected int32 or int64"),
        (dict(softcap=-1.0), ValueError, "softcap: expected a number above 0"),
    ],
    ids=str,
)
def test_bad_arguments(given, error, text):
    hidden, weight, bias = head(4, 8, 40)
    with pytest.raises(error, match=text):
        linear_sample(hidden, weight, bias, **given)


def test_a_low_temperature_is_greedy_and_an_empty_head_is_refused():
    hidden, weight, bias = head(50, 8, 40)
    best = linear_sample(hidden, weight, bias, temperature=0.0).tokens
    for low in (1e-6, 1e-30, 1e-42):
        assert torch.equal(linear_sample(hidden, weight, bias, temperature=low, seed=1).tokens, best)
    for empty in (weight[:0], weight[:, :0]):
        with pytest.raises(ValueError, match="weight: expected .* at least one row and column, got"):
            linear_sample(hidden[:, : empty.shape[1]], empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_are_the_heads_largest_entries(dtype, monkeypatch):
    hidden, weight, bias = head(60, 16, 400, dtype)
    weight[200:], bias[200:] = weight[:200].clone(), bias[:200].clone()  # the first of two equal ones
    monkeypatch.setattr(sampling, "chunked", None)  # no program
    made = linear_sample(hidden.view(6, 10, 16), weight, bias, temperature=0, softcap=3.0)
    found = linear_logprobs(hidden, weight, made.tokens.view(-1), bias, softcap=3.0, return_argmax=True)
    assert torch.equal(made.tokens.view(-1), found[3]) and (made.tokens < 200).all()
    assert torch.equal(made.log_prob.view(-1), found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [dict(temperature=0), dict(), dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1), dict(top_k=5, top_p=0.9)], ids=str
)
def test_a_nan_among_the_logits_gives_no_number(options, dtype):
    """A NaN or an infinity of one entry, or of one token."""
    hidden, weight, bias = head(6, 8, 300, dtype)
    odd = hidden.clone(), *(weight.clone() for _ in range(2)), bias.clone()
    odd[0][2, 3] = odd[1][50, 1] = odd[3][299] = math.nan
    odd[2][280] = math.inf
    for x, w, b in ((odd[0], weight, bias), (hidden, odd[1], bias), (hidden, odd[2], bias), (hidden, weight, odd[3])):
        hit = torch.arange(6) == 2 if x is odd[0] else torch.ones(6, dtype=torch.bool)
        made = linear_sample(x, w, b, seed=1, **options)
        assert torch.equal(made.log_prob.isnan(), hit) and (made.tokens >= 0).all() and (made.tokens < 300).all()
        best = linear_top_logprobs(x, w, made.tokens, b, k=4)
        assert torch.equal(best.top_log_probs.isnan().all(-1), hit) and torch.equal(best.log_prob.isnan(), hit)


def test_floats_and_a_temperature_without_dimensions():
    hidden, weight, bias = head(4, 8, 40)
    zeros = torch.zeros(40, dtype=torch.long, device=hidden.device)
    with pytest.raises(TypeError, match="^bias: expected floats, got torch.int64"):
        linear_sample(hidden, weight, zeros, seed=1)
    with pytest.raises(TypeError, match="^logit_bias: expected floats, got torch.int64"):
        linear_sample(hidden, weight, bias, logit_bias=zeros, seed=1)
    one, other = (linear_sample(hidden, weight, bias, temperature=t, seed=1) for t in (0.5, hidden.new_tensor(0.5)))
    assert torch.equal(one.tokens, other.tokens)


def test_bad_arguments_of_the_best():
    hidden, weight, bias = head(4, 8, 40)
    with pytest.raises(ValueError, match="k: expected at most 40, the vocabulary of weight, got 41"):
        linear_top_logprobs(hidden, weight, k=41)
    with pytest.raises(ValueError, match=r"target: expected \[4\], got \[3\]"):
        linear_top_logprobs(hidden, weight, torch.zeros(3, dtype=torch.long), k=1)
    target = torch.tensor([0, 1, 40, 2])
    if hidden.device.type != "cpu":  # the host does not wait
        assert linear_top_logprobs(hidden, weight, target, k=1).log_prob.isnan().tolist() == [False, False, True, False]
        return
    with pytest.raises(ValueError, match=r"^target: expected token ids in \[0, 40\), or ignore_index -100, got 40 at position 2$"):
        linear_top_logprobs(hidden, weight, target, k=1)


def test_generated_code_draws_the_same_tokens(monkeypatch):
    hidden, weight, bias = head(100, 16, 500)
    native = linear_sample(hidden, weight, bias, top_k=40, top_p=0.9, seed=1)
    monkeypatch.setattr(sampling, "chunked", lambda what, budget, executor: chunked(what, budget, "python"))
    assert torch.equal(linear_sample(hidden, weight, bias, top_k=40, top_p=0.9, seed=1).tokens, native.tokens)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
COMPILED = {
    "plain": dict(seed=5), "greedy": dict(temperature=0.0), "top-k": dict(seed=1, top_k=7, temperature=0.7),
    "top-p": dict(seed=2, top_p=0.9), "min-p": dict(seed=3, min_p=0.1, softcap=4.0, memory_budget="64MiB"),
}


@DTYPES
@pytest.mark.parametrize("name", COMPILED)
def test_samples_in_a_graph_of_torch_compile(name, dtype):
    """One graph, without breaks, and the same samples."""
    torch._dynamo.reset()  # graphs of other cases count towards its limit
    hidden, weight, bias = head(30, 16, 300, dtype)
    counter, options = torch.arange(30).flip(0), COMPILED[name]
    run = lambda *given: linear_sample(*given[:3], counter=given[3], **options)  # noqa: E731
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(hidden, weight, bias, counter)
    assert all(torch.equal(a, b) for a, b in zip(found, run(hidden, weight, bias, counter)))


@DTYPES
def test_numbers_that_change_in_a_graph_of_torch_compile(dtype):
    torch._dynamo.reset()
    hidden, weight, bias = head(30, 16, 300, dtype)
    run = lambda c, t: linear_sample(hidden, weight, bias, seed=5, softcap=c, temperature=t).tokens  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for softcap, temperature in ((4.0, 1.0), (5.0, 0.5), (6.0, 0.25), (None, 0.0), (6.0, 0.3)):
        assert torch.equal(compiled(softcap, temperature), run(softcap, temperature))


def test_a_graph_of_torch_compile_draws_seeds():
    hidden, weight, bias = head(400, 16, 300)
    run = torch.compile(lambda *given: linear_sample(*given), fullgraph=True, backend="aot_eager")
    first, second = run(hidden, weight, bias), run(hidden, weight, bias)
    assert not torch.equal(first.tokens, second.tokens)
    for found in (first, second):
        assert torch.equal(found.log_prob, linear_logprobs(hidden, weight, found.tokens, bias)[0])
    with pytest.raises(ValueError, match="top_k: expected at most 300"):
        torch.compile(lambda *given: linear_sample(*given, seed=1, top_k=301), backend="aot_eager")(hidden, weight, bias)


@pytest.mark.parametrize("with_target", [False, True])
def test_the_best_entries_in_a_graph_of_torch_compile(with_target):
    hidden, weight, bias = head(30, 16, 300)
    target = torch.arange(30) if with_target else None
    run = lambda *given: linear_top_logprobs(*given, k=5)  # noqa: E731
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(hidden, weight, target, bias)
    for a, b in zip(found, run(hidden, weight, target, bias)):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [dict(), dict(temperature=0.7, top_k=20, top_p=0.9), dict(temperature=0.0), dict(min_p=0.1)])
def test_samples_in_a_cuda_graph(options):
    hidden, weight, _ = [t.cuda() for t in head(65, 64, 3001, torch.bfloat16)]
    counter = torch.arange(65, device="cuda")

    def draw(seed):
        return linear_sample(hidden, weight, seed=seed, counter=counter, **options)

    def captured(seed):
        draw(seed)  # makes the plans
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = draw(seed)
        return graph, made

    graph, made = captured(5)
    for first in (0, 1000):
        counter.copy_(torch.arange(first, first + 65))
        graph.replay()
        assert torch.equal(made.tokens, draw(5).tokens)
        assert torch.equal(made.log_prob, linear_logprobs(hidden, weight, made.tokens)[0])
    if options.get("temperature") == 0.0:
        return
    graph, made = captured(None)  # replays draw seeds
    tokens = []
    for _ in range(2):
        graph.replay()
        tokens.append(made.tokens.clone())
    assert not torch.equal(*tokens)
