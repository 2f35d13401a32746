"""Sources of helper functions, which are emitted beside a generated function that calls them."""

# An index counted from the first element of a chunk may be out of range, and then gives 0.
HELPERS = {
    "_random": '''
def _random(key0, key1, counter):
    """Numbers in [0, 1) by counter: Threefry-2x32 of 20 rounds, in blocks that a cache holds."""
    shape = torch.broadcast_shapes(key0.shape, key1.shape, counter.shape)
    parts = [k.to(torch.int32) for k in (key0, key1)]
    parts = [k.expand(shape).reshape(-1) if k.dim() else k for k in parts]
    counter = counter.expand(shape).contiguous()
    flat, made = counter.reshape(-1), torch.empty(counter.shape, dtype=torch.float32, device=counter.device)
    block = 1 << (15 if counter.device.type == "cpu" else 26)
    for begin in range(0, flat.numel(), block):
        part = flat[begin:begin + block]
        keys = [k[begin:begin + block] if k.dim() else k for k in parts]
        keys.append(keys[0] ^ keys[1] ^ 0x1BD11BDA)
        x, y = (part >> 32).to(torch.int32).add_(keys[0]), part.to(torch.int32).add_(keys[1])
        for group in range(5):
            for by in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                x += y
                low = (y >> (32 - by)).bitwise_and_((1 << by) - 1)
                y = y.bitwise_left_shift_(by).bitwise_or_(low).bitwise_xor_(x)
            x += keys[(group + 1) % 3]
            y += keys[(group + 2) % 3] + (group + 1)
        made.view(-1)[begin:begin + block] = x.bitwise_xor_(y).bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)
    return made.mul_(2.0**-23)
''',
    "_uniform": '''
def _uniform(key0, key1, entry):
    """Numbers in (0, 1) of vocabulary entries: 39 bits of Philox-4x32 of 10 rounds, in blocks that a cache holds."""
    low, block = 0xFFFFFFFF, 6144 if entry.device.type == "cpu" else 1 << 24
    keys = [k.to(torch.int64) for k in (key0, key1)]
    shape = torch.broadcast_shapes(key0.shape, key1.shape, entry.shape)
    made = torch.empty(shape, dtype=torch.float32, device=entry.device)

    def result(keys, x, which):
        """One of four numbers of 32 bits; writes into x. The upper 32 bits of x[1] and x[3] do not count."""
        for step in range(10):
            a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            x[1].bitwise_xor_(b >> 32).bitwise_xor_(keys[0] + step * 0x9E3779B9).bitwise_and_(low)
            x[3].bitwise_xor_(a >> 32).bitwise_xor_(keys[1] + step * 0xBB67AE85).bitwise_and_(low)
            x = [x[1], b, x[3], a]
        for one in 1, 2, 3:
            x[0] = torch.where(which == one, x[one], x[0])
        return x[0]

    def fill(made, keys, entry):
        if made.numel() > block:
            axis = next(a for a in range(made.dim()) if made.shape[a] > 1)
            length = max(1, block * made.shape[axis] // made.numel())
            for begin in range(0, made.shape[axis], length):
                cut = [x.narrow(axis, begin, min(length, x.shape[axis] - begin)) if x.shape[axis] > 1 else x
                       for x in (made, *keys, entry)]
                fill(cut[0], cut[1:3], cut[3])
            return
        keys = [k.reshape(()) if k.numel() == 1 else k for k in keys]  # faster than a stride of 0
        at = (entry.to(torch.int64) & low).expand(made.shape)
        slot, zeros = at >> 2 & 6 | at & 1, [torch.zeros_like(at) for _ in (1, 2, 3)]
        upper = result(keys, [at >> 5 << 2 | at >> 1 & 3, *zeros], slot >> 1) >> (slot & 1) * 16 & 0xFFFF
        zeros = [torch.zeros_like(at) for _ in (2, 3)]
        more = result(keys, [at >> 5 << 2 | at >> 1 & 3, 1 + (slot >> 2), *zeros], slot & 3) >> 9 & 0x7FFFFF
        made.copy_(upper << 24 | more << 1 | 1).mul_(2.0**-40)

    fill(made, [k.reshape((1,) * (len(shape) - k.dim()) + k.shape) for k in keys],
         entry.reshape((1,) * (len(shape) - entry.dim()) + entry.shape))
    return made.clamp_(max=1 - 2.0**-24)
''',
    "_softmax_": '''
def _softmax_(x, dim, dtype=None):
    """x becomes its softmax. Returns the log-sum-exp that it had, in another dtype where one is said."""
    top = x.amax(dim).to(dtype or x.dtype)
    torch.softmax(x, dim, out=x)
    return torch.where(top.isinf(), top, top - x.amax(dim).log())
''',
    "_recurrence": '''
def _recurrence(a, b, dim):
    """y[k] = a[k] y[k + 1] + b[k] from the last element on. Each step doubles the number of elements that count."""
    size, step = b.shape[dim], 1
    while step < size:
        near, far = (0, size - step), (step, size - step)
        ends = [x.narrow(dim, size - step, step) for x in (a, b)]
        b = torch.cat((b.narrow(dim, *near) + a.narrow(dim, *near) * b.narrow(dim, *far), ends[1]), dim)
        a = torch.cat((a.narrow(dim, *near) * a.narrow(dim, *far), ends[0]), dim)
        step *= 2
    return b
''',
    "_pick": '''
def _pick(x, index, axis):
    """x at index along axis; 0 where the index is outside."""
    inside = (index >= 0) & (index < x.shape[axis])
    found = x.gather(axis, index.clamp(0, x.shape[axis] - 1).unsqueeze(axis).long()).squeeze(axis)
    return found.where(inside, 0)
''',
    "_pick_several": '''
def _pick_several(x, index, axis):
    """x at several indices along axis; 0 where an index is outside."""
    inside = (index >= 0) & (index < x.shape[axis])
    return x.gather(axis, index.clamp(0, x.shape[axis] - 1).long()).where(inside, 0)
''',
    "_put_": '''
def _put_(x, index, updates, axis):
    """Updates added to x at an index along axis; those outside are dropped."""
    inside = (index >= 0) & (index < x.shape[axis])
    at = index.clamp(0, x.shape[axis] - 1).long()
    return x.scatter_add_(axis, at, updates.where(inside, 0).to(x.dtype))
''',
    "_take": '''
def _take(table, index):
    """Rows of table; 0 where the index is outside."""
    flat = index.reshape(-1)
    inside = (flat >= 0) & (flat < table.shape[0])
    rows = table.index_select(0, flat.clamp(0, table.shape[0] - 1))
    rows = rows.where(inside.view(-1, *[1] * (table.dim() - 1)), 0)
    return rows.reshape((*index.shape, *table.shape[1:]))
''',
    "_scatter_add": '''
def _scatter_add(rows, index, updates, dtype):
    """Updates summed by index; those outside are dropped."""
    updates = updates.reshape(index.numel(), *updates.shape[index.dim():]).to(dtype)
    flat = index.reshape(-1)
    inside = (flat >= 0) & (flat < rows)
    updates = updates.where(inside.view(-1, *[1] * (updates.dim() - 1)), 0)
    return updates.new_zeros(rows, *updates.shape[1:]).index_add_(0, flat.clamp(0, rows - 1), updates)
''',
    "_attend": '''
def _attend(q, k, v, **options):
    """Attention of operands with contiguous rows, which fused kernels need."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
''',
    "_attention": '''
def _attention(q, k, v, **options):
    """Attention, and a function that makes its gradients from that of its result."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _attend(*inputs, **options)
    return out.detach(), lambda d_out: torch.autograd.grad(out, inputs, d_out)
''',
    "_ctc_loss": '''
def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity):
    """Returns losses, and alphas padded to the width of the targets."""
    losses, alphas = torch._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses, torch.nn.functional.pad(alphas, (0, 2 * targets.shape[-1] + 1 - alphas.shape[-1]))
''',
    "_ctc_loss_backward": '''
def _ctc_loss_backward(d_losses, log_probs, targets, *lengths_losses_alphas_and_options):
    """The gradient of log-probabilities."""
    *rest, blank, zero_infinity = lengths_losses_alphas_and_options
    if len(rest) == 2:  # lengths alone
        rest += torch._ctc_loss(log_probs, targets, *rest, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward(d_losses, log_probs, targets, *rest, blank, zero_infinity)
''',
}
