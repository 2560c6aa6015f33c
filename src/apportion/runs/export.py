"""Export a policy as StableHLO for any number of entities; `jax.export.deserialize` loads it."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Bool, Float

from apportion.errors import InputError
from apportion.policy import Policy
from apportion.problem import Observation
from apportion.runs.files import write_atomic

_FILE_NAME = "policy.stablehlo"


def export_policy(policy: Policy, folder: Path | str, *, window: int, channels: int) -> Path:
    """Export a policy as a StableHLO program that runs without apportion.

    The program is a function of (history, held, mask, limits) for any number of entities.

    Parameters
    ----------
    policy : Policy
        A policy that does not need floors.
    folder : path
        Folder to write to; it is created if needed.
    window, channels : int
        Shape of the history of each entity.

    Returns
    -------
    Path
        The file, `policy.stablehlo`.

    Raises
    ------
    InputError
        If the policy cannot read such histories.

    Examples
    --------
    >>> import tempfile
    >>> from apportion.policy import Pooled
    >>> policy = Pooled(channels=3, hidden=8, key=jax.random.key(0))
    >>> export_policy(policy, tempfile.mkdtemp(), window=1, channels=3).name
    'policy.stablehlo'
    """
    try:
        program = _stablehlo(policy, window, channels)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{type(policy).__name__} cannot be exported for histories of {window} periods and "
            f"{channels} channels: {error}"
        ) from error
    file = Path(folder) / _FILE_NAME
    write_atomic(file, program)
    return file


def _stablehlo(policy: Policy, window: int, channels: int) -> bytes:
    """Return the serialised program of (history, held, mask, limits) for any number of entities."""
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
    # By default a program records the source lines that it was traced from. These contain local paths and
    # would make two exports of one policy differ.
    traced = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, traced)
    jax.config.update(traced, 0)
    try:
        # A program for GPUs would contain kernels that other versions may not support.
        program = export.export(jax.jit(shares), platforms=("cpu",))(*shapes, one((m,), number))
        return bytes(program.serialize())
    finally:
        jax.config.update(traced, before)
