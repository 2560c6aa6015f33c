"""How the tests, and the examples in docstrings, compile and collect: set before JAX is imported."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
# NumPy's products on both cores wait for each other where two workers share them. Workers are started
# with it, and so are commands in processes of their own; in this process NumPy has been imported already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The suite compiles much and computes little: programs are not optimised but where a test asks for it
# (`tests/learning.py: optimised`), and then little. Two workers have two cores, so none compiles in parts
# side by side. Flags from outside, such as an instruction set, stay.
quick = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):
    # Without the fusion emitters, which write and lower MLIR for every fusion, it compiles twice as fast;
    # a flag that it does not know ends the process, and later ones do not know this.
    quick += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Workers, and commands in processes of their own, would each compile the same programs again.
compiled = Path(__file__).parent / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tracing makes many objects that live long: they need not be looked through as often.
gc.set_threshold(20_000, 20, 20)
