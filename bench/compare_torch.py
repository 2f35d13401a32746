#!/usr/bin/env python3
"""The head on PyTorch's tensors: logitless against what else is installed, forward and backward, in one process.

    python3 bench/compare_torch.py --library build/src/liblogitless.so
        [--head gemma|llama|gpt2 | --tokens N --dim D --vocab V] [--device cuda|cpu] [--repeat R] [--json]

Contenders, each where its package is there: PyTorch eager (cross_entropy of the fp32 logits), torch.compile of it,
cut_cross_entropy with its filter and without, Liger's and quack's fused linear cross entropy, and logitless through its
C library, in three plans. Inputs are bf16, random and fresh. d_hidden of sampled tokens and d_weight of sampled words
are held against float64. One table: median ms, peak MiB beyond inputs and gradients (GPU), the two relative errors. On
a GPU each row is timed after 150 ms of itself, since the clock follows the power of what ran before.
"""
import argparse
import ctypes as c
import json
import statistics
import time

HEADS = {"gemma": (8192, 2304, 256000), "llama": (8192, 4096, 128256), "gpt2": (32768, 768, 50304)}
PLANS = {"forward": 0, "dense": 1, "recompute": 2, "stored": 3}
CODES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2, "torch.int32": 3, "torch.int64": 4}


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int32), ("rank", c.c_int32), ("shape", c.c_int64 * 4),
                ("strides", c.c_int64 * 4)]


class ContextOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("device", c.c_int32), ("threads", c.c_int32), ("kernel", c.c_char_p),
                ("trace", c.c_void_p), ("trace_user", c.c_void_p), ("stream", c.c_void_p), ("device_index", c.c_int32)]


class Request(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("memory_budget", c.c_uint64), ("stored_fraction", c.c_double),
                ("kind", c.c_int32), ("reserved", c.c_int32)]


class Inputs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(name, c.POINTER(Tensor)) for name in (
        "hidden", "weight", "targets", "bias", "class_weight", "token_weight", "target_weight", "grad_losses")] + [
            ("grad_loss", c.c_double)]


class Outputs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t)] + [(name, c.POINTER(Tensor)) for name in (
        "loss", "d_hidden", "d_weight", "d_bias", "lse", "target_logit", "log_prob", "entropy", "argmax")]


class Logitless:
    """The calls of the C library that a loss needs."""

    def __init__(self, path, device):
        self.lib = c.CDLL(path)
        self.lib.logitless_last_error.restype = c.c_char_p
        self.lib.logitless_plan_workspace_bytes.restype = c.c_size_t
        self.lib.logitless_plan_workspace_bytes.argtypes = [c.c_void_p]
        self.lib.logitless_struct_size.restype = c.c_size_t
        for struct, name in ((Tensor, "tensor"), (ContextOptions, "context_options"), (Request, "plan_request"),
                             (Inputs, "cross_entropy_inputs"), (Outputs, "cross_entropy_outputs")):
            there = self.lib.logitless_struct_size(f"logitless_{name}".encode())
            if there != c.sizeof(struct):
                raise SystemExit(f"compare_torch.py: logitless_{name} has {there} bytes, {c.sizeof(struct)} are declared here")
        options = self.made(ContextOptions, "context_options")
        options.device = 1 if device == "cuda" else 0
        self.context = c.c_void_p()
        self.call("context_create", c.byref(options), c.byref(self.context))

    def made(self, struct, name):
        value = struct()
        getattr(self.lib, f"logitless_{name}_init")(c.byref(value), c.c_size_t(c.sizeof(struct)))
        return value

    def call(self, name, *arguments):
        if getattr(self.lib, f"logitless_{name}")(*arguments) != 0:
            raise RuntimeError(self.lib.logitless_last_error().decode())

    def view(self, tensor):
        view = Tensor(tensor.data_ptr(), CODES[str(tensor.dtype)], tensor.dim())
        view.shape[: tensor.dim()] = list(tensor.shape)
        view.strides[: tensor.dim()] = list(tensor.stride())
        return c.pointer(view)

    def loss(self, torch, x, w, y, kind, weight_dtype, budget):
        """A function that runs the plan, and its gradients."""
        loss = torch.zeros((), device=x.device)
        d_hidden, d_weight = torch.empty_like(x), torch.empty(w.shape, dtype=weight_dtype, device=w.device)
        inputs, outputs = self.made(Inputs, "cross_entropy_inputs"), self.made(Outputs, "cross_entropy_outputs")
        request = self.made(Request, "plan_request")
        inputs.hidden, inputs.weight, inputs.targets = self.view(x), self.view(w), self.view(y)
        outputs.loss, outputs.d_hidden, outputs.d_weight = self.view(loss), self.view(d_hidden), self.view(d_weight)
        request.kind, request.memory_budget = PLANS[kind], budget
        plan = c.c_void_p()
        self.call("plan_cross_entropy", self.context, None, c.byref(inputs), c.byref(outputs), c.byref(request), c.byref(plan))
        size = self.lib.logitless_plan_workspace_bytes(plan)
        workspace = torch.empty(size + 256, dtype=torch.uint8, device=x.device)
        start = (workspace.data_ptr() + 255) // 256 * 256

        def run():
            self.call("cross_entropy", self.context, plan, None, c.byref(inputs), c.byref(outputs), c.c_void_p(start),
                      c.c_size_t(size), None)

        run.keep = (inputs, outputs, workspace, loss)
        return run, d_hidden, d_weight, size


def exact_gradients(torch, x, w, y, tokens, words):
    """d_hidden of the tokens and d_weight of the words in float64, of the mean loss."""
    lse = torch.empty(x.shape[0], dtype=torch.float64, device=x.device)
    step = max(1, (1 << 26) // w.shape[0])
    w64 = w.double()
    for first in range(0, x.shape[0], step):
        lse[first:first + step] = torch.logsumexp(x[first:first + step].double() @ w64.T, 1)
    p = torch.exp(x[tokens].double() @ w64.T - lse[tokens, None])
    p[torch.arange(len(tokens)), y[tokens].long()] -= 1
    d_hidden = p @ w64 / x.shape[0]
    p = torch.exp(x.double() @ w64[words].T - lse[:, None]) - (y[:, None].long() == words[None, :]).double()
    return d_hidden, p.T @ x.double() / x.shape[0]


def peers(torch, x, w, y):
    """name -> function that returns the loss of leaves x and w, for each package that is installed."""
    F = torch.nn.functional
    eager = lambda a, b: F.cross_entropy(F.linear(a, b).float(), y.long())
    found = {"PyTorch eager": eager, "torch.compile": torch.compile(eager)}

    def add(name, make):
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name}: not installed ({error})")

    def cut(**options):
        from cut_cross_entropy import linear_cross_entropy
        return lambda a, b: linear_cross_entropy(a, b, y.long(), **options)

    def liger():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as function
        return lambda a, b: (lambda out: out[0] if isinstance(out, tuple) else out)(function.apply(a, b, y.long()))

    def quack():
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
        return lambda a, b: chunked_linear_cross_entropy(a, b, y.long(), chunk_size=4096)

    add("cut_cross_entropy", cut)
    add("cut_cross_entropy, no filter", lambda: cut(filter_eps=None))
    add("Liger", liger)
    add("quack, chunks of 4096", quack)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--head", choices=sorted(HEADS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch

    tokens, dim, vocab = HEADS[args.head] if args.head else (args.tokens, args.dim, args.vocab)
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    x = torch.randn(tokens, dim, device=args.device).bfloat16()
    w = (torch.randn(vocab, dim, device=args.device) * 2 / dim**0.5).bfloat16()
    y = torch.randint(0, vocab, (tokens,), device=args.device, dtype=torch.int32)
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)

    rows, ways = [], {}
    ours = Logitless(args.library, args.device)
    for name, kind, dtype, budget in (
            ("logitless dense, fp32 d_weight", "dense", torch.float32, 512 << 20),
            ("logitless dense, bf16 d_weight", "dense", torch.bfloat16, (512 << 20) + vocab * dim * 4),
            ("logitless recompute, bf16 d_weight", "recompute", torch.bfloat16, 256 << 20)):
        ways[name] = lambda kind=kind, dtype=dtype, budget=budget: ours.loss(torch, x, w, y, kind, dtype, budget)
    for name, loss in peers(torch, x, w, y).items():

        def way(loss=loss):
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()

            def run():
                a.grad = b.grad = None
                loss(a, b).backward()

            run()
            return run, a.grad, b.grad, None

        ways[name] = way

    sampled = torch.linspace(0, tokens - 1, min(64, tokens)).long().to(args.device)
    words = torch.cat([y[:32].long(), torch.linspace(0, vocab - 1, min(32, vocab)).long().to(args.device)])
    exact_hidden, exact_weight = exact_gradients(torch, x, w, y, sampled, words)
    error = lambda got, exact: ((got.double() - exact).norm() / exact.norm()).item()
    for name, way in ways.items():
        try:
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            run, d_hidden, d_weight, workspace = way()
            run()
            synchronize()
            if workspace is None and on_gpu:
                gradients = d_hidden.nbytes + d_weight.nbytes
                workspace = torch.cuda.max_memory_allocated() - before - gradients
            end = time.perf_counter() + (0.15 if on_gpu else 0.0)
            while time.perf_counter() < end:
                run()
                synchronize()
            times = []
            for _ in range(args.repeat):
                start = time.perf_counter()
                run()
                synchronize()
                times.append(time.perf_counter() - start)
            rows.append({"name": name, "ms": statistics.median(times) * 1e3, "bytes": workspace,
                         "d_hidden_error": error(d_hidden[sampled], exact_hidden),
                         "d_weight_error": error(d_weight[words], exact_weight)})
        except Exception as failure:  # of a peer on this shape: the others still count
            print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
        run = d_hidden = d_weight = None
    if args.json:
        print(json.dumps({"tokens": tokens, "dim": dim, "vocab": vocab, "torch": torch.__version__, "rows": rows}, indent=2))
        return
    print(f"N {tokens}, D {dim}, V {vocab}, bf16, PyTorch {torch.__version__}")
    for row in rows:
        memory = "-" if row["bytes"] is None else f"{row['bytes'] / 2**20:.0f}"
        print(f"{row['name']:36} {row['ms']:10.2f} ms {memory:>8} MiB  d_hidden {row['d_hidden_error']:.2e}  "
              f"d_weight {row['d_weight_error']:.2e}")


if __name__ == "__main__":
    main()
