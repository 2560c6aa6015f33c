"""What `import apportion` gives, and that it costs no JAX until a name is used."""

import inspect
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from docstring_parser import DocstringStyle, parse

import apportion
import apportion.domains.federated
import apportion.domains.portfolio


def documented_fields(kind):
    """Return the fields of a class and its bases that have a docstring below them."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("apportion")]
    return set(re.findall(r'^    (\w+): .+\n    """', "".join(map(inspect.getsource, ours)), re.M))


@pytest.mark.parametrize(
    "package", [apportion, apportion.domains.portfolio, apportion.domains.federated]
)
def test_every_exported_name_is_there_and_documents_its_parameters(package):
    assert package.__all__ == dir(package)
    for name in package.__all__:
        exported = getattr(package, name)
        if name.isupper():  # a constant
            continue
        assert exported.__name__ == name
        text = parse(inspect.getdoc(exported), DocstringStyle.NUMPYDOC)
        documented = {part.strip(" *") for one in text.params for part in one.arg_name.split(",")}
        if inspect.isclass(exported):
            documented |= documented_fields(exported)
        assert set(inspect.signature(exported).parameters) <= documented, name


def test_importing_starts_no_jax():
    code = """
import sys, apportion, apportion.domains.portfolio as portfolio
from apportion.domains.federated import embedded_digits
from apportion.domains.federated.domain import DOMAIN
dir(apportion), dir(portfolio), DOMAIN.settings()
assert 'jax' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_has_one_home():
    assert apportion.__version__ == version("apportion")
