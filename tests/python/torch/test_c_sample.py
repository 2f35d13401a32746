"""Sampling over the C ABI has the bits of linear_sample and linear_top_logprobs."""

import ctypes
import math

import pytest
import torch

from logitless import _c_api as c
from logitless._library import check, context, lib, new
from logitless._losses.sampling import mixed
from logitless.torch import linear_logprobs, linear_sample, linear_top_logprobs

pytestmark = pytest.mark.native
DTYPES = {
    torch.float32: c.F32, torch.bfloat16: c.BF16, torch.float16: c.F16, torch.int32: c.I32, torch.int64: c.I64,
    torch.float64: c.F64,
}  # fmt: skip
SIZES = 37, 24, 501  # tokens, dim, vocabulary


def head(dtype=torch.float32, sizes=SIZES):
    tokens, dim, vocab = sizes
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(*shape, generator=g, device="cpu") for shape in ((tokens, dim), (vocab, dim), (vocab,))]
    return [t.to(dtype).to(torch.get_default_device()) for t in made]


def tensor(t):
    made = c.Tensor()
    made.data, made.dtype, made.rank = t.data_ptr(), DTYPES[t.dtype], t.dim()
    made.shape[: t.dim()], made.strides[: t.dim()] = t.shape, t.stride()
    return made


def filled(struct, fields):
    """Returns a struct with its defaults and these fields; tensors by pointer."""
    made = new(struct)
    for name, value in fields.items():
        setattr(made, name, ctypes.pointer(tensor(value)) if isinstance(value, torch.Tensor) else value)
    return made


class Call:
    """A plan of one of the two calls, and its runs."""

    def __init__(self, what, options, inputs, outputs, budget=0):
        structs = {"sample": "Sample", "top_logprobs": "TopLogprobs"}[what]
        self.what, self.structs = what, [getattr(c, structs + part) for part in ("Options", "Inputs", "Outputs")]
        device = next(t for t in (*inputs.values(), torch.empty(0)) if t is not None).device
        index = device.index or 0
        self.context = context(c.DEVICE_CUDA, index) if device.type == "cuda" else context(threads=2)
        self.handle = ctypes.c_void_p()
        check(getattr(lib, f"logitless_plan_{what}")(
            self.context.handle, *self._structs(options, inputs, outputs), budget, ctypes.byref(self.handle)
        ))  # fmt: skip
        self.bytes = lib.logitless_sample_plan_workspace_bytes(self.handle)
        self.block = torch.empty(self.bytes + 256, dtype=torch.uint8, device=device)

    def __del__(self):
        lib.logitless_sample_plan_destroy(self.handle)

    def _structs(self, *values):
        return [ctypes.byref(filled(*pair)) for pair in zip(self.structs, values)]

    def run(self, options, inputs, outputs, **given):
        workspace = given.get("workspace", -(-self.block.data_ptr() // 256) * 256)
        check(getattr(lib, f"logitless_{self.what}")(
            given.get("context", self.context).handle, given.get("plan", self.handle),
            *self._structs(options, inputs, outputs), workspace, given.get("bytes", self.bytes),
        ))  # fmt: skip
        return outputs


def outputs_of(lead, dtype=torch.int64):
    return dict(tokens=torch.full(lead, -1, dtype=dtype), log_prob=torch.full(lead, math.nan))


def compare(options, inputs, seed=11, budget=0, dtype=torch.int64, **more):
    """Compares a call with Python's. inputs: tensors by the names of both."""
    outputs = outputs_of(tuple(inputs["hidden"].shape[:-1]), dtype)
    call = Call("sample", options, inputs, outputs, budget)
    call.run({**options, "seed": seed % 2**64}, inputs, outputs)
    budgets = {"memory_budget": budget} if budget else {}
    expected = linear_sample(**{**options, **inputs}, seed=seed, **budgets, **more)
    assert torch.equal(outputs["tokens"].long(), expected.tokens)
    assert torch.equal(outputs["log_prob"], expected.log_prob)
    return call


SETTINGS = [
    dict(),
    dict(temperature=0.0),
    dict(temperature=0.7),
    dict(temperature=3.0, softcap=2.0, logit_scale=0.7),
    dict(temperature=1e-30),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=501),
    dict(top_p=0.8),
    dict(top_p=1e-6),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=9, top_p=0.6, temperature=2.0),
    dict(min_p=0.02, top_p=0.95, top_k=20, softcap=5.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_tokens_and_log_probabilities_have_pythons_bits(options, dtype):
    hidden, weight, bias = head(dtype)
    forbidden = torch.zeros(SIZES[2]).masked_fill(torch.arange(SIZES[2]) % 3 == 0, -math.inf)
    counter = torch.arange(SIZES[0]) * 7919 + (1 << 33)
    compare(options, dict(hidden=hidden, weight=weight), seed=-3)
    full = dict(hidden=hidden, weight=weight, bias=bias.float(), logit_bias=forbidden, counter=counter)
    compare(options, full, dtype=torch.int32)
    if hidden.device.type == "cpu":
        compare(options, dict(hidden=hidden.view(37, 1, 24), weight=weight, bias=bias))


@pytest.mark.parametrize("filters", [dict(), dict(top_p=None), dict(min_p=None), dict(top_p=None, min_p=None, top_k=30)], ids=str)
def test_numbers_of_each_token(filters):
    hidden, weight, bias = head()
    spread = torch.linspace(0, 1, SIZES[0])
    inputs = dict(hidden=hidden, weight=weight, bias=bias, temperature=2 * spread)
    if "top_p" in filters:
        inputs["top_p"] = 1 - 0.9 * spread
    if "min_p" in filters:
        inputs["min_p"] = 0.3 * spread
    inputs["counter"] = torch.arange(SIZES[0], dtype=torch.int32) + 5
    compare({k: v for k, v in filters.items() if v is not None}, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_key_replaces_the_seed(dtype):
    hidden, weight, _ = head(dtype)
    inputs, outputs = dict(hidden=hidden, weight=weight, key=torch.tensor(mixed(11))), outputs_of(SIZES[:1])
    Call("sample", {}, inputs, outputs).run(dict(seed=5), inputs, outputs)
    assert torch.equal(outputs["tokens"], linear_sample(hidden, weight, seed=11).tokens)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
def test_two_dtypes(dtypes):
    hidden, weight, bias = head()
    inputs = dict(hidden=hidden.to(dtypes[0]), weight=weight.to(dtypes[1]), bias=bias)
    if hidden.device.type != "cpu":
        with pytest.raises(NotImplementedError, match="weight: expected .* as hidden in samples on a GPU"):
            Call("sample", {}, inputs, outputs_of(SIZES[:1]))
        return
    compare(dict(top_k=9, softcap=4.0), inputs)
    compare(dict(temperature=0.0), inputs)
    outputs = dict(top_log_probs=torch.zeros(37, 5), top_ids=torch.zeros(37, 5, dtype=torch.int64))
    Call("top_logprobs", dict(k=5), inputs, outputs).run(dict(k=5), inputs, outputs)
    expected = linear_top_logprobs(**inputs, k=5)
    assert torch.equal(outputs["top_ids"], expected.top_ids)
    assert torch.equal(outputs["top_log_probs"], expected.top_log_probs)


def test_a_plan_serves_other_seeds_and_numbers_within_its_budget():
    on_gpu = torch.get_default_device().type == "cuda"  # fp32 has other bits in chunks of another size there
    hidden, weight, bias = head(torch.bfloat16 if on_gpu else torch.float32, (300, 16, 4000))
    bias = bias.float()
    inputs, budget = dict(hidden=hidden, weight=weight, bias=bias), 5 << 19
    planned = dict(temperature=1.0, top_p=0.5, top_k=50)
    call = compare(planned, inputs, budget=budget)
    assert call.bytes <= budget < 300 * 4000 * 4
    for options, seed in ((dict(temperature=0.4, top_p=0.9, top_k=50), 1), (dict(temperature=0.0, top_p=1.0, top_k=50), 2)):
        outputs = call.run({**options, "seed": seed}, inputs, outputs_of((300,)))
        expected = linear_sample(hidden, weight, bias, seed=seed, **options)
        assert torch.equal(outputs["tokens"], expected.tokens) and torch.equal(outputs["log_prob"], expected.log_prob)
    assert compare(planned, inputs).bytes < 300 * 4000 or on_gpu  # a quarter of the logits, or 64 MiB on a GPU
    text = lib.logitless_sample_plan_explain(call.handle).decode()
    assert "sample" in text and "log-probabilities" in text


def test_greedy_tokens_are_the_heads_and_take_little_memory():
    hidden, weight, bias = head(sizes=(300, 16, 4000))
    call = compare(dict(temperature=0.0), dict(hidden=hidden, weight=weight, bias=bias))
    text = lib.logitless_sample_plan_explain(call.handle).decode()
    assert ("one GEMM" if hidden.device.type == "cuda" else "largest entries") in text
    banned = compare(dict(temperature=0.0), dict(hidden=hidden, weight=weight, logit_bias=-10.0 * torch.arange(4000)))
    assert "largest entries" not in lib.logitless_sample_plan_explain(banned.handle).decode()


def test_tokens_without_log_probabilities():
    hidden, weight, _ = head()
    outputs = dict(tokens=torch.zeros(SIZES[0], dtype=torch.int64))
    inputs = dict(hidden=hidden, weight=weight)
    Call("sample", {}, inputs, outputs).run(dict(seed=5), inputs, outputs)
    assert torch.equal(outputs["tokens"], linear_sample(hidden, weight, seed=5).tokens)
    nothing = dict(hidden=hidden[:0], weight=weight)
    empty = outputs_of((0,))
    assert Call("sample", {}, nothing, empty).run({}, nothing, empty) is empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [1, 7, 501])
@pytest.mark.parametrize("targets", [None, torch.int32, torch.int64], ids=str)
def test_the_best_entries_have_pythons_bits(k, targets, dtype):
    hidden, weight, bias = head(dtype)
    options, lead = dict(k=k, softcap=4.0, logit_scale=0.5), (SIZES[0],)
    inputs = dict(hidden=hidden, weight=weight, bias=bias.float())
    outputs = dict(top_log_probs=torch.zeros(*lead, k), top_ids=torch.zeros(*lead, k, dtype=targets or torch.int64))
    if targets is not None:
        inputs["targets"] = torch.arange(SIZES[0]).to(targets) * 13
        outputs["log_prob"] = torch.zeros(lead)
    Call("top_logprobs", options, inputs, outputs).run(options, inputs, outputs)
    expected = linear_top_logprobs(hidden, weight, inputs.get("targets"), bias.float(), **options)
    assert torch.equal(outputs["top_ids"].long(), expected.top_ids)
    assert torch.equal(outputs["top_log_probs"], expected.top_log_probs)
    if targets is not None:
        assert torch.equal(outputs["log_prob"], expected.log_prob)
    del options["k"]
    again = linear_logprobs(hidden, weight, outputs["top_ids"], bias.float(), **options)[0]
    assert torch.equal(again, outputs["top_log_probs"])


def test_equal_entries_are_in_the_order_of_their_ids():
    inputs = dict(hidden=torch.zeros(2, 3, 4), weight=torch.ones(9, 4))
    outputs = dict(top_log_probs=torch.zeros(2, 3, 9), top_ids=torch.zeros(2, 3, 9, dtype=torch.int64))
    Call("top_logprobs", dict(k=9), inputs, outputs, 1 << 20).run(dict(k=9), inputs, outputs)
    assert outputs["top_ids"].tolist() == [[list(range(9))] * 3] * 2


H, W, B = (37, 24), (501, 24), (501,)
BAD = [
    (dict(temperature=-1.0), {}, {}, "temperature: expected a number from 0, got -1"),
    (dict(temperature=math.nan), {}, {}, "temperature: expected a number from 0, got nan"),
    (dict(top_p=0.0), {}, {}, "top_p: expected a number above 0 to 1, got 0"),
    (dict(top_p=1.5), {}, {}, "top_p: expected a number above 0 to 1, got 1.5"),
    (dict(min_p=2.0), {}, {}, "min_p: expected a number from 0 to 1, got 2"),
    (dict(top_k=502), {}, {}, "top_k: expected 1 to 501, the vocabulary of weight, or 0 for all, got 502"),
    (dict(top_k=-1), {}, {}, "top_k: expected 1 to 501"),
    (dict(softcap=-1.0), {}, {}, "softcap: expected a number > 0, or 0 for none, got -1"),
    (dict(logit_scale=0.0), {}, {}, "logit_scale: expected a finite number other than 0, got 0"),
    (dict(reserved=1), {}, {}, "options.reserved: expected 0, got 1"),
    (dict(temperature=0.5), dict(temperature=torch.ones(37)), {}, "temperature: expected the option to be 1 beside a tensor, got 0.5"),
    ({}, dict(temperature=torch.ones(3)), {}, r"temperature: expected shape [37] to go with hidden f32[37, 24], got f32[3]"),
    ({}, dict(top_p=torch.ones(37, dtype=torch.float64)), {}, "top_p: expected f32, got f64"),
    ({}, dict(counter=torch.ones(37)), {}, "counter: expected i32 or i64, got f32"),
    ({}, dict(key=torch.zeros(3, dtype=torch.int64)), {}, "key: expected shape [2], got i64[3]"),
    ({}, dict(logit_bias=torch.zeros(3)), {}, "logit_bias: expected shape [501], got f32[3]"),
    ({}, dict(bias=torch.zeros(3)), {}, "bias: expected shape [501], got f32[3]"),
    ({}, dict(hidden=None), {}, "hidden: expected a tensor [..., D], got none"),
    ({}, dict(weight=None), {}, "weight: expected a tensor [V, D], got none"),
    ({}, dict(weight=torch.zeros(501, 23)), {}, "their last dimensions differ"),
    ({}, dict(hidden=torch.zeros(37, 24, dtype=torch.bfloat16), weight=torch.zeros(501, 24, dtype=torch.float16)), {},
     "weight: expected bf16 as hidden or f32, got f16"),
    ({}, dict(weight=torch.zeros(24, 501).T), {}, "weight: expected a contiguous tensor, got f32[501, 24] strides [1, 501]"),
    ({}, {}, dict(tokens=None), "tokens: expected a tensor [...], got none"),
    ({}, {}, dict(tokens=torch.zeros(37)), "tokens: expected i32 or i64, got f32"),
    ({}, {}, dict(log_prob=torch.zeros(36)), "log_prob: expected shape [37]"),
]


@pytest.mark.parametrize("options, inputs, outputs, text", BAD, ids=[b[3] for b in BAD])
def test_bad_arguments(options, inputs, outputs, text):
    given = dict(hidden=torch.zeros(H), weight=torch.zeros(W))
    made = outputs_of((37,))
    with pytest.raises(ValueError) as error:
        Call("sample", options, _without_none({**given, **inputs}), _without_none({**made, **outputs}))
    assert text in str(error.value)
    assert (made["tokens"] == -1).all()


def _without_none(given):
    return {k: v for k, v in given.items() if v is not None}


def test_bad_arguments_of_the_best():
    inputs = dict(hidden=torch.zeros(H), weight=torch.zeros(W))
    made = dict(top_log_probs=torch.zeros(37, 2), top_ids=torch.zeros(37, 2, dtype=torch.int64))
    cases = [
        (dict(k=502), inputs, made, "k: expected 1 to 501, the vocabulary of weight, got 502"),
        (dict(k=3), inputs, made, "top_log_probs: expected shape [37, 3]"),
        (dict(k=2), inputs, {**made, "log_prob": torch.zeros(37)}, "log_prob: expected none without targets, got a tensor"),
        (dict(k=2), {**inputs, "targets": torch.zeros(37, dtype=torch.int64)}, made, "log_prob: expected a tensor beside targets, got none"),
        (dict(k=2), {**inputs, "targets": torch.zeros(37)}, made, "targets: expected i32 or i64, got f32"),
    ]  # fmt: skip
    for options, given, outputs, text in cases:
        with pytest.raises(ValueError) as error:
            Call("top_logprobs", options, given, outputs)
        assert text in str(error.value)


def test_a_call_that_is_not_the_plans():
    hidden, weight, bias = head()
    inputs, outputs = dict(hidden=hidden, weight=weight), outputs_of((37,))
    call = Call("sample", {}, inputs, outputs)
    greedy = Call("sample", dict(temperature=0.0), inputs, outputs)
    cases = [
        (call, dict(top_p=0.5), inputs, {}, "top_p: the plan was made without one, got 0.5"),
        (call, dict(min_p=0.5), inputs, {}, "min_p: the plan was made without one, got 0.5"),
        (call, dict(top_k=5), inputs, {}, "top_k: the plan is for 0, got 5"),
        (call, dict(logit_scale=2.0), inputs, {}, "logit_scale: the plan is for 1, got 2"),
        (call, {}, {**inputs, "bias": bias}, {}, "bias: the plan is for none, got f32[501]"),
        (call, {}, {**inputs, "hidden": hidden[:36]}, {}, "tokens: expected shape [36]"),
        (greedy, dict(temperature=1.0), inputs, {}, "temperature: the plan is for 0, got 1"),
        (call, {}, inputs, dict(bytes=call.bytes - 1), f"workspace: expected {call.bytes} bytes, got {call.bytes - 1}"),
        (call, {}, inputs, dict(workspace=None), f"workspace: expected {call.bytes} bytes, got NULL"),
        (call, {}, inputs, dict(workspace=call.block.data_ptr() + 1), "workspace: is not aligned to"),
        (call, {}, inputs, dict(plan=None), "plan: expected a handle, got NULL"),
    ]
    if hidden.device.type == "cpu":
        cases.append((call, {}, inputs, dict(context=context(threads=1)), "context: has 1 threads, the plan is for 2"))
    for made, options, given, more, text in cases:
        with pytest.raises(ValueError) as error:
            made.run(options, given, outputs, **more)
        assert text in str(error.value)
    assert (outputs["tokens"] == -1).all() and outputs["log_prob"].isnan().all()
    best = Call("top_logprobs", {}, inputs, dict(top_log_probs=torch.zeros(37, 1), top_ids=torch.zeros(37, 1, dtype=torch.int64)))
    with pytest.raises(ValueError, match="plan: expected one of plan_sample, got one of plan_top_logprobs"):
        call.run({}, inputs, outputs, plan=best.handle)
    with pytest.raises(ValueError, match="shares memory with counter"):
        Call("sample", {}, {**inputs, "counter": outputs["tokens"]}, outputs)
    with pytest.raises(ValueError, match="memory_budget"):
        Call("sample", {}, inputs, outputs, 300)
    with pytest.raises(ValueError, match="memory_budget"):
        Call("sample", {}, inputs, outputs, 200)


def test_null_pointers():
    inputs, outputs = (filled(s, {}) for s in (c.SampleInputs, c.SampleOutputs))
    handle, here = ctypes.c_void_p(), context(threads=2).handle
    cases = [
        ((None, None, inputs, outputs, 0, handle), "context: expected a handle, got NULL"),
        ((here, None, None, outputs, 0, handle), "inputs: expected a struct, got NULL"),
        ((here, None, inputs, None, 0, handle), "outputs: expected a struct, got NULL"),
        ((here, None, inputs, outputs, 0, None), "plan: expected a pointer, got NULL"),
        ((here, None, inputs, outputs, 0, handle), "hidden: expected a tensor [..., D], got none"),
    ]
    for (where, options, given, made, budget, to), text in cases:
        pointers = [None if x is None else ctypes.byref(x) for x in (given, made, to)]
        with pytest.raises(ValueError) as error:
            check(lib.logitless_plan_sample(where, options, *pointers[:2], budget, pointers[2]))
        assert text in str(error.value)
    lib.logitless_sample_plan_destroy(None)
    assert lib.logitless_sample_plan_workspace_bytes(None) == 0 and lib.logitless_sample_plan_explain(None) == b""
    hidden, weight, _ = head()
    hidden = tensor(hidden)
    hidden.data = None
    inputs.hidden, inputs.weight = ctypes.pointer(hidden), ctypes.pointer(tensor(weight))
    with pytest.raises(ValueError, match="hidden: .* has no data"):
        check(lib.logitless_plan_sample(here, None, ctypes.byref(inputs), ctypes.byref(outputs), 0, ctypes.byref(handle)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_captures_a_call():
    hidden, weight, _ = [t.cuda() for t in head(torch.bfloat16, (33, 64, 3001))]
    counter = torch.arange(33, device="cuda")
    inputs = dict(hidden=hidden, weight=weight, counter=counter)
    outputs = dict(tokens=torch.empty(33, dtype=torch.int64, device="cuda"), log_prob=torch.empty(33, device="cuda"))
    options = dict(seed=3, temperature=0.8, top_k=20)
    call = Call("sample", options, inputs, outputs)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        call.run(options, inputs, outputs, context=context(c.DEVICE_CUDA, 0, stream.cuda_stream))
    for first in (0, 500):
        counter.copy_(torch.arange(first, first + 33))
        graph.replay()
        want = linear_sample(hidden, weight, counter=counter, **options)
        assert torch.equal(outputs["tokens"], want.tokens) and torch.equal(outputs["log_prob"], want.log_prob)
