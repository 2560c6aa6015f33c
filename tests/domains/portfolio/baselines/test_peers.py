"""Final wealth against universal-portfolios on its own data, and against published tables.

Set APPORTION_UNIVERSAL_PYTHON to the python of an environment with universal-portfolios.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import universal_portfolios

from apportion.domains.portfolio.baselines.simple import BASELINES

pytestmark = pytest.mark.peer
PYTHON = os.environ.get("APPORTION_UNIVERSAL_PYTHON")
DATA = ("djia", "msci", "sp500", "tse", "nyse_o", "nyse_n")
NAMES = (
    "equal-crp", "buy-and-hold", "best-crp", "universal", "exponentiated-gradient", "ons", "pamr",
    "cwmr", "olmar", "rmr", "anticor",
)  # fmt: skip


@pytest.fixture(scope="module")
def peer():
    if PYTHON is None:
        pytest.skip("APPORTION_UNIVERSAL_PYTHON names no python with universal-portfolios")
    return universal_portfolios.peer_results(PYTHON, DATA)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_final_wealth_equals_the_peers(peer, data, name):
    result = universal_portfolios.compare(peer, data, name)
    assert result.gross_error < 1e-6
    assert result.fee_error < 1e-6
    assert result.exact_cost_error < 1e-6


# Final wealth as the literature reports it on these data sets (the table of Li et al. 2012 for PAMR
# and its rivals). Transcribed without the paper at hand: that every printed digit comes out is the
# evidence for the figures as much as for the algorithms.
SETS = ("nyse_o", "nyse_n", "tse", "sp500", "msci", "djia")
PRINTED = {
    "buy-and-hold": dict(
        zip(SETS, ("14.50", "18.06", "1.61", "1.34", "0.91", "0.76"), strict=True)
    ),
    "best-crp": dict(zip(SETS, ("250.60", "120.32", "6.78", "4.07", "1.51", "1.24"), strict=True)),
    "pamr": dict(
        zip(SETS, ("5.14E+15", "1.25E+06", "264.86", "5.09", "15.23", "0.68"), strict=True)
    ),
    "ons": {"nyse_o": "109.19"},
}


def classical(peer, data):
    """The data set as its papers use it: the file's first row is the first day's relatives."""
    relatives = peer[f"{data}/equal-crp/relatives"].copy()
    relatives[0] = peer[f"{data}/first row"]
    return relatives


def wealth(function, relatives):
    with jax.enable_x64(True):
        allocations = np.asarray(jax.jit(function)(jnp.asarray(relatives)))
    return float(np.exp(np.log((allocations * relatives).sum(1)).sum()))


@pytest.mark.parametrize("name", PRINTED)
def test_final_wealth_equals_the_published_tables(peer, name):
    for data, printed in PRINTED[name].items():
        found = wealth(BASELINES[name], classical(peer, data))
        mantissa, _, power = printed.partition("E")
        half = 0.5 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        assert abs(found - float(printed)) <= half * 1.001, (data, found, printed)
