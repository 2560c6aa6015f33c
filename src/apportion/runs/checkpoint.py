"""Save and load the state of a run: parameters, optimiser, scores, memory, positions, key and step.

Arrays are named by their path in the state. Loading fills the structure of the run's initial state, so a
checkpoint holds only numbers, and a checkpoint of a different run is rejected. `save_state` writes a state
to a separate file, outside a run's folder, and `train(resume_from=FILE)` reads it.
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
    """Save the state of a run as one file, to continue it with `train(resume_from=file)`.

    Parameters
    ----------
    state : RunState
        `TrainingResult.state`, or the state of a chunk.
    file : path
        The safetensors file to write; an existing file is replaced.

    Returns
    -------
    Path
        The file.

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
    """Load the state that `save_state` wrote, with the structure of the run's initial state."""
    return from_arrays(first, *read_arrays(Path(file)), str(file))


def to_arrays(state: RunState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a state by path, and the kinds of its random keys."""
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
    """Return the saved state with the structure of the run's initial state.

    Raises
    ------
    InputError
        If the arrays do not have this structure.
    """
    if about.get("format") != _FORMAT:
        raise InputError(f"{source}: is not a checkpoint; pass the folder of a run")
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
            f"{source}: {min(odd)} does not match this run; the problem, tasks, policy, learner, settings "
            "or version of apportion have changed since it was saved, so train again"
        )

    def fill(path: tuple, leaf: Any) -> Any:
        name = leaf_name(path)
        array = jax.numpy.asarray(arrays[name])
        return jax.random.wrap_key_data(array, impl=own["keys"][name]) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(fill, first)


def _is_key(leaf: PyTree) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_name(path: tuple) -> str:
    """Return the name of a leaf from its path in a tree, such as `policy/score/of_held`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
