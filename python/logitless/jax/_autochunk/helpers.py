"""Sources of helper functions, which are emitted beside a generated function that calls them."""

# An index counted from the first element of a chunk may be out of range, and then gives 0.
HELPERS = {
    "_random": '''
def _random(key0, key1, counter):
    """Numbers in [0, 1) by counter: Threefry-2x32 of 20 rounds, both halves together."""
    counter = jnp.asarray(counter)
    high = (counter >> 32).astype(jnp.uint32) if counter.dtype == jnp.int64 else jnp.uint32(0)
    keys = [key0.astype(jnp.uint32), key1.astype(jnp.uint32)]
    keys.append(keys[0] ^ keys[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = high + keys[0], counter.astype(jnp.uint32) + keys[1]
    for group in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << by | y >> (32 - by)) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return ((x ^ y) >> 9).astype(jnp.float32) * 2.0**-23
''',
    "_uniform": '''
def _uniform(key0, key1, entry):
    """Numbers in (0, 1) of vocabulary entries: 39 bits of Philox-4x32 of 10 rounds."""
    keys, entry = [k.astype(jnp.uint32) for k in (key0, key1)], jnp.asarray(entry).astype(jnp.uint32)

    def product(x, by):
        """The upper and the lower 32 bits, by halves of 16."""
        low, high = jnp.uint32(by & 0xFFFF), jnp.uint32(by >> 16)
        a, b = x & 0xFFFF, x >> 16
        middle = b * low + (a * low >> 16)  # below 2^32, as is the next
        other = a * high + (middle & 0xFFFF)
        return b * high + (middle >> 16) + (other >> 16), x * jnp.uint32(by)

    def result(x, which):
        for step in range(10):
            (a, low_a), (b, low_b) = product(x[0], 0xD2511F53), product(x[2], 0xCD9E8D57)
            k0, k1 = (k + jnp.uint32(step * w & 0xFFFFFFFF) for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85)))
            x = b ^ x[1] ^ k0, low_b, a ^ x[3] ^ k1, low_a
        return jnp.where(which == 0, x[0], jnp.where(which == 1, x[1], jnp.where(which == 2, x[2], x[3])))

    block, none = entry >> 5 << 2 | entry >> 1 & 3, jnp.uint32(0)
    slot = entry >> 2 & 6 | entry & 1
    upper = result((block, none, none, none), slot >> 1) >> (slot & 1) * 16 & 0xFFFF
    more = result((block, 1 + (slot >> 2), none, none), slot & 3) >> 9
    number = upper.astype(jnp.float32) + (more.astype(jnp.float32) + 0.5) * 2.0**-23  # rounded once
    return jnp.minimum(number * 2.0**-16, 1 - 2.0**-24)
''',
    "_sort": '''
def _sort(x, axis, count, descending, dtype):
    """The first of the elements along axis in order, and their indices."""
    if descending and axis == x.ndim - 1:
        values, index = lax.top_k(x, count)
        return values, index.astype(dtype)
    index = lax.slice_in_dim(jnp.argsort(x, axis, stable=True, descending=descending), 0, count, axis=axis)
    return jnp.take_along_axis(x, index, axis), index.astype(dtype)
''',
    "_wide_lse": '''
def _wide_lse(x, axes):
    """The log-sum-exp of float32 in float64."""
    top = x.max(axes, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.squeeze(top, axes).astype(jnp.float64) + jnp.log(jnp.exp(x - top).sum(axes)).astype(jnp.float64)
''',
    "_pick": '''
def _pick(x, index, axis):
    """x at index along axis; 0 where the index is outside."""
    inside = (index >= 0) & (index < x.shape[axis])
    at = jnp.expand_dims(jnp.clip(index, 0, x.shape[axis] - 1), axis)
    return jnp.where(inside, jnp.take_along_axis(x, at, axis, mode="clip").squeeze(axis), 0)
''',
    "_pick_several": '''
def _pick_several(x, index, axis):
    """x at several indices along axis; 0 where an index is outside."""
    inside = (index >= 0) & (index < x.shape[axis])
    return jnp.where(inside, jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[axis] - 1), axis, mode="clip"), 0)
''',
    "_put": '''
def _put(index, updates, size, axis, dtype):
    """Updates added at an index along axis to zeros; those outside are dropped."""
    shape = tuple(size if d == axis else n for d, n in enumerate(index.shape))
    at = list(jnp.indices(index.shape, sparse=True))
    at[axis] = jnp.where(index < 0, size, index)
    return jnp.zeros(shape, dtype).at[tuple(at)].add(updates.astype(dtype), mode="drop")
''',
    "_take": '''
def _take(table, index):
    """Rows of table; 0 where the index is outside."""
    return table.at[jnp.where(index < 0, table.shape[0], index)].get(mode="fill", fill_value=0)
''',
    "_scatter_add": '''
def _scatter_add(rows, index, updates, dtype):
    """Updates summed by index; those outside are dropped."""
    zeros = jnp.zeros((rows, *updates.shape[index.ndim :]), dtype)
    return zeros.at[jnp.where(index < 0, rows, index)].add(updates.astype(dtype), mode="drop")
''',
}
