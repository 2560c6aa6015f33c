"""Portfolios: share wealth out among instruments, period after period.

The names below are loaded when first asked for, so that checking a price file starts no compiler.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Prices": "prices",
    "load_prices": "prices",
    "embedded_prices": "prices",
    "Costs": "costs",
    "Market": "market",
    "SimulatedMarket": "simulated",
    "Backtest": "backtest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
