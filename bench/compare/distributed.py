#!/usr/bin/env python3
"""Compares a vocabulary-parallel head on the GPUs of a host with its alternatives: loss and gradients of hidden and
weight, communication included.

    LOGITLESS_LIBRARY=build/src/liblogitless.so PYTHONPATH=python python3 bench/compare/distributed.py
        [--ranks N] [--head llama|gemma|gpt2] [--tokens N] [--dim D] [--vocab V] [--targets COUNT] [--row NAME ...] [--rounds R]
        [--steps S] [--exchanges process_group | kernels] [--ctas N] [--error | --bits N | --profile NAME] [--json FILE]
        [--real-head FILE [--accuracy far_both|far_backward]]

Rows:
- alone: every GPU has a full head, all at the same time; the baseline of efficiency
- sp: vocabulary-parallel with sequence-parallel input, so that each rank has a shard of the tokens
- vp: vocabulary-parallel, all tokens on all ranks
- ft: vocabulary-parallel, each rank has N tokens of its own (FSDP); token-dispatched
- fw: the same, weight-gathered
- megatron: eager; bf16 logits of the local vocabulary shard; lse, target and gradients of hidden are all-reduced
- megatron_sp: the same after an all-gather of tokens; gradients of hidden are reduce-scattered
- loss_parallel: PyTorch's, on DTensors
- far_alone: only with --real-head; FarFieldHead's steps between orders and audits, a full head on every GPU
- far_sp, far_vp: the same, vocabulary-parallel with and without sequence-parallel input; their baseline is far_alone

Rows are interleaved in rounds. Each round times --steps successive calls by events, after one call that lets the host
run ahead. Prints for each row:

- the milliseconds of the slowest rank, the median of rounds
- memory beyond inputs, gradients included, by PyTorch's allocator, and the memory of the library's NCCL group
- the host's milliseconds to enqueue a call
- efficiency: the median over rounds of the time of `alone` over that of the row and the number of ranks; for ft and fw,
  with as many tokens on each rank, over the time of the row

Options:
- --exchanges: exchanges by the process group's collectives, or by NCCL's kernels only, instead of the default
- --ctas: the largest number of CTAs of an NCCL kernel
- --profile: prints the kernels of a step of each row on rank 0, instead of times
- --error: prints relative errors of d_weight and d_hidden against float64, on a sample of rank 0 (alone, sp, vp)
- --targets: draws targets from this many token ids, as a text does; by default from all
- --real-head: a trained head (safetensors: hidden, weight_q, weight_scale, targets) instead of random numbers. It is
  rotated into --dim columns, and its vocabulary is interleaved over the ranks, as interleave_vocab does

NCCL_NVLS_ENABLE=0 is set unless it has a value.
"""
import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FAR_FIRST = 150  # steps before a far-field head's first order and between orders, so that no measurement contains another one
HEADS = {"llama": (8192, 4096, 128256), "gemma": (16384, 2304, 256000), "gpt2": (32768, 768, 50304)}


class Rows:
    """The rows of the table; each computes the loss and gradients once."""

    def __init__(self, args, rank, device):
        from logitless.torch import Sharding, linear_cross_entropy

        self.rank, self.ranks, self.group = rank, args.ranks, dist.group.WORLD
        self.tokens, self.dim, self.vocab = args.tokens, args.dim, args.vocab
        self.call, self.sharding = linear_cross_entropy, Sharding
        torch.manual_seed(1)
        self.hidden = torch.randn(args.tokens, args.dim, device=device).bfloat16()
        self.target = torch.randint(0, args.targets, (args.tokens,), device=device)
        self.weight = (torch.randn(args.vocab, args.dim, device=device) * 2 * args.dim**-0.5).bfloat16()
        if args.real_head:
            self.hidden, self.weight, self.target = real_head(args, device)
        self.accuracy, self.far = args.accuracy, {}
        borders = [args.vocab * r // args.ranks for r in range(args.ranks + 1)]
        self.local_vocab = slice(borders[rank], borders[rank + 1])
        borders = [args.tokens * r // args.ranks for r in range(args.ranks + 1)]
        self.own = slice(borders[rank], borders[rank + 1])
        self.part = self.weight[self.local_vocab].clone().requires_grad_()
        self.counts = [borders[r + 1] - borders[r] for r in range(args.ranks)]

    def inputs(self, name):
        """Returns (hidden, weight, target), whose gradients are computed."""
        if name in ("alone", "far_alone"):
            return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_(), self.target
        split = name in ("sp", "megatron_sp", "far_sp")
        hidden, target = (self.hidden[self.own], self.target[self.own]) if split else (self.hidden, self.target)
        if name in ("ft", "fw"):
            hidden = hidden.roll(self.rank, 0)  # a batch for each rank
        return hidden.clone().requires_grad_(), self.part, target

    def step(self, name, hidden, weight, target):
        hidden.grad = weight.grad = None
        getattr(self, name)(hidden, weight, target).backward()

    def alone(self, hidden, weight, target):
        return self.call(hidden, weight, target)

    def _sharded(self, hidden, weight, target, tokens, **more):
        sharding = self.sharding(self.group, self.vocab, self.local_vocab.start, tokens, **more)
        return self.call(hidden, weight, target, sharding=sharding)

    def sp(self, hidden, weight, target):
        return self._sharded(hidden, weight, target, True)

    def vp(self, hidden, weight, target):
        return self._sharded(hidden, weight, target, False)

    def ft(self, hidden, weight, target):
        return self._sharded(hidden, weight, target, True, exchange="tokens")

    def fw(self, hidden, weight, target):
        return self._sharded(hidden, weight, target, True, exchange="weights")

    def _far(self, name, hidden, weight, target, **more):
        from logitless.torch import FarFieldHead

        if name not in self.far:
            self.far[name] = FarFieldHead(accuracy=self.accuracy, sample_every=0, refresh_every=FAR_FIRST, refresh_delay=0,
                                          audit_every=10**6)
            for _ in range(FAR_FIRST + 1):  # up to the trial of its order
                self._far(name, hidden, weight, target, **more)
            if not self.far[name].report.far:
                raise RuntimeError(self.far[name].explain())
            if self.rank == 0:
                print(f"  {name}: {self.far[name].statistics()}", flush=True)
        return self.far[name](hidden, weight, target, **more)

    def far_alone(self, hidden, weight, target):
        return self._far("far_alone", hidden, weight, target)

    def far_sp(self, hidden, weight, target):
        return self._far("far_sp", hidden, weight, target, sharding=self.sharding(self.group, self.vocab, self.local_vocab.start, True, interleaved=True))

    def far_vp(self, hidden, weight, target):
        return self._far("far_vp", hidden, weight, target, sharding=self.sharding(self.group, self.vocab, self.local_vocab.start, False, interleaved=True))

    def megatron(self, hidden, weight, target):
        return _Megatron.apply(hidden, weight, target, self, False)

    def megatron_sp(self, hidden, weight, target):
        return _Megatron.apply(hidden, weight, target, self, True)

    def loss_parallel(self, hidden, weight, target):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import loss_parallel

        mesh = init_device_mesh("cuda", (self.ranks,))
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        sharded_weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy((whole @ sharded_weight.T).float(), target)
            loss.backward()
        return torch.zeros((), device=hidden.device, requires_grad=True)


def real_head(args, device):
    """Returns hidden, weight and target of a file, rotated into args.dim columns; the vocabulary is interleaved over
    the ranks."""
    from safetensors.torch import load_file

    of = {name: t.to(device) for name, t in load_file(args.real_head).items()}
    columns = of["hidden"].shape[1]
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(args.dim, columns, generator=generator)).Q.T.to(device)
    vocab_ids = torch.arange(args.vocab, device=device)
    interleaved = vocab_ids.view(-1, args.ranks).T.reshape(-1) if args.vocab % args.ranks == 0 else vocab_ids
    name = torch.empty_like(vocab_ids)
    name[interleaved] = vocab_ids
    weight = ((of["weight_q"].float() * of["weight_scale"][:, None]).bfloat16().float() @ turn)[interleaved].bfloat16()
    return (of["hidden"].float() @ turn).bfloat16(), weight, name[of["targets"].long()]


class _Megatron(torch.autograd.Function):
    """Megatron-LM's eager path: bf16 logits of the local vocabulary shard, softmax in fp32, three all-reduces."""

    @staticmethod
    def forward(ctx, hidden, weight, target, rows, gathers):
        all_hidden, all_target = hidden, target
        if gathers:
            all_hidden = hidden.new_empty(rows.tokens, rows.dim)
            dist.all_gather_into_tensor(all_hidden, hidden)
            all_target = target.new_empty(rows.tokens)
            dist.all_gather_into_tensor(all_target, target)
        logits = all_hidden @ weight.T
        most = logits.max(-1).values.float()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        probability = (logits.float() - most[:, None]).exp_()
        total = probability.sum(-1)
        dist.all_reduce(total)
        is_local = (all_target >= rows.local_vocab.start) & (all_target < rows.local_vocab.stop)
        local_id = torch.where(is_local, all_target - rows.local_vocab.start, 0)
        chosen = torch.where(is_local, logits.gather(1, local_id[:, None])[:, 0].float() - most, 0.0)
        dist.all_reduce(chosen)
        probability.div_(total[:, None])
        ctx.save_for_backward(all_hidden, weight, probability.bfloat16(), local_id, is_local)
        ctx.rows, ctx.gathers = rows, gathers
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, d_loss):
        all_hidden, weight, d_logits, local_id, is_local = ctx.saved_tensors
        index = torch.arange(len(local_id), device=local_id.device)
        d_logits[index, local_id] -= is_local.bfloat16()
        d_logits *= d_loss / len(local_id)
        d_hidden = d_logits @ weight
        if ctx.gathers:
            own = d_hidden.new_empty(len(local_id) // ctx.rows.ranks, ctx.rows.dim)
            dist.reduce_scatter_tensor(own, d_hidden)
            d_hidden = own
        else:
            dist.all_reduce(d_hidden)
        return d_hidden, d_logits.T @ all_hidden, None, None, None


def measure(rows, name, args):
    """Measures one round of a row; rounds of the rows are interleaved."""
    inputs = rows.inputs(name)
    rows.step(name, *inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated()
    rows.step(name, *inputs)
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() - kept
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    host = []

    def round():
        dist.barrier()
        torch.cuda.synchronize()
        rows.step(name, *inputs)  # lets the host run ahead, as in a run of many steps
        begin.record()
        start = time.perf_counter()
        for _ in range(args.steps):
            rows.step(name, *inputs)
        end.record()
        host.append((time.perf_counter() - start) / args.steps * 1e3)
        end.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end) / args.steps], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    return round, memory, host


def profile(rows, name, args):
    """Prints a step on rank 0's GPU: kernels and copies by name, and idle time."""
    inputs = rows.inputs(name)
    for _ in range(3):
        rows.step(name, *inputs)
    torch.cuda.synchronize()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as traced:
        for _ in range(args.steps):
            rows.step(name, *inputs)
        torch.cuda.synchronize()
    if rows.rank > 0:
        return
    path = args.profile.with_suffix(f".{name}.json")
    traced.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    path.unlink()
    events.sort(key=lambda e: e["ts"])
    begin, end, busy = events[0]["ts"], events[0]["ts"], 0.0
    gaps, table = [], {}
    for e in events:
        if e["ts"] > end:
            gaps.append((e["ts"] - end, e["name"][:60]))
        busy += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
        end = max(end, e["ts"] + e["dur"])
        count, total = table.get(e["name"], (0, 0.0))
        table[e["name"]] = count + 1, total + e["dur"]
    steps = args.steps
    print(f"{name}: {(end - begin) / steps / 1e3:.3f} ms a step, of them {busy / steps / 1e3:.3f} busy")
    for kernel, (count, total) in sorted(table.items(), key=lambda item: -item[1][1])[:16]:
        print(f"  {total / steps / 1e3:8.3f} ms {count / steps:6.1f} x {kernel[:110]}")
    for gap, before in sorted(gaps, reverse=True)[: 4 * steps]:
        print(f"  {gap / 1e3:8.3f} ms of nothing before {before}")
    last = [e for e in events if e["ts"] >= events[-1]["ts"] + events[-1]["dur"] - (end - begin) / steps]
    for e in last:
        print(f"    {(e['ts'] - last[0]['ts']) / 1e3:8.3f} {e['dur'] / 1e3:8.3f} {e['args'].get('stream')} {e['name'][:70]}")


def same_bits(rows, name, args):
    """Checks that --bits steps give the gradients of the first one, to the bit, on every rank."""
    inputs = rows.inputs(name)
    rows.step(name, *inputs)
    first = [t.grad.clone() for t in inputs[:2]]
    other = 0
    for _ in range(args.bits):
        rows.step(name, *inputs)
        other += not all(torch.equal(a, t.grad) for a, t in zip(first, inputs))
    everywhere = torch.tensor([other], device="cuda")
    dist.all_reduce(everywhere)
    if rows.rank == 0:
        print(f"  {name:14}{args.bits} steps, {everywhere.item()} of other bits on some rank", flush=True)


def errors(rows, name):
    """Returns the greatest relative error of each gradient against float64, over some tokens and entries of this
    rank."""
    hidden, weight, target = rows.inputs(name)
    rows.step(name, hidden, weight, target)
    x, w = rows.hidden.double(), rows.weight.double()
    scores, log_sum = [], []
    for begin in range(0, rows.tokens, 512):
        z = x[begin : begin + 512] @ w.T
        log_sum.append(z.logsumexp(-1))
    lse = torch.cat(log_sum)
    sampled = slice(rows.local_vocab.start, rows.local_vocab.start + 64) if weight is rows.part else slice(0, 64)
    z = x @ w[sampled].T
    p = (z - lse[:, None]).exp()
    index = torch.arange(sampled.start, sampled.stop, device=p.device)
    p -= (rows.target[:, None] == index).double()
    exact = p.T @ x / rows.tokens
    scores.append(float((weight.grad[:64].double() - exact).norm() / exact.norm()))
    tokens = range(rows.own.start, rows.own.start + 64) if len(hidden) < rows.tokens else range(64)
    tokens = torch.tensor(list(tokens), device=x.device)
    p = (x[tokens] @ w.T - lse[tokens, None]).exp()
    p[torch.arange(64), rows.target[tokens]] -= 1
    exact = p @ w / rows.tokens
    scores.append(float((hidden.grad[:64].double() - exact).norm() / exact.norm()))
    return scores


def exchange_by(args, device):
    """Configures exchanges as --exchanges and --ctas require. Returns the MiB of GPU memory that they took."""
    from logitless.torch import configure_exchanges, groups

    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    more = dict(max_ctas=args.ctas) if args.ctas else {}
    if args.exchanges != "library":
        more.update(dict(copy_engines=False) if args.exchanges == "kernels" else dict(process_group=True))
    configure_exchanges(dist.group.WORLD, **more)
    groups.group_of(dist.group.WORLD.group_name).of_memory(device)
    return (before - torch.cuda.mem_get_info()[0]) / 2**20


def work(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.ranks, device_id=device)
    dist.barrier()
    group_mib = exchange_by(args, device)
    rows = Rows(args, rank, device)
    found = {}
    if args.bits:
        for name in args.row:
            same_bits(rows, name, args)
    elif args.profile:
        for name in args.row:
            profile(rows, name, args)
    elif args.error:
        for name in args.row:
            found[name] = {"errors_of_weight_and_hidden": errors(rows, name)}
    else:
        made = {}
        for name in args.row:
            try:
                made[name] = measure(rows, name, args)
            except Exception as error:  # a peer's failure is reported
                if rank == 0:
                    print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if name not in ("loss_parallel",):
                    raise
        times = {name: [] for name in made}
        for _ in range(args.rounds):
            for name, (round, *_) in made.items():
                times[name].append(round())
        for name, (_, memory, host) in made.items():
            found[name] = {"ms": statistics.median(times[name]), "all_ms": times[name], "memory_mib": memory / 2**20,
                           "host_ms": statistics.median(host)}
            alone = "far_alone" if name.startswith("far") else "alone"
            base = times.get(alone)
            if base and name != alone:  # per round, because a GPU's clock changes between rounds
                share = 1 if name in ("ft", "fw") else args.ranks
                found[name]["efficiency"] = statistics.median(a / b / share for a, b in zip(base, times[name]))
    if rank == 0 and found:
        print(f"the group took {group_mib:.0f} MiB")
        say(found, args)
    dist.destroy_process_group()


def say(found, args):
    print(f"{torch.cuda.get_device_name()} x {args.ranks}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, "
          f"{args.tokens} x {args.dim} x {args.vocab}")
    for name, row in found.items():
        text = f"  {name:14}"
        if "ms" in row:
            text += f"{row['ms']:8.2f} ms {row['memory_mib']:8.0f} MiB  host {row['host_ms']:6.2f} ms"
            text += f"  {row['efficiency']:.3f}" if "efficiency" in row else ""
        else:
            text += "  ".join(f"{e:.2e}" for e in row["errors_of_weight_and_hidden"])
        print(text, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--head", choices=HEADS, default="llama")
    for name in ("tokens", "dim", "vocab"):
        parser.add_argument(f"--{name}", type=int)
    rows = ["alone", "sp", "vp", "ft", "fw", "megatron", "megatron_sp", "loss_parallel"]
    far = ["far_alone", "far_sp", "far_vp"]
    parser.add_argument("--targets", type=int)
    parser.add_argument("--row", nargs="+", choices=[*rows, *far])
    parser.add_argument("--real-head", type=Path)
    parser.add_argument("--accuracy", choices=("far_both", "far_backward"), default="far_both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--error", action="store_true")
    parser.add_argument("--bits", type=int, default=0, help="compare the gradients of so many steps, in place of times")
    parser.add_argument("--exchanges", choices=("library", "process_group", "kernels"), default="library")
    parser.add_argument("--ctas", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a file name: what a step's time goes to, in place of times")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in zip(("tokens", "dim", "vocab"), HEADS[args.head]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.real_head and args.targets is not None:
        raise SystemExit("--targets: expected none with a --real-head, which has its own")
    if args.real_head and not args.real_head.is_file():
        raise SystemExit(f"{args.real_head} is not there; bench/heads/README.md says how a head is made")
    args.targets = args.vocab if args.targets is None else args.targets
    if not 1 <= args.targets <= args.vocab:
        raise SystemExit(f"--targets: expected 1 to {args.vocab}, got {args.targets}")
    if args.real_head:
        from safetensors import safe_open

        with safe_open(args.real_head, "pt") as file:
            args.tokens, args.vocab = file.get_slice("hidden").get_shape()[0], file.get_slice("weight_q").get_shape()[0]
    args.row = args.row or ["alone", "sp", "vp", *far] if args.real_head else args.row or rows
    if not args.real_head and any(name in far for name in args.row):
        raise SystemExit("--row: the far field's want a --real-head")
    if args.ranks < 1:
        raise SystemExit("--ranks: expected GPUs, found none")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python/support"))
    from ports import held_port

    with held_port() as port:
        processes = [multiprocessing.get_context("spawn").Process(target=work, args=(r, args, port)) for r in range(args.ranks)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()
    raise SystemExit(max(p.exitcode != 0 for p in processes))


if __name__ == "__main__":
    main()
