"""Tests run with every array annotation checked at run time."""

import gc
import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

# The inside speaks JAX and checks nothing at run time: here every annotation of it is checked. The edges
# refuse bad input with a sentence of their own. Modules are imported when they are first asked for, so
# the hook stays for as long as the tests run.
CORE = (
    *("algorithm", "composition", "gate", "learners", "memory", "policy", "priority", "recurrence"),
    *("scorers", "simplex", "tasks", "training", "trees"),
)
DOMAINS = (
    *("training", "probes", "budget.problem"),
    *("charging.garage", "charging.problem", "charging.schedulers"),
    *("federated.clients", "federated.federation", "federated.states", "federated.training"),
    *("portfolio.market", "portfolio.training"),
)
INSIDE = [f"apportion.{room}" for room in (*CORE, *(f"domains.{room}" for room in DOMAINS))]
install_import_hook(INSIDE, "typecheck.check")
SOURCES = Path(__file__).parents[1] / "src"
GONE = [room for room in INSIDE if not list(SOURCES.glob(room.replace(".", "/") + "*"))]
assert not GONE, f"{GONE} are gone: name what exists, or nothing of it is checked"

from hypothesis import settings

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
    *("test_charging_export", "test_strategy", "test_fuzz", "test_recipe"),
    *("test_federated_training",),
)
PLACE = {f"{name}.py": place for place, name in enumerate(LONG)}


def pytest_ignore_collect(collection_path):
    """Examples are looked for in src; of the files here, tests alone are imported."""
    is_test = collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and not is_test else None


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: PLACE.get(item.path.name, len(LONG)))


@pytest.fixture(scope="module")
def few_schedulers():
    """Three stand for all: each is a part of every program that walks days, and compiled with it."""
    from apportion.domains.charging.schedulers import SCHEDULERS

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
