"""What `import apportion` gives, and that it costs no JAX until a name is used."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import apportion
import apportion.domains.portfolio


@pytest.mark.parametrize("package", [apportion, apportion.domains.portfolio])
def test_every_exported_name_is_there(package):
    assert package.__all__ == dir(package)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name


def test_importing_starts_no_jax():
    code = """
import sys, apportion, apportion.domains.portfolio as portfolio
from apportion.domains.federated import Digits
from apportion.domains.federated.domain import DOMAIN
dir(apportion), dir(portfolio), DOMAIN.settings()
assert 'jax' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_has_one_home():
    assert apportion.__version__ == version("apportion")
