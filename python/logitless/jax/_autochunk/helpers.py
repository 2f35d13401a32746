"""Functions that stand beside a generated one where it uses them."""

# An index outside of its range, which one counted from the first element of a chunk often is, gives 0.
HELPERS = {
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
