"""Tests run with every array annotation checked at run time."""

import gc
import os
from pathlib import Path

import jax
from jaxtyping import install_import_hook

# The inside speaks JAX and checks nothing at run time: here every annotation of it is checked. The edges
# refuse bad input with a sentence of their own. Modules are imported when they are first asked for, so
# the hook stays for as long as the tests run.
INSIDE = (
    *(
        "algorithm",
        "composition",
        "gate",
        "learners",
        "memory",
        "policy",
        "priority",
        "recurrence",
        "scorers",
    ),
    *("simplex", "tasks", "training", "trees", "domains.training", "domains.probes"),
    *("domains.charging.garage", "domains.charging.peers", "domains.charging.problem"),
    *("domains.budget.problem", "domains.federated.federation", "domains.federated.clients"),
    *("domains.federated.training", "domains.portfolio.costs", "domains.portfolio.market"),
    *("domains.portfolio.training", "domains.portfolio.walk"),
)
install_import_hook([f"apportion.{room}" for room in INSIDE], "typecheck.check")

from hypothesis import settings

# The same examples every time, or those of the seed that was asked for.
settings.register_profile(
    "apportion", deadline=None, max_examples=20, derandomize="PYTEST_SEED" not in os.environ
)
settings.load_profile("apportion")

# The files that take longest, the longest first.
LONG = (
    "test_simulation",
    "test_aggregation_policy",
    "test_docs",
    "test_training",
    "test_simulated",
    "test_ppo",
    "test_gymnasium",
    "test_certify",
    "test_constrained",
    "test_commands",
    "test_federated_training",
    "test_executors",
    "test_federation",
    "test_schedulers",
    "test_fig6",
    "test_resume",
    "test_fig1",
    "test_prioritisation",
    "test_ray",
    "test_grid",
    "test_strategy",
    "test_engine",
    "test_export",
    "test_listings",
    "test_cash",
    "test_budget",
    "test_policy",
    "test_direct",
    "test_cli",
    "test_recurrence",
    "test_charging_backtest",
    "test_everything_registered",
    "test_recipe",
    "test_certificate",
    "test_federated_domain",
    "test_job",
    "test_skfolio",
    "test_federations",
    "test_two_writers",
    "test_coverage",
    "test_simplex",
)
PLACE = {f"{name}.py": place for place, name in enumerate(LONG)}


def pytest_ignore_collect(collection_path):
    """Examples are looked for in src; of the files here, tests alone are imported."""
    is_test = collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and not is_test else None


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: PLACE.get(item.path.name, len(LONG)))


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
