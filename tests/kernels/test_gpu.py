"""What is asked of the compiler for a GPU, and of which compilers."""

import jax
import jax.numpy as jnp
import pytest

from apportion.kernels import gpu


@pytest.fixture
def asked_afresh():
    gpu.as_graphs.cache_clear()
    yield
    gpu.as_graphs.cache_clear()


def test_without_a_gpu_nothing_is_asked(asked_afresh, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert gpu.as_graphs() == {}


def test_only_what_the_compiler_does_not_know_is_left_out(asked_afresh, monkeypatch):
    wanted = gpu._GRAPHS
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "_GRAPHS", {"xla_gpu_no_such_thing": 1, **wanted})
    assert gpu.as_graphs() == wanted


def test_all_but_the_first_argument_are_given_away():
    @gpu.compiled_as_graph
    def add(kept, given):
        return kept + given

    kept, given = jnp.ones(3), jnp.ones(3)
    assert add(kept, given).tolist() == [2, 2, 2]
    assert given.is_deleted()
    assert not kept.is_deleted()
