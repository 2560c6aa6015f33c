"""A policy without apportion: as StableHLO for any number of entities, and as arrays for NumPy.

The folder holds `policy.stablehlo`, which `jax.export.deserialize` runs, and for the policies that
`numpy_policy.py` knows also `policy.npz` with that file beside it, which needs NumPy alone. What was
written is read back and held against the policy before anything is handed out.
"""

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Float

from apportion.errors import InputError
from apportion.policy import Policy
from apportion.problem import Observation
from apportion.runs import numpy_policy
from apportion.runs.files import read_arrays, write_atomic
from apportion.runs.policy_file import DESCRIPTION, save_policy

STABLEHLO = "policy.stablehlo"
ARRAYS = "policy.npz"

_TOLERANCE = 1e-6
_IN_NUMPY = frozenset(
    ("Pooled", "Recurrent", "Ensemble", "ShrunkToEqual", "PartialTrading", "EqualShares", "Head")
)
"""What `numpy_policy.py` can run."""


def export_policy(policy: Policy, folder: Path | str, *, window: int, channels: int) -> list[Path]:
    """Write a policy for machines without apportion, and return the files written.

    Parameters
    ----------
    policy
        Any policy that needs no floors and no groups; `numpy_policy.py` is written for `Pooled` and
        `Recurrent` with or without `Ensemble`, `ShrunkToEqual` and `PartialTrading` around them.
    folder
        Where to write; created if needed.
    window, channels
        The shape of the history that the policy reads of each entity.

    Raises
    ------
    InputError
        The policy cannot read such histories, or what was written does not give its shares.

    Examples
    --------
    >>> import tempfile
    >>> from apportion.policy import Pooled
    >>> policy = Pooled(channels=3, hidden=8, key=jax.random.key(0))
    >>> files = export_policy(policy, tempfile.mkdtemp(), window=1, channels=3)
    >>> [file.name for file in files]
    ['policy.stablehlo', 'policy.npz', 'numpy_policy.py']
    """
    folder, name = Path(folder), type(policy).__name__
    try:
        program = _stablehlo(policy, window, channels)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} cannot be exported for histories of {window} periods and {channels} channels: "
            f"{error}"
        ) from error
    _check(policy, export.deserialize(bytearray(program)).call, window, channels, STABLEHLO)
    files = {STABLEHLO: bytes(program)}
    packed = _for_numpy(policy)
    if packed is not None:
        runner, source = numpy_policy.NumpyPolicy(io.BytesIO(packed)), Path(numpy_policy.__file__)
        _check(policy, runner, window, channels, ARRAYS)
        files |= {ARRAYS: packed, source.name: source.read_bytes()}
    for file, content in files.items():
        write_atomic(folder / file, content)
    return [folder / file for file in files]


def _stablehlo(policy: Policy, window: int, channels: int) -> bytes:
    """The program of (history, held, mask, limits), the number of entities left open."""
    (m,) = export.symbolic_shape("entities")
    number, one = jnp.float32, jax.ShapeDtypeStruct

    def shares(
        history: Float[Array, "entities window channels"],
        held: Float[Array, " entities"],
        mask: Bool[Array, " entities"],
        limits: Float[Array, " entities"],
    ) -> Float[Array, " entities"]:
        return policy(Observation(history, held, limits), mask)

    shapes = (one((m, window, channels), number), one((m,), number), one((m,), bool))
    # A program for graphics cards would carry kernels that no other version promises to run.
    with _without_places():
        program = export.export(jax.jit(shares), platforms=("cpu",))(*shapes, one((m,), number))
        return bytes(program.serialize())


@contextmanager
def _without_places() -> Iterator[None]:
    """Programs that do not say from which lines of which files they were traced.

    They would tell the folders of this machine, and two exports of one policy would differ.
    """
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _for_numpy(policy: Policy) -> bytes | None:
    """Arrays and constructor calls in one file, or None where NumPy's runner does not know a part."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            arrays, _ = read_arrays(save_policy(policy, folder))
        except InputError:
            return None
        described = json.loads((Path(folder) / DESCRIPTION).read_text(encoding="utf-8"))["policy"]
    if not _classes(described) <= _IN_NUMPY:
        return None
    return _npz({"policy": np.array(json.dumps(described)), **arrays})


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    """As `np.savez` writes it, but in order and without the time: the same arrays give the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, array in sorted(arrays.items()):
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w") as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return packed.getvalue()


def _classes(described: Any) -> set[str]:
    """The classes that a description names, all of apportion or else none that NumPy's runner knows."""
    if not isinstance(described, dict) or "class" not in described:
        return set()
    path = described["class"]
    own = path.rpartition(".")[2] if path.startswith("apportion.") else path
    return {own}.union(*(_classes(value) for value in described["arguments"].values()))


def _check(policy: Policy, run: Callable[..., Any], window: int, channels: int, what: str) -> None:
    """Refuse an export that does not give the policy's shares, with and without limits and padding."""
    rng = np.random.default_rng(0)
    decide = eqx.filter_jit(policy)
    for entities in (1, 7):
        history = rng.normal(size=(entities, window, channels)).astype(np.float32)
        held = rng.dirichlet(np.ones(entities)).astype(np.float32)
        mask = np.arange(entities) < max(entities - 1, 1)
        for limits in (np.ones(entities, np.float32), rng.random(entities, np.float32)):
            seen = Observation(jnp.asarray(history), jnp.asarray(held), jnp.asarray(limits))
            wanted = np.asarray(decide(seen, jnp.asarray(mask)))
            gap = np.abs(np.asarray(run(history, held, mask, limits)) - wanted).max()
            if not gap <= _TOLERANCE:
                raise InputError(
                    f"{what}: for {entities} entities a share differs from {type(policy).__name__}'s "
                    f"by {gap:.3g}; nothing was written"
                )
