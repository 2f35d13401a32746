"""Times for bench/experiments/fp8_gemms.py: a chunked loss with its gradient GEMMs in fp8, on one GPU; needs PyTorch."""

import math
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compare"))

from head_torch import exact_gradients  # noqa: E402

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
SHAPES = ("8192,4096,128256", "32768,768,50304", "8192,512,32768", "8192,2304,256000")
STORED = 512 << 20  # bytes of a chunk's bf16 logits
SAMPLE = 128  # rows that errors are measured on


def line(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def both_layouts(m, factor):
    """Returns [R, C], multiplied by a factor for each row, in e4m3 with one scale; its transpose; and the scale."""
    m = m.float() * factor
    scale = m.abs().amax() / LARGEST
    m = (m / scale).to(E4M3)
    return m, m.t().contiguous(), scale


def statistics_of(z, y):
    """Returns for each row of logits the largest without the target, and lse."""
    z = z.float()
    vocab_ids = torch.arange(z.shape[1], device=z.device)
    return torch.where(vocab_ids == y[:, None], -math.inf, z).amax(1), torch.logsumexp(z, 1)


def exponentials(z, top, y):
    """Returns E without the targets, times 448 over its row's largest, in both layouts."""
    vocab_ids = torch.arange(z.shape[1], device=z.device)
    e = torch.exp(z.float() - top[:, None]) * LARGEST
    e = torch.where(vocab_ids == y[:, None], 0.0, e).to(E4M3)
    return e, e.t().contiguous()


def gradient_bf16(z, lse, y):
    vocab_ids = torch.arange(z.shape[1], device=z.device)
    return (torch.exp(z.float() - lse[:, None]) - (vocab_ids == y[:, None]).float()).bfloat16()


class Compiled:
    """A function under torch.compile; eager, with one message, where that fails."""

    def __init__(self, function, device):
        self.function = self.run = function
        if device == "cuda":
            self.run = torch.compile(function, dynamic=False)

    def __call__(self, *inputs):
        try:
            return self.run(*inputs)
        except Exception as why:
            if self.run is self.function:
                raise
            print(f"{self.function.__name__}: not compiled: {type(why).__name__}: {str(why)[:300]}", flush=True)
            self.run = self.function
            return self.run(*inputs)


def fp8_gemm(a, b_turned, fast, *scales, out=torch.float32):
    """Returns a [M, K] times the transpose of b_turned [N, K], with one scale, or one for each."""
    if len(scales) == 1:
        scales = torch.ones_like(scales[0]), *scales
    return torch._scaled_mm(a, b_turned.t(), *scales, out_dtype=out, use_fast_accum=fast)


def bf16_gemm(a, b):
    """Returns a product in fp32 where this PyTorch supports it."""
    try:
        return torch.mm(a, b, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return torch.mm(a, b)


class Loss:
    """A chunked loss with its gradients: d_hidden [N, D] bf16, d_weight [V, D] fp32."""

    def __init__(self, shape, args):
        tokens, dim, vocab = self.shape = shape
        random = torch.Generator(args.device).manual_seed(0)
        self.x = torch.randn(tokens, dim, device=args.device, generator=random).bfloat16()
        self.w = (torch.randn(vocab, dim, device=args.device, generator=random) * 2 / dim**0.5).bfloat16()
        self.y = torch.randint(0, vocab, (tokens,), device=args.device, generator=random)
        self.chunk = min(tokens, 1 << round(math.log2(STORED / 2 / vocab)))
        self.both, self.statistics, self.exponentials, self.gradient = (
            Compiled(f, args.device) for f in (both_layouts, statistics_of, exponentials, gradient_bf16))
        self.d_hidden = torch.empty_like(self.x)
        self.d_weight = torch.zeros(vocab, dim, device=args.device)
        self.ones = torch.ones(vocab, 1, device=args.device)

    def chunks(self):
        for first in range(0, len(self.x), self.chunk):
            part = slice(first, first + self.chunk)
            yield part, self.x[part], self.y[part], first == 0

    def add(self, d_weight, begin):
        self.d_weight = d_weight.float() if begin else self.d_weight.add_(d_weight)

    def in_bf16(self):
        for part, x, y, begin in self.chunks():
            z = x @ self.w.t()
            _, lse = self.statistics(z, y)
            e = self.gradient(z, lse, y)
            self.d_hidden[part] = e @ self.w
            self.add(bf16_gemm(e.t(), x), begin)
        return self.d_hidden, self.d_weight

    def in_fp8(self, fast):
        _, w_turned, w_scale = self.both(self.w, self.ones)
        for part, x, y, begin in self.chunks():
            z = x @ self.w.t()
            top, lse = self.statistics(z, y)
            e, e_turned = self.exponentials(z, top, y)
            token = (torch.exp(top - lse) / LARGEST)[:, None]
            own = torch.exp(z.gather(1, y[:, None]).float() - lse[:, None]) - 1
            _, x_turned, x_scale = self.both(x, token)
            self.d_hidden[part] = fp8_gemm(e, w_turned, fast, w_scale) * token + own * self.w[y]
            self.add(fp8_gemm(e_turned, x_turned, fast, x_scale), begin)
            self.d_weight.index_add_(0, y, own * x)
        return self.d_hidden, self.d_weight

    def off_exact(self):
        """Returns the larger error of d_hidden and d_weight against f64, on some tokens and vocabulary entries."""
        tokens, vocab_ids = (torch.arange(0, len(m), max(1, len(m) // SAMPLE), device=m.device) for m in (self.x, self.w))
        vocab_ids = torch.cat([self.y[:SAMPLE], vocab_ids])
        exact = [m * len(self.x) for m in exact_gradients(self.x, self.w, self.y, tokens, vocab_ids)]
        return lambda got: max(relative(m[rows], e) for m, rows, e in zip(got, (tokens, vocab_ids), exact))


class Clock:
    def __init__(self, args):
        self.gpu, self.repeat, self.warm = args.device == "cuda", args.repeat, args.warm
        self.end = args.begin + args.seconds

    def synchronize(self):
        if self.gpu:
            torch.cuda.synchronize()

    def once(self, run):
        if not self.gpu:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    def milliseconds(self, run):
        """Returns the median, after a warm-up with the same work."""
        run()
        self.synchronize()
        until = time.perf_counter() + self.warm
        while time.perf_counter() < until:
            self.once(run)
        return statistics.median(self.once(run) for _ in range(self.repeat))


class Table:
    def __init__(self, clock):
        self.clock, self.floor = clock, None

    def begin(self, floor):
        self.floor = floor
        names = ["part", "ms", "of the floor", "TFLOP/s or GB/s", "off"]
        line(*names)
        line(*["---"] * len(names))

    def row(self, name, ms, work=0, bytes_=0, off=None):
        rate = f"{work / ms / 1e9:.0f} TFLOP/s" if work else f"{bytes_ / ms / 1e6:.0f} GB/s" if bytes_ else ""
        line(name, f"{ms:.3f}", f"{ms / self.floor:.3f}", rate, "" if off is None else f"{off:.1e}")

    def part(self, name, make, count=1, work=0, bytes_=0, off=None):
        """Times the result of make(), which a loss runs `count` times. Returns the milliseconds of all, or None."""
        if time.perf_counter() > self.clock.end:
            print(f"{name}: left out, no time", flush=True)
            return None
        try:
            run = make()
            ms = self.clock.milliseconds(run) * count
            self.row(name, ms, work * count, bytes_ * count, off(run()) if off else None)
            return ms
        except Exception as why:
            print(f"{name}: {type(why).__name__}: {str(why)[:300]}", flush=True)
            return None


def relative(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def off_first_rows(a, b_turned):
    """Returns a function for the error of a product's first rows against fp32 of the same numbers."""
    return lambda got: relative(got[:SAMPLE], a[:SAMPLE].float() @ b_turned.float().T)


def roofline_of(loss, clock):
    """Returns the milliseconds of the three GEMMs alone."""
    block = torch.randn(loss.shape[0], loss.shape[2], device=loss.x.device, dtype=torch.bfloat16)
    runs = [lambda: loss.x @ loss.w.t(), lambda: block @ loss.w, lambda: block.t() @ loss.x]
    return [clock.milliseconds(run) for run in runs]


def time_shape(shape, args):
    tokens, dim, vocab = shape
    loss, clock = Loss(shape, args), Clock(args)
    products, count = roofline_of(loss, clock), -(-tokens // loss.chunk)
    _, x, y, _ = next(loss.chunks())
    z = x @ loss.w.t()
    print(f"\n### N {tokens}, D {dim}, V {vocab}; chunks of {len(x)} tokens\n")
    table, work = Table(clock), 2 * len(x) * dim * vocab
    table.begin(sum(products))
    for name, ms in zip(("logits", "d_hidden", "d_weight"), products):
        table.row(f"floor: {name}", ms, 2 * tokens * dim * vocab)
    top, lse = loss.statistics(z, y)
    e, e_turned = loss.exponentials(z, top, y)
    ones = loss.ones[: len(x)]
    one, (_, w_turned, _), (_, x_turned, _) = loss.ones[0, 0], loss.both(loss.w, loss.ones), loss.both(x, ones)

    total = [
        table.part("logits, bf16, by chunks", lambda: lambda: x @ loss.w.t(), count, work),
        table.part("lse and the largest of a row", lambda: lambda: loss.statistics(z, y), count, bytes_=z.nbytes),
        table.part("E in fp8, both layouts", lambda: lambda: loss.exponentials(z, top, y), count, bytes_=2 * z.nbytes),
        table.part("w in fp8, both layouts", lambda: lambda: loss.both(loss.w, loss.ones), bytes_=2 * loss.w.nbytes),
        table.part("x in fp8, both layouts", lambda: lambda: loss.both(x, ones), count, bytes_=2 * x.nbytes),
    ]
    sides = {"d_hidden": (e, w_turned), "d_weight": (e_turned, x_turned)}
    for fast in (True, False):
        how = f"fp8, {'fast' if fast else 'fp32'} sums"
        part = [table.part(f"{name}, {how}", lambda a=a, b=b: lambda: fp8_gemm(a, b, fast, one), count, work,
                           off=off_first_rows(a, b)) for name, (a, b) in sides.items()]
        if None not in total + part:
            table.row(f"all of these parts, {how}", sum(total + part))
    table.part("d_weight added up, fp32", lambda: lambda: loss.add(loss.d_weight, False), count - 1,
               bytes_=3 * loss.d_weight.nbytes)
    table.part("E in bf16", lambda: lambda: loss.gradient(z, lse, y), count, bytes_=2 * z.nbytes)
    block = z * 0.01
    table.part("d_hidden, bf16, by chunks", lambda: lambda: block @ loss.w, count, work)
    table.part("d_weight, bf16, by chunks", lambda: lambda: bf16_gemm(block.t(), x), count, work)
    del block
    off = loss.off_exact()
    table.part("whole, bf16", lambda: loss.in_bf16, off=off)
    for fast in (True, False):
        table.part(f"whole, fp8, {'fast' if fast else 'fp32'} sums", lambda: lambda: loss.in_fp8(fast), off=off)
    time_row_wise(table, sides, count, work)
    if time.perf_counter() < clock.end:
        table.row("floor, again", sum(roofline_of(loss, clock)))


def time_row_wise(table, sides, count, work):
    """Timed last, because kernels of older libraries may fault."""
    for name, (a, b) in sides.items():
        scales = torch.ones(len(a), 1, device=a.device), torch.ones(1, len(b), device=a.device)
        for fast in (True, False):
            for out in (torch.float32, torch.bfloat16):
                how = f"{'fast' if fast else 'fp32'} sums, {str(out)[6:]}"
                table.part(f"{name}, fp8, scales by row, {how}",
                           lambda: lambda: fp8_gemm(a, b, fast, *scales, out=out), count, work,
                           off=off_first_rows(a, b))


@torch.no_grad()
def times(args):
    args.begin = time.perf_counter()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU: times say nothing"
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {where}")
    for shape in args.shapes:
        if time.perf_counter() > args.begin + args.seconds:
            print(f"{shape}: left out, no time")
            continue
        if args.device == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()
        try:
            time_shape(tuple(map(int, shape.split(","))), args)
        except Exception as why:
            print(f"{shape}: {type(why).__name__}: {str(why)[:500]}", flush=True)
    print(f"\n{time.perf_counter() - args.begin:.0f} s")
