"""A trained policy as one file: its arrays as safetensors, its make as JSON.

The description names one of the policy classes below and its constructor's arguments; loading builds
that class anew and pours the arrays in, so a file can only ever become one of these policies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from apportion.composition import Ensemble, EqualShares, PartialTrading, ShrunkToEqual
from apportion.errors import InputError
from apportion.policy import Attention, Convolutional, Policy, Recurrent
from apportion.runs.atomic import read_arrays, write_arrays
from apportion.simplex import Head

FILE = "policy.safetensors"
_FORMAT = "apportion policy 1"


class _Kind(NamedTuple):
    """How one class of policies is described, and built from its description."""

    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[dict[str, Any]], Policy]


def _head(policy: Any) -> dict[str, Any]:
    head = policy.head
    return {"floor": head.floor, "cap": head.cap, "cash": head.cash}


def _describe_recurrent(policy: Recurrent) -> dict[str, Any]:
    channels, hidden = policy.recurrence.from_input.shape[-2:]
    return {"channels": channels, "hidden": hidden, "head": _head(policy)}


def _describe_convolutional(policy: Convolutional) -> dict[str, Any]:
    filters, patch = policy.short.weight.shape[-2:]
    hidden, flat = policy.long.weight.shape[-2:]
    return {
        "channels": patch // policy.span,
        "window": flat // filters + policy.span - 1,
        "hidden": hidden,
        "filters": filters,
        "head": _head(policy),
    }


def _describe_attention(policy: Attention) -> dict[str, Any]:
    return _describe_recurrent(policy) | {"heads": policy.queries.shape[-3]}  # pyright: ignore[reportArgumentType]


def _of_network(make: Callable[..., Policy]) -> Callable[[dict[str, Any]], Policy]:
    def build(settings: dict[str, Any]) -> Policy:
        sizes = {name: _whole(name, settings[name]) for name in settings if name != "head"}
        return make(**sizes, head=Head(**settings["head"]), key=jax.random.key(0))

    return build


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 1 <= value <= 2**20:
        raise ValueError(f"{name} is {value!r}")
    return value


_KINDS: dict[type, _Kind] = {
    Recurrent: _Kind(_describe_recurrent, _of_network(Recurrent)),
    Convolutional: _Kind(_describe_convolutional, _of_network(Convolutional)),
    Attention: _Kind(_describe_attention, _of_network(Attention)),
    EqualShares: _Kind(lambda policy: {}, lambda settings: EqualShares()),
    PartialTrading: _Kind(
        lambda policy: {"policy": _describe(policy.policy)},
        lambda settings: PartialTrading(_build(settings["policy"]), 0.0),
    ),
    ShrunkToEqual: _Kind(
        lambda policy: {"policy": _describe(policy.policy)},
        lambda settings: ShrunkToEqual(_build(settings["policy"]), 0.0),
    ),
    Ensemble: _Kind(
        lambda policy: {"members": _describe(policy.members)},
        lambda settings: Ensemble(_build(settings["members"])),
    ),
}


def _describe(policy: Policy) -> dict[str, Any]:
    kind = _KINDS.get(type(policy))
    if kind is None:
        known = ", ".join(cls.__name__ for cls in _KINDS)
        raise InputError(
            f"{type(policy).__name__}: only the package's own policies can be saved ({known}); "
            "save your own with equinox.tree_serialise_leaves"
        )
    return {"class": type(policy).__name__, **kind.describe(policy)}


def _build(settings: dict[str, Any]) -> Policy:
    settings = dict(settings)
    name = settings.pop("class")
    return {cls.__name__: kind for cls, kind in _KINDS.items()}[name].build(settings)


def save_policy(policy: Policy, folder: Path | str, about: dict[str, Any] | None = None) -> Path:
    """Save a policy as `policy.safetensors` in a folder; returns the file.

    Parameters
    ----------
    policy
        One of the package's policies, alone or wrapped (`Ensemble`, `PartialTrading`,
        `ShrunkToEqual`), with or without leading axes of runs.
    folder
        Where to; it is made if it is not there.
    about
        Plain facts to keep with it, such as the entities it was trained on.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> policy = Recurrent(channels=1, hidden=4, key=jax.random.key(0))
    >>> file = save_policy(policy, folder)
    >>> bool((load_policy(folder).score.of_features == policy.score.of_features).all())
    True
    """
    path = Path(folder) / FILE
    description = {"format": _FORMAT, "policy": _describe(policy), "about": about or {}}
    write_arrays(path, _named(policy), description)
    return path


def load_policy(folder: Path | str) -> Policy:
    """The policy that `save_policy` put in a folder (or its file).

    Raises
    ------
    InputError
        The file is missing, damaged, or was not made by `save_policy`.
    """
    return _read(folder)[0]


def load_about(folder: Path | str) -> dict[str, Any]:
    """The facts kept with a saved policy."""
    return _read(folder)[1]


def _read(folder: Path | str) -> tuple[Policy, dict[str, Any]]:
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    arrays, description = read_arrays(path)
    if description.get("format") != _FORMAT:
        raise InputError(
            f"{path}: holds {description.get('format', 'something')!r}, not a policy; "
            "give a folder written by save_policy"
        )
    try:
        skeleton = eqx.filter_eval_shape(_build, description["policy"])
        return _pour(skeleton, arrays), description["about"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: its description does not make a policy ({error}); save the policy again"
        ) from None


def _named(tree: PyTree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _pour(skeleton: PyTree, arrays: dict[str, np.ndarray]) -> Any:
    """The skeleton with the arrays in their places; leading axes of runs may stand before them."""
    places = jax.tree_util.tree_leaves_with_path(eqx.filter(skeleton, _is_place))
    wanted = {_name(path): leaf for path, leaf in places}
    if wanted.keys() != arrays.keys():
        odd = sorted(wanted.keys() ^ arrays.keys())[0]
        raise ValueError(f"array {odd} is missing or too many")
    for name, place in wanted.items():
        given = arrays[name]
        end = given.ndim - len(place.shape)
        if end < 0 or given.shape[end:] != place.shape or given.dtype != place.dtype:
            raise ValueError(
                f"array {name} is {given.dtype}{list(given.shape)}, "
                f"{place.dtype}{list(place.shape)} is wanted"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(arrays[_name(path)]) if _is_place(leaf) else leaf, skeleton
    )


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
