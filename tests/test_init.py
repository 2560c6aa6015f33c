"""The exported names, their documentation, and that importing them does not start JAX."""

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


def undocumented(exported):
    """Return the parameters of a class or function that its docstring does not have."""
    text = parse(inspect.getdoc(exported), DocstringStyle.NUMPYDOC)
    documented = {part.strip(" *") for one in text.params for part in one.arg_name.split(",")}
    if inspect.isclass(exported):
        documented |= documented_fields(exported)
    return set(inspect.signature(exported).parameters) - documented


@pytest.mark.parametrize(
    "package", [apportion, apportion.domains.portfolio, apportion.domains.federated]
)
def test_every_exported_name_is_there_and_documents_its_parameters(package):
    assert package.__all__ == dir(package)
    for name in package.__all__:
        if name.isupper():  # a constant
            continue
        exported = getattr(package, name)
        assert exported.__name__ == name
        assert undocumented(exported) == set(), name
        assert ">>> " in exported.__doc__ or package is not apportion, name


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("apportion.bridges.flower", ("LearnedAggregation", "ShareGradient")),
        ("apportion.bridges.gymnasium", ("ProblemEnv", "from_gymnasium")),
        ("apportion.bridges.skfolio", ("MultiTaskPortfolio",)),
        ("apportion.report", ("write_report",)),
    ],
)
def test_what_bridges_and_reports_offer_documents_its_parameters(module, names):
    module = pytest.importorskip(module, exc_type=ValueError)
    for name in names:
        assert undocumented(getattr(module, name)) == set(), name
        assert ">>> " in getattr(module, name).__doc__, name


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
