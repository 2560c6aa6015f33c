"""What apportion needs may be used by whoever may use apportion."""

from licences import is_accepted, listed


def test_every_package_has_a_licence_that_was_looked_at():
    found = listed()
    assert {"jax", "numpy", "pandas", "safetensors"} <= found.keys()
    assert {name: text for name, text in found.items() if not is_accepted(text)} == {}
