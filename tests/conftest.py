"""Tests run with every array annotation checked, and with no silent promotion of ranks."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

with install_import_hook("apportion", "beartype.beartype"):
    import apportion  # noqa: F401

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "warn")
settings.register_profile("apportion", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("apportion")
