"""A run's state as named arrays: parameters, optimiser, scores, memory, positions, key and step.

Arrays are named by their path in the state. A state is rebuilt in the structure of the run's own
first state, so a checkpoint holds only numbers, and a checkpoint of another run is refused. `save_state`
writes a state to a file of its own, outside a run's folder, and `train(resume_from=FILE)` reads it.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from apportion.algorithm import RunState
from apportion.errors import InputError
from apportion.runs.files import read_arrays, write_arrays

_FORMAT = "apportion checkpoint 1"


def save_state(state: RunState, file: Path | str) -> Path:
    """Save a run's state (`TrainingResult.state`, or a chunk's) as one file and return its path.

    Examples
    --------
    >>> import tempfile
    >>> from apportion import Direct, Recurrent, draw_tasks, train
    >>> from apportion.domains.probes import ShownBest
    >>> key = jax.random.key(0)
    >>> policy = Recurrent(channels=1, hidden=4, key=key)
    >>> run = ShownBest(), draw_tasks(12, 4, 8), policy, Direct(4)
    >>> half = train(*run, steps=5, key=key)
    >>> file = save_state(half.state, Path(tempfile.mkdtemp()) / "half.safetensors")
    >>> int(train(*run, steps=10, resume_from=file, key=key).state.step)
    10
    """
    write_arrays(Path(file), *to_arrays(state))
    return Path(file)


def load_state(file: Path | str, first: RunState) -> RunState:
    """The state that `save_state` wrote, in the structure of the run's first one."""
    return from_arrays(first, *read_arrays(Path(file)), str(file))


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
    expected, own = to_arrays(first)
    odd = expected.keys() ^ arrays.keys()
    if not odd and about.get("keys") != own["keys"]:
        odd = own["keys"].keys()
    if not odd:
        odd = {
            name
            for name, array in expected.items()
            if (array.shape, array.dtype) != (arrays[name].shape, arrays[name].dtype)
        }
    if odd:
        raise InputError(
            f"{source}: {min(odd)} does not fit this run; its problem, tasks, policy, learner or settings, "
            "or the version of apportion, have changed since it was saved, so train again"
        )

    def fill(path: tuple, leaf: Any) -> Any:
        name = leaf_name(path)
        array = jax.numpy.asarray(arrays[name])
        return jax.random.wrap_key_data(array, impl=own["keys"][name]) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(fill, first)


def _is_key(leaf: PyTree) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_name(path: tuple) -> str:
    """The name of a leaf from its path in a tree, such as `policy/score/of_held`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
