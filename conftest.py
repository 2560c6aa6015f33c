"""Configuration of all tests and doctests: compiler flags, checks of annotations, order of files."""

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

import jax
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# The inside speaks JAX and checks nothing at run time: here every annotation of it is checked. The edges
# refuse bad input with a sentence of their own. Modules are imported when they are first asked for, so
# the hook stays for as long as the tests run.
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
GONE = [
    room
    for room in INSIDE
    if not [path for source in SOURCES for path in source.glob(room.replace(".", "/") + "*")]
]
assert not GONE, f"{GONE} are gone: name what exists, or nothing of it is checked"

# The same examples every time, or those of the seed that was asked for.
settings.register_profile(
    "apportion", deadline=None, max_examples=20, derandomize="PYTEST_SEED" not in os.environ
)
settings.load_profile("apportion")

# The files that take longest, ten seconds or more, the longest first.
LONG = (
    *("test_schedulers", "test_portfolio_domain", "test_training", "test_gymnasium"),
    *("test_commands", "test_charging_backtest", "test_everything_registered", "test_fig3_4"),
    *("test_federation", "test_serve", "test_committed", "test_forecasts", "test_mpc", "test_docs"),
    *("test_controller", "test_executors", "test_ocpp", "test_runner"),
    *("test_strategy", "test_damaged_files", "test_recipe"),
    *("test_federated_training",),
)
PLACE = {f"{name}.py": place for place, name in enumerate(LONG)}


def pytest_ignore_collect(collection_path):
    """Examples are looked for in src; of the files here, tests alone are imported."""
    in_tests = "tests" in collection_path.relative_to(ROOT).parts
    is_test = collection_path.name.startswith("test_")
    return True if in_tests and collection_path.suffix == ".py" and not is_test else None


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: PLACE.get(item.path.name, len(LONG)))


@pytest.fixture(scope="module")
def few_schedulers():
    """Three stand for all: each is a part of every program that walks days, and compiled with it."""
    from apportion_charging.schedulers import SCHEDULERS

    with pytest.MonkeyPatch.context() as patched:
        for name in set(SCHEDULERS) - {"equal", "llf", "clairvoyant"}:
            patched.delitem(SCHEDULERS, name)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where peers are required, one that is not there is a failure and no skip."""
    report = yield
    required = os.environ.get("PEERS") == "required" and item.get_closest_marker("peer")
    if report.skipped and required:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: PEERS=required, but {report.longrepr[-1]}"
    return report


# Linux lets a process have 65,530 memory maps, and every compiled program takes some: a worker that
# keeps all programs of the suite dies in the middle of it.
MOST_MAPS = 20_000


def pytest_runtest_teardown(item, nextitem):
    """Forget compiled programs between files once there are many."""
    maps = Path("/proc/self/maps")
    between_files = nextitem is None or nextitem.path != item.path
    if between_files and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
