"""Configuration of all tests and doctests: compiler flags, checks of annotations, order of files."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
# Two workers share the cores, so threads of NumPy would slow each other down. This is for workers
# and subprocesses; in this process NumPy is already imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The suite spends its time on compiling, so programs are compiled with little optimisation, and with a bit
# more in tests that train (`tests/learning.py: optimised`). Two workers have two cores, so each compiles in
# one thread. Flags that are already set, such as an instruction set, are kept.
quick = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):
    # Compilation is twice as fast without the fusion emitters. Later versions do not have this flag, and an
    # unknown flag ends the process.
    quick += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Workers and subprocesses share compiled programs.
compiled = Path(__file__).parent / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tracing creates many long-lived objects, so collect garbage less often.
gc.set_threshold(20_000, 20, 20)

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Check every annotation of the modules that compute with JAX: they check nothing at run time. Modules
# are imported lazily, so the hook stays installed.
CORE = (
    *("algorithm", "composition", "learners", "memory", "policy", "priority", "recurrence"),
    *("scorers", "simplex", "tasks", "training", "trees"),
)
DOMAINS = (
    *("training", "probes", "budget.problem"),
    *("federated.clients", "federated.federation", "federated.states", "federated.training"),
    *("portfolio.market", "portfolio.training"),
)
CHARGING = ("garage", "problem", "schedulers")
INSIDE = [
    *(f"apportion.{room}" for room in CORE),
    *(f"apportion.domains.{room}" for room in DOMAINS),
    *(f"apportion_charging.{room}" for room in CHARGING),
]
install_import_hook(INSIDE, "typecheck.check")
ROOT = Path(__file__).parent
SOURCES = (ROOT / "src", ROOT / "packages" / "charging" / "src")
MISSING = [
    room
    for room in INSIDE
    if not [path for source in SOURCES for path in source.glob(room.replace(".", "/") + "*")]
]
assert not MISSING, f"there are no modules {MISSING}; correct CORE, DOMAINS or CHARGING"

# Hypothesis uses the same examples in every run, or those of PYTEST_SEED.
settings.register_profile(
    "apportion", deadline=None, max_examples=20, derandomize="PYTEST_SEED" not in os.environ
)
settings.load_profile("apportion")

# Files that take ten seconds or more, the slowest first.
SLOW_FILES = (
    *("test_schedulers", "test_portfolio_domain", "test_training", "test_gymnasium"),
    *("test_commands", "test_charging_backtest", "test_everything_registered", "test_fig3_4"),
    *("test_federation", "test_serve", "test_committed", "test_forecasts", "test_mpc", "test_docs"),
    *("test_controller", "test_executors", "test_access", "test_runner"),
    *("test_strategy", "test_damaged_files", "test_recipe"),
    *("test_federated_training",),
)
ORDER = {f"{name}.py": place for place, name in enumerate(SLOW_FILES)}


def pytest_ignore_collect(collection_path):
    """Collect doctests from src, and only files of tests from the folders of tests."""
    in_tests = "tests" in collection_path.relative_to(ROOT).parts
    is_test = collection_path.name.startswith("test_")
    return True if in_tests and collection_path.suffix == ".py" and not is_test else None


def pytest_collection_modifyitems(items):
    """Run slow files first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: ORDER.get(item.path.name, len(ORDER)))


@pytest.fixture(scope="module")
def few_schedulers():
    """Keep three schedulers, because each is compiled into every program that simulates days."""
    from apportion_charging.schedulers import SCHEDULERS

    with pytest.MonkeyPatch.context() as patched:
        for name in set(SCHEDULERS) - {"equal", "llf", "clairvoyant"}:
            patched.delitem(SCHEDULERS, name)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a skipped test of a peer as failed if PEERS=required."""
    report = yield
    required = os.environ.get("PEERS") == "required" and item.get_closest_marker("peer")
    if report.skipped and required:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: PEERS=required, but {report.longrepr[-1]}"
    return report


# Linux limits a process to 65,530 memory maps, and every compiled program takes some. A worker that keeps
# all programs of the suite would be killed.
MAX_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Clear compiled programs between files if there are many."""
    maps = Path("/proc/self/maps")
    between_files = nextitem is None or nextitem.path != item.path
    if between_files and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()
