"""The compiler from Python: logitless._compiler.Program on numpy arrays."""

import numpy as np
import pytest

from logitless._compiler import ALIGNMENT, PreparedProgram, Program
from logitless._library import context

HEAD = """graph head(%h: f32[N, 4], %w: f32[V, 4], %t: i64[N]) {
  %z = dot %h, %w contract(1; 1) : f32[N, V]
  %lse = reduce_lse %z dims(1)
  %picked = pick %z, %t axis(1)
  %nll = sub %lse, %picked
  %loss = reduce_sum %nll dims(0)
  return loss: %loss
  differentiate loss wrt %h
}
"""


def arrays():
    random = np.random.default_rng(0)
    h, w = random.normal(size=(30, 4)).astype(np.float32), random.normal(size=(500, 4)).astype(np.float32)
    return h, w, random.integers(0, 500, 30)


@pytest.mark.parametrize("options", [{"chunk": False}, {"chunks": 4}, {"memory_budget": "16KiB", "head_engine": False}])
def test_run(options):
    h, w, t = arrays()
    program = Program(HEAD, sizes={"N": 30, "V": 500}, threads=1, **options)
    assert [(p.name, p.dtype, p.shape) for p in program.parameters][2] == ("t", "i64", (30,))
    assert [r.name for r in program.results] == ["loss", "d_h"]
    loss, d_h = program.run(h, w, t)
    z = h.astype(float) @ w.astype(float).T
    lse = np.log(np.exp(z).sum(1))
    p = np.exp(z - lse[:, None])
    p[np.arange(30), t] -= 1
    np.testing.assert_allclose(loss, (lse - z[np.arange(30), t]).sum(), rtol=1e-5)
    np.testing.assert_allclose(d_h, p @ w, rtol=1e-4, atol=1e-5)
    assert ("loop c0" in program.text) == ("chunk" not in options)
    assert program.unchunked_arena_bytes >= 30 * 500 * 4
    assert program.report["program"] == "head" and "arena" in program.explain() and program.threads == 1
    if "chunk" not in options:
        assert program.arena_bytes < program.unchunked_arena_bytes


def test_bf16_is_bits():
    program = Program("graph main(%x: bf16[2]) {\n  %y = add %x, %x\n  return y: %y\n}\n")
    [doubled] = program.run(np.array([0x3F80, 0x4000], np.uint16))  # 1, 2
    assert doubled.dtype == np.uint16 and doubled.tolist() == [0x4000, 0x4080]


def test_errors():
    h, w, t = arrays()
    with pytest.raises(ValueError, match="size V has no value"):
        Program(HEAD, sizes={"N": 30})
    with pytest.raises(ValueError, match="sizes: the program has no size 'W'; its sizes are N, V"):
        Program(HEAD, sizes={"N": 30, "V": 500, "W": 2})
    with pytest.raises(ValueError, match=r"program:2:"):
        Program("graph main(%x: f32[2]) {\n  %y = wave %x\n  return y: %y\n}\n")
    with pytest.raises(ValueError, match="the budget is 1"):
        Program(HEAD, sizes={"N": 30, "V": 500}, memory_budget=1, strict=True)
    program = Program(HEAD, sizes={"N": 30, "V": 500})
    with pytest.raises(ValueError, match=r"run: expected 3 parameters \(h, w, t\), got 2"):
        program.run(h, w)
    with pytest.raises(ValueError, match=r"parameter t: expected int64 \[30\] \(i64\), got int32 \[30\]"):
        program.run(h, w, t.astype(np.int32))
    with pytest.raises(ValueError, match=r"parameter h: expected float32 \[30, 4\]"):
        program.run(h[:3], w, t)


def test_enqueued_on_memory_of_the_caller():
    h, w, t = arrays()
    program = Program(HEAD, sizes={"N": 30, "V": 500}, threads=1)
    expected = program.run(h, w, t)
    prepared = PreparedProgram(program, context())
    block = np.empty(program.arena_bytes + ALIGNMENT, np.uint8)
    arena = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
    made = [np.zeros_like(e) for e in expected]
    inputs, outputs = ([a.ctypes.data for a in arrays_] for arrays_ in ((h, w, t), made))
    prepared.enqueue(inputs, outputs, arena, program.arena_bytes)
    assert all(np.array_equal(m, e) for m, e in zip(made, expected))
    with pytest.raises(ValueError, match="arena_bytes: expected"):
        prepared.enqueue(inputs, outputs, arena, program.arena_bytes - 1)
    with pytest.raises(ValueError, match="stream: expected NULL"):
        prepared.enqueue(inputs, outputs, arena, program.arena_bytes, 64)
    with pytest.raises(ValueError, match="options.compute_capability: expected 0 of the CPU"):
        Program(HEAD, sizes={"N": 30, "V": 500}, compute_capability=90)


def test_what_the_caller_runs():
    text = "graph main(%x: f32[4]) {\n  %y = extern %x call(3) result(1) along(0, 0) : f32[4]\n  return y: %y\n}\n"
    refusal = r"y \(extern\) f32\[4\] is an operation that the caller runs; expected the option externs"
    with pytest.raises(NotImplementedError, match=refusal):
        Program(text)
    program = Program(text, externs=True)
    assert "extern %x call(3) result(1) along(0, 0) : f32[4]" in program.text
    with pytest.raises(NotImplementedError, match="can be read, and not be run here"):
        program.run(np.ones(4, np.float32))
