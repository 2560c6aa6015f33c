"""A run's state as named arrays: parameters, optimiser, scores, memory, positions, key and step.

Arrays are named by their path in the state. A state is rebuilt in the structure of the run's own
first state, so a checkpoint holds only numbers, and a checkpoint of another run is refused.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from apportion.algorithm import RunState
from apportion.errors import InputError

_FORMAT = "apportion checkpoint 1"


def to_arrays(state: RunState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The state's arrays by path, and which of them are random keys of which kind."""
    arrays, keys = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = leaf_name(path)
        if _is_key(leaf):
            keys[name] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        arrays[name] = np.asarray(leaf)
    return arrays, {"format": _FORMAT, "keys": keys}


def from_arrays(
    first: RunState, arrays: dict[str, np.ndarray], about: dict[str, Any], source: str
) -> RunState:
    """The saved state in the structure of the run's first one.

    Raises
    ------
    InputError
        The arrays are not those of such a run.
    """
    if about.get("format") != _FORMAT:
        raise InputError(f"{source}: holds no checkpoint; give the folder of a run")
    expected = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(first)}
    kinds = {name: str(jax.random.key_impl(x)) for name, x in expected.items() if _is_key(x)}
    odd = sorted(expected.keys() ^ arrays.keys()) or sorted(
        kinds if about.get("keys") != kinds else ()
    )
    for name in odd or sorted(expected):
        if odd or _signature(expected[name]) != (arrays[name].shape, str(arrays[name].dtype)):
            raise InputError(
                f"{source}: {name} does not fit this run; its settings or the version of apportion "
                "have changed since it was saved, so train anew in another folder"
            )

    def fill(path: tuple, leaf: Any) -> Any:
        array = jax.numpy.asarray(arrays[leaf_name(path)])
        return (
            jax.random.wrap_key_data(array, impl=kinds[leaf_name(path)]) if _is_key(leaf) else array
        )

    return jax.tree_util.tree_map_with_path(fill, first)


def _signature(leaf: Any) -> tuple[tuple[int, ...], str]:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return data.shape, str(data.dtype)


def _is_key(leaf: PyTree) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_name(path: tuple) -> str:
    """The name of a leaf from its path in a tree, such as `policy/score/of_held`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
