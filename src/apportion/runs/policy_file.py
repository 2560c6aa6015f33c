"""Save and load a policy: arrays in `policy.safetensors`, the constructor call in `policy.json`.

`policy.json` contains the import path of the policy's class and the constructor arguments as plain JSON,
including nested policies. Loading calls the constructor, which checks its arguments, and fills in the
arrays; it executes no code from the files. Only classes of apportion and of installed packages that
registered one of its entry points are imported by name. Any other class must be passed by the caller.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.checkpoint import leaf_name
from apportion.runs.files import (
    checksummed,
    pack,
    read_arrays,
    read_json,
    require_recorded,
    to_json,
    write_atomic,
    write_json,
)
from apportion.runs.plugins import policy_packages
from apportion.simplex import Head

_ARRAYS = "policy.safetensors"
_DESCRIPTION = "policy.json"
_FORMAT = "apportion policy 2"

_ACCEPTED_TYPES = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
"""Types that a value may have, by the annotation of its argument."""


class _OutsideClass(InputError):
    """The class is not of a registered package, and the caller did not pass it."""


def save_policy(policy: Policy, folder: Path | str, about: dict[str, Any] | None = None) -> Path:
    """Save a policy as `policy.safetensors` and `policy.json` in a folder.

    Parameters
    ----------
    policy : Policy
        A policy that stores the arguments of its constructor in fields of the same names (see `Policy`).
        It may wrap other policies, and its arrays may be stacked over runs.
    folder : path
        Folder to save to; it is created if needed.
    about : dict, optional
        Values to save with it, such as the entities that it was trained on.

    Returns
    -------
    Path
        The file `policy.safetensors`.

    Raises
    ------
    InputError
        If the policy cannot be loaded again, or has values that are not finite.

    Examples
    --------
    >>> import tempfile
    >>> from apportion.policy import Recurrent
    >>> folder = tempfile.mkdtemp()
    >>> policy = Recurrent(channels=1, hidden=4, key=jax.random.key(0))
    >>> file = save_policy(policy, folder)
    >>> bool(eqx.tree_equal(load_policy(folder), policy))
    True
    """
    folder, name = Path(folder), type(policy).__name__
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(policy, eqx.is_array))
    arrays = {leaf_name(path): np.asarray(leaf) for path, leaf in leaves}
    classes: list[type] = []
    described = _describe(policy, "", classes)
    # The digest is that of the JSON as it is read back.
    content = {"format": _FORMAT, "policy": described, "about": about or {}}
    content = json.loads(to_json(content))
    again = _load(content, arrays, tuple(classes), name)
    if _describe(again, "", []) != described:
        raise InputError(
            f"{name}: differs when it is rebuilt from its fields, so it cannot be saved; store each "
            "argument of the constructor unchanged in a field of the same name"
        )
    header = {"format": _FORMAT, "description": _digest(content)}
    with checksummed(folder, _DESCRIPTION, _ARRAYS):
        write_json(folder / _DESCRIPTION, content)
        write_atomic(folder / _ARRAYS, pack(arrays, header))
    return folder / _ARRAYS


def load_policy(folder: Path | str, *, kind: type | tuple[type, ...] = ()) -> Policy:
    """Load a policy that `save_policy` wrote.

    Parameters
    ----------
    folder : path
        The folder, or one of the two files in it.
    kind : class or tuple of classes
        Your own classes, if the policy uses any. Classes of packages that register no entry point of
        apportion are used only if they are passed here.

    Returns
    -------
    Policy
        The policy.

    Raises
    ------
    InputError
        If the files are missing, damaged, or do not describe a valid policy.

    Examples
    --------
    >>> import tempfile
    >>> from apportion import EqualShares
    >>> folder = tempfile.mkdtemp()
    >>> file = save_policy(EqualShares(), folder)
    >>> load_policy(folder)
    EqualShares()
    """
    content, arrays, source = _read(folder)
    return _load(content, arrays, kind if isinstance(kind, tuple) else (kind,), source)


def load_about(folder: Path | str) -> dict[str, Any]:
    """Return the values `about` of a saved policy."""
    content, _, source = _read(folder)
    about = content.get("about", {})
    if not isinstance(about, dict):
        raise InputError(
            f"{source}: the values saved with the policy are damaged; use another copy"
        )
    return about


def _read(folder: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """Return description, arrays and source, after checking that both files belong together."""
    path = Path(folder)
    folder = path.parent if path.name in (_ARRAYS, _DESCRIPTION) else path
    arrays, header = read_arrays(folder / _ARRAYS)
    found = header.get("format")
    if found != _FORMAT:
        raise InputError(
            f"{folder / _ARRAYS}: contains {found or 'something'!r}, not a policy; "
            "pass a folder written by save_policy"
        )
    path = folder / _DESCRIPTION
    content = read_json(path, missing=f"it belongs next to {_ARRAYS}")
    if not isinstance(content, dict) or _digest(content) != header.get("description"):
        raise InputError(
            f"{path}: was changed, or does not belong to the {_ARRAYS} next to it; "
            "use another copy of both"
        )
    if (folder / "results.json").exists():
        require_recorded(folder, _DESCRIPTION, _ARRAYS)
    return content, arrays, str(path)


def _digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of the content, independent of white space and of the order of names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _load(
    content: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    kinds: tuple[type, ...],
    source: str,
) -> Policy:
    try:
        given = {name: jnp.asarray(array) for name, array in arrays.items()}
        # Only shapes are computed, so large sizes in the description allocate no memory.
        skeleton = eqx.filter_eval_shape(lambda: _build(content["policy"], given, kinds))
        if not isinstance(skeleton, Policy):
            raise ValueError(f"{type(skeleton).__name__} is not a policy")
        return _fill(skeleton, arrays)
    except _OutsideClass as error:
        raise InputError(f"{source}: {error}") from None
    except Exception as error:
        # A constructor may raise any exception.
        raise InputError(
            f"{source}: does not describe a valid policy ({error}); save the policy again"
        ) from error


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter for parameter in parameters}


def _describe(module: eqx.Module, path: str, classes: list[type]) -> dict[str, Any]:
    """Return the constructor call of a module; append the classes it needs to `classes`."""
    cls = type(module)
    classes.append(cls)
    arguments = {}
    for name in _parameters(cls):
        if name == "key":
            continue
        try:
            value = getattr(module, name)
        except AttributeError:
            raise InputError(
                f"{cls.__name__}: does not store the constructor argument {name!r}, so it cannot be "
                f"saved; store the argument in a field of that name"
            ) from None
        arguments[name] = _to_plain(value, f"{path}{name}", classes)
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "arguments": arguments}


def _to_plain(value: Any, path: str, classes: list[type]) -> Any:
    """Convert an argument to JSON; an array is represented by its path in the policy."""
    if isinstance(value, eqx.Module):
        return _describe(value, f"{path}/", classes)
    if eqx.is_array(value):
        return {"array": path}
    if isinstance(value, list | tuple):
        items = [_to_plain(item, f"{path}/{i}", classes) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{path} is {value}, which is not finite, so it cannot be saved")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise InputError(
            f"{path} is of type {type(value).__name__}, which cannot be saved; constructor arguments "
            "of a policy must be numbers, strings, arrays, other policies, or lists of these"
        )
    return value


def _build(described: Any, arrays: Mapping[str, jax.Array], kinds: tuple[type, ...]) -> Any:
    """Invert `_to_plain`."""
    match described:
        case {"class": str(path), "arguments": dict(arguments)}:
            cls = _find_class(path, kinds)
            values = {name: _build(value, arrays, kinds) for name, value in arguments.items()}
            return _construct(cls, values)
        case {"array": str(name)}:
            return arrays[name]
        case {"tuple": list(items)}:
            return tuple(_build(item, arrays, kinds) for item in items)
        case list(items):
            return [_build(item, arrays, kinds) for item in items]
        case None | bool() | int() | float() | str():
            return described
    raise ValueError(f"{described!r} is not a description")


def _construct(cls: type, arguments: dict[str, Any]) -> Any:
    parameters = _parameters(cls)
    for name, value in arguments.items():
        accepted = _ACCEPTED_TYPES.get(parameters[name].annotation) if name in parameters else None
        if accepted and type(value) in _ACCEPTED_TYPES and type(value) not in accepted:
            raise ValueError(f"{name} is {value!r}, which is of type {type(value).__name__}")
    # The saved arrays replace those that the key initialises.
    key = {"key": jax.random.key(0)} if "key" in parameters else {}
    return cls(**arguments, **key)


def _find_class(path: str, kinds: tuple[type, ...]) -> type:
    module, _, name = path.rpartition(".")
    package = path.partition(".")[0]
    # Importing a `__main__` would run the package's command line.
    if package in policy_packages() and "__main__" not in module.split("."):
        found = getattr(import_module(module), name, None)
        if not isinstance(found, type) or not issubclass(found, Policy | Head):
            raise ValueError(f"the installed version of {package} has no policy {path}")
        return found
    for kind in kinds:
        # Compare only the name: the class may have moved to another module.
        if path.endswith(f".{kind.__qualname__}"):
            return kind
    raise _OutsideClass(
        f"contains a policy of class {path}, which is not part of apportion or of an installed plug-in; "
        f"if you trust it, pass the class: load_policy(folder, kind={name})"
    )


def _fill(skeleton: Policy, arrays: Mapping[str, np.ndarray]) -> Policy:
    """Return the policy with its arrays, which may have leading axes of runs."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(skeleton, _is_shape))
    expected = {leaf_name(path): leaf for path, leaf in leaves}
    if expected.keys() != arrays.keys():
        odd = min(expected.keys() ^ arrays.keys())
        raise ValueError(f"array {odd} is {'missing' if odd in expected else 'not expected'}")
    for name, leaf in expected.items():
        given = arrays[name]
        leading = given.ndim - len(leaf.shape)
        if leading < 0 or given.shape[leading:] != leaf.shape or given.dtype != leaf.dtype:
            raise ValueError(
                f"array {name} is {given.dtype}{list(given.shape)}, "
                f"expected {leaf.dtype}{list(leaf.shape)}"
            )
        if jnp.issubdtype(given.dtype, jnp.inexact) and not np.isfinite(given).all():
            raise ValueError(f"array {name} has values that are not finite")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(arrays[leaf_name(path)]) if _is_shape(leaf) else leaf,
        skeleton,
    )


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
