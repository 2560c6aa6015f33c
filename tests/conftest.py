"""Tests run with every array annotation checked at run time."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")
# The suite compiles much and computes little.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

from jaxtyping import install_import_hook

with install_import_hook("apportion", "beartype.beartype"):
    import apportion  # noqa: F401

from hypothesis import settings

settings.register_profile("apportion", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("apportion")
