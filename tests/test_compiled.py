"""Guards that count and do not time: compilations, operations, bytes, and what leaves the device."""

import os
import re

import equinox as eqx
import jax
import pytest

from apportion import Direct, Recurrent, draw_tasks, train
from apportion.algorithm import Algorithm, advance, begin
from apportion.domains.portfolio import Market, SimulatedMarket
from apportion.domains.probes import ShownBest
from apportion.memory import Replay
from apportion.runs.compiled import keep_compiled
from apportion.training import Chunks

WINDOW, BATCH, ENTITIES, CHANNELS, HIDDEN = 8, 32, 5, 3, 25


def programs_of_a_run(steps: int) -> int:
    compiled = []

    def on_event(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(on_event)
    key = jax.random.key(0)
    train(
        ShownBest(),
        draw_tasks(12, 4, 8),
        Recurrent(channels=1, hidden=8, key=key),
        Direct(16, 1e-2),
        steps=steps,
        chunks=Chunks(20),
        key=key,
    )
    jax.monitoring.unregister_event_duration_listener(on_event)
    return len(compiled)


def test_a_run_compiles_few_programs_and_a_longer_one_no_more():
    # 48 in a process of its own, nearly all of them what makes the policy and checks before the run.
    assert programs_of_a_run(40) <= 65
    assert programs_of_a_run(120) == 0


@pytest.fixture(scope="module")
def chunk():
    """Ten steps of a small portfolio, as they are compiled."""
    market = Market.of(SimulatedMarket.draw(universe=20, days=200, seed=0).prices, window=WINDOW)
    policy = Recurrent(CHANNELS, HIDDEN, key=jax.random.key(0))
    algorithm = Algorithm.of(
        market,
        draw_tasks(20, ENTITIES, 6, seed=0),
        policy,
        Direct(BATCH, 1e-3),
        replay=Replay(length=market.horizon, warm_up=market.horizon, act_periods=0),
    )
    state = eqx.filter_jit(begin)(algorithm, policy, jax.random.key(1))
    return jax.jit(lambda state: advance(algorithm, state, 10)).lower(state).compile()


def test_a_step_computes_little_but_the_recurrence(chunk):
    # The compiler counts the body of a loop once: one period forward, one back, and the rest.
    forward = 2 * BATCH * ENTITIES * HIDDEN * (CHANNELS + 1 + HIDDEN)
    cost = chunk.cost_analysis()
    assert cost["flops"] <= 1.25 * 3 * forward
    # 1.2 MB were counted: 75 times the states of one period, most of it memory and windows.
    assert cost["bytes accessed"] <= 1.6e6


def test_times_and_entities_are_rows_of_one_product(chunk):
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", chunk.as_text())
    assert f"{HIDDEN},{BATCH * ENTITIES}" in [shape.removeprefix("1,") for shape in products]


def test_nothing_leaves_the_device_within_a_chunk(chunk):
    text = chunk.as_text()
    assert "custom_call_target" not in text
    for word in ("infeed", "outfeed", " send(", " recv(", "callback"):
        assert word not in text


@pytest.fixture
def no_cache_set(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT")):
            monkeypatch.delenv(name)
    # Set and taken back, so that what is put there in the test is gone after it.
    for name in ("COMPILATION_CACHE_DIR", "COMPILATION_CACHE_MAX_SIZE"):
        monkeypatch.setenv(f"JAX_{name}", "")
        monkeypatch.delenv(f"JAX_{name}")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return monkeypatch


def test_compiled_programs_are_kept_and_what_a_killed_process_left_is_cleared_away(
    no_cache_set, tmp_path
):
    keep_compiled()
    folder = tmp_path / "cache" / "apportion" / "compiled"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    names = ("whole-cache", "whole-atime", "half-cache", "young-cache")
    for name in names:
        (folder / name).write_text("")
    for name in names[:3]:
        os.utime(folder / name, (0, 0))
    no_cache_set.delenv("JAX_COMPILATION_CACHE_DIR")
    keep_compiled()
    left = {path.name for path in folder.iterdir()}
    assert left == {"whole-cache", "whole-atime", "young-cache"}


@pytest.mark.parametrize("name", ["JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_users_own_cache_and_a_folder_that_cannot_be_made_are_respected(
    name, no_cache_set, tmp_path
):
    (tmp_path / "file").write_text("")
    no_cache_set.setenv(name, str(tmp_path / "file"))
    keep_compiled()
    # A limit on its size would have JAX clear away what the user keeps there.
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ
