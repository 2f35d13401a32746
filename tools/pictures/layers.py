"""The layers of this tree, each on those that it may include."""

from svg import BLUE, FAINT, GREEN, GREY, LINE, ORANGE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, Picture


def draw(path, **_):
    p = Picture(960, 520, "The layers of logitless: users, calls, engine and compiler, kernels")
    p.text(40, 30, "An upper layer may include a lower one, never the other way round", 16, bold=True)
    rows = [
        (54, "how it is reached", [
            (40, 170, ["command line", "src/cli"], GREY, LINE), (225, 150, ["training", "apps/train"], GREY, LINE),
            (390, 170, ["PyTorch, JAX", "python/, src/xla"], GREY, LINE), (575, 150, ["C ABI", "src/capi"], GREY, LINE),
            (740, 180, ["C++ programs", "examples, bench, yours"], GREY, LINE)]),
        (138, "what is promised", [(40, 880, ["public headers", "include/logitless: shapes, dtypes, memory, errors of each call"],
                                    PALE_ORANGE, ORANGE)]),
        (222, "what decides", [
            (40, 430, ["compiler", "src/compiler: programs, gradients, chunks, the arena"], PALE_BLUE, BLUE),
            (490, 430, ["head", "src/head: plans, the engines, the far field, shards"], PALE_BLUE, BLUE)]),
        (306, "what computes", [
            (40, 280, ["CPU kernels", "src/kernels/cpu: AMX, AVX-512, AVX2"], PALE_GREEN, GREEN),
            (340, 280, ["GPU kernels", "src/kernels/cuda: Hopper, cuBLAS, NVRTC"], PALE_GREEN, GREEN),
            (640, 280, ["ranks", "src/comm: threads, NCCL, callbacks"], PALE_GREEN, GREEN)]),
        (390, "what all share", [
            (40, 430, ["formulas", "src/math: the loss of a token, log-sum-exps, one place each"], GREY, LINE),
            (490, 430, ["ground", "src/core: errors, tensors, memory, threads, files"], GREY, LINE)]),
    ]
    for y, _, boxes in rows:
        for x, width, text, fill, stroke in boxes:
            p.box(x, y, width, 62, text, fill, stroke)
    for y, _, _ in rows[:-1]:
        p.line(480, y + 63, 480, y + 82, FAINT, arrow=True)
    p.text(40, 484, "The compiler calls the head's engine where it finds a head; the reference kernels (src/kernels/reference) are the", 12, FAINT)
    p.text(40, 502, "float64 oracle beside CPU and GPU. tools/check_layers.py enforces the arrows, folder by folder.", 12, FAINT)
    p.write(path)
