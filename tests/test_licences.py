"""What apportion needs may be used by whoever may use apportion."""

from importlib.metadata import distribution

from licences import is_accepted, licence_of, listed


def test_every_package_has_a_licence_that_was_looked_at():
    found = listed()
    assert {"jax", "numpy", "pandas", "safetensors"} <= found.keys()
    assert {name: text for name, text in found.items() if not is_accepted(text)} == {}


def test_licences_are_told_apart():
    assert is_accepted(licence_of(distribution("numpy")))
    assert not is_accepted("")
    assert not is_accepted("AGPL-3.0")
    assert not is_accepted("BSD-3-Clause AND GPL-3.0")
    assert is_accepted("GPL-2.0 OR MIT")
