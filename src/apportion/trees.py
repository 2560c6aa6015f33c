"""Stacks of PyTrees (runs, policies, tasks) and fingerprints of PyTrees."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of one structure along a leading axis; other leaves are those of the first tree.

    >>> stack([{"x": jnp.zeros(2)}, {"x": jnp.ones(2)}])["x"].shape
    (2, 2)
    """
    return jax.tree.map(
        lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *trees
    )


def take(tree: Tree, index) -> Tree:
    """Index the leading axis of every array in a stack."""
    arrays, others = eqx.partition(tree, eqx.is_array)
    # Slices cannot be arguments of a jitted function.
    if isinstance(index, slice | tuple):
        return eqx.combine(jax.tree.map(lambda leaf: leaf[index], arrays), others)
    return eqx.combine(_one_of(arrays, index), others)


@jax.jit
def _one_of(arrays: Tree, index) -> Tree:
    """Index all arrays in one compiled program instead of one per leaf.

    >>> _one_of((jnp.arange(3), jnp.arange(6).reshape(3, 2)), 2)[1].tolist()
    [4, 5]
    """
    return jax.tree.map(lambda leaf: leaf[index], arrays)


def _on_arrays(change: Callable[[Any], Any], tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: change(leaf) if eqx.is_array(leaf) else leaf, tree)


def repeat(tree: Tree, times: int) -> Tree:
    """Repeat each tree of a stack `times` times in a row."""
    return _on_arrays(lambda leaf: jnp.repeat(leaf, times, 0), tree)


def copies(tree: Tree, count: int) -> Tree:
    """Stack `count` copies of a tree."""
    return _on_arrays(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def grouped(tree: Tree, size: int) -> Tree:
    """Split a stack into a stack of groups of `size`."""
    return _on_arrays(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), tree)


def fingerprint(tree: Any) -> int:
    """Return a 32-bit hash of all arrays, numbers, names and classes of a tree, equal in every process.

    Functions are hashed by name.

    >>> fingerprint({"x": jnp.zeros(2)}) == fingerprint({"x": np.zeros(2, "float32")})
    True
    >>> fingerprint({"x": jnp.zeros(2)}) == fingerprint({"x": jnp.ones(2)})
    False
    """
    digest = hashlib.sha256()
    for part in _parts(tree):
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest()[:4], "little")


def _parts(value: Any):
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__.encode()
        for field in fields(value):
            yield field.name.encode()
            yield from _parts(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        yield from _parts([*value.items()])
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__).encode()
