"""Times training steps of PyTorch models, and their memory."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from importlib import metadata

import torch
import torch.distributed as dist

FIRST = 3  # steps whose losses are compared; they warm up as well
WARM_UP = 2  # steps beyond those


class Skipped(Exception):
    """A variant that cannot run here; the text says why."""


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Skipped(f"{package} is not installed") from None


def setting(args, model: str) -> str:
    """Returns a text of the hardware, versions and sizes."""
    gpu = args.device == "cuda"
    device = torch.cuda.get_device_name() if gpu else f"CPU, {os.cpu_count()} cores"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    there = [f"{name} {metadata.version(name)}" for name in ("transformers", "peft", "liger_kernel", "triton") if _installed(name)]
    tiny = ", --tiny" if args.tiny else ""
    return f"{ranks} x {device}, torch {torch.__version__}, {', '.join(there)}; {model}{tiny}"


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def batch(args, vocab: int) -> torch.Tensor:
    """Returns random token ids [sequences, length] of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = torch.randint(vocab, (args.sequences, args.length), generator=torch.Generator().manual_seed(1 + rank))
    return ids.to(args.device)


def measure(args, step, tokens: int) -> dict:
    """Returns the measurements of ``step()``, which trains and returns the loss. The peak is that of the slowest and of
    the fullest rank; on a CPU it is what PyTorch allocates during a step."""
    gpu = args.device == "cuda"
    losses = [_mean(step()) for _ in range(FIRST)]
    if not gpu:
        from logitless.torch._peak import peak_of

        peak, _ = peak_of(step, results_count=True, device="cpu")
    else:
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
    if args.together:
        wait(step)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.steps):
        if dist.is_initialized():
            dist.barrier()
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if gpu:
        peak = torch.cuda.max_memory_allocated()
    ranks = 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
        most = torch.tensor([peak, *seconds], dtype=torch.float64, device=args.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        peak, *seconds = most.tolist()
    median = statistics.median(seconds)
    return {"losses": losses, "milliseconds": 1e3 * median, "tokens_per_second": ranks * tokens / median, "peak_bytes": int(peak)}


def wait(step) -> None:
    """Waits for this process's turn to be measured, without the memory that PyTorch holds in reserve."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print("WAITS", flush=True)
    sys.stdin.readline()
    step()


def _mean(loss: torch.Tensor) -> float:
    loss = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def each(args, report, make, model: str, dtype: torch.dtype) -> None:
    """Measures the variants of args; ``make(args, variant)`` returns (step, note), and the note may be a function,
    called at the end. Reports a result for each, from rank 0."""
    for variant in args.variant:
        result = {"variant": variant, "dtype": str(dtype).removeprefix("torch.")}
        try:
            torch.manual_seed(0)
            step, note = make(args, variant)
            result |= measure(args, step, args.sequences * args.length)
            result |= {"setting": setting(args, model), "note": note() if callable(note) else note}
        except Skipped as why:
            result = {"variant": variant, "skipped": str(why)}
        step = None
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        if not dist.is_initialized() or dist.get_rank() == 0:
            report(result)


def trained(model, loss_of, ids, lr: float = 1e-4):
    """Returns a step: loss, backward and AdamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)

    def step():
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def of_model(model, ids):
    """Returns the loss that a model of transformers computes itself."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def made(args, config, dtype: torch.dtype):
    """Returns a model with random weights of a configuration, on the device."""
    import transformers

    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=args.attention)
    return model.to(args.device)  # buffers that a constructor makes elsewhere


def liger(model, kind: str) -> None:
    """Applies Liger's fused loss to a model, and no other of its kernels."""
    version("liger_kernel")
    from liger_kernel import transformers as kernels

    off = dict.fromkeys(("rope", "rms_norm", "cross_entropy"), False)
    off |= {"geglu" if kind == "gemma2" else "swiglu": False}
    getattr(kernels, f"apply_liger_kernel_to_{kind}")(fused_linear_cross_entropy=True, model=model, **off)
