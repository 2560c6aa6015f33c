"""A run's state as named arrays: parameters, optimiser, scores, memory, positions, key and step.

Arrays are named by their path in the state. A state is rebuilt into the structure of the run's own
first state, so that a checkpoint holds numbers only, and one of another run is refused.
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
        name = _name(path)
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
    places = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(first)}
    odd = sorted(places.keys() ^ arrays.keys())
    for name in odd or sorted(places):
        if odd or _signature(places[name]) != (arrays[name].shape, str(arrays[name].dtype)):
            raise InputError(
                f"{source}: {name} does not fit this run; its settings or the version of apportion "
                "have changed since it was saved, so train anew in another folder"
            )

    def fill(path: tuple, leaf: Any) -> Any:
        array = jax.numpy.asarray(arrays[_name(path)])
        return (
            jax.random.wrap_key_data(array, impl=about["keys"][_name(path)])
            if _is_key(leaf)
            else array
        )

    return jax.tree_util.tree_map_with_path(fill, first)


def _signature(leaf: Any) -> tuple[tuple[int, ...], str]:
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return data.shape, str(data.dtype)


def _is_key(leaf: PyTree) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
