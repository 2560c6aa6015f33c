"""What is held today, read from a file and checked: shares, or quantities and cash. Starts no JAX.

A CSV's columns decide which it is: ticker and share, or ticker and quantity with a row for cash. JSON is
an object of ticker to share (or what `apportion allocate --json` printed), or {"quantities": {...},
"cash": 0}. A ticker that the file leaves out holds nothing.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.rules import CASH
from apportion.domains.portfolio.ticker_files import number_in
from apportion.errors import InputError

_FORMS = (
    "write a CSV with columns ticker and share, or ticker and quantity with a row for cash, or a JSON "
    'object of ticker to share, or {"quantities": {...}, "cash": 0}'
)
_MIXED = "gives both shares and quantities; give one of them"


@dataclass(frozen=True, eq=False)
class Holdings:
    """What is held: units of each ticker and money, or shares of the whole."""

    amounts: np.ndarray
    """Units or shares, in the order of the tickers."""
    cash: float
    """Money, or its share."""
    counted: bool
    """Units and money, and not shares."""

    def values(self, prices: np.ndarray) -> np.ndarray:
        """What each ticker is worth, cash in front; shares are worth themselves."""
        worth = self.amounts
        if self.counted:
            # One that is not held need not have a price.
            worth = np.where(self.amounts > 0, self.amounts * np.nan_to_num(prices), 0.0)
        return np.append(self.cash, worth)


def read_holdings(path: Path, tickers: Sequence[str], *, cash: bool = False) -> Holdings:
    """Today's holdings in the order of `tickers`; `cash` says that the policy may hold some.

    Raises
    ------
    InputError
        One sentence on what is wrong with the file.
    """
    kind, pairs = _read(path)
    counted = kind == "quantity"
    known = {*tickers, CASH} if counted or cash else set(tickers)
    if counted and CASH in tickers:
        raise InputError(f'{path}: "{CASH}" is among the prices, and quantities need it for money')
    found: dict[str, float] = {}
    for name, value in pairs:
        if name not in known:
            raise InputError(
                f"{path}: {name} is not among the prices; name each ticker of the price file at "
                "most once"
            )
        if name in found:
            raise InputError(f"{path}: {name} occurs twice; name each ticker at most once")
        found[name] = _amount(value, f"{path}: the {kind} of {name}")
    if counted:
        _check_quantities(found, path, cash)
    else:
        found = _of_one(found, path)
    amounts = np.array([found.get(ticker, 0.0) for ticker in tickers])
    return Holdings(amounts, found.get(CASH, 0.0), counted)


def require_prices(holdings: Holdings, prices: Prices, path: Path) -> None:
    """Refuse quantities of what has no price on the last day."""
    missing = np.flatnonzero((holdings.amounts > 0) & np.isnan(prices.close[-1]))
    if holdings.counted and len(missing):
        raise InputError(
            f"{path}: {prices.tickers[missing[0]]} is held and has no price on {prices.dates[-1]}; "
            "leave it out, or give prices up to a day on which it has one"
        )


def _check_quantities(found: dict[str, float], path: Path, cash: bool) -> None:
    if cash and CASH not in found:
        raise InputError(
            f"{path}: says nothing of {CASH}, which the policy may hold; give it too, 0 where there "
            "is none"
        )
    if not any(found.values()):
        raise InputError(f"{path}: holds nothing; give quantities, or the {CASH} to begin with")


def _of_one(shares: dict[str, float], path: Path) -> dict[str, float]:
    total = math.fsum(shares.values())
    if abs(total - 1) > 1e-3:
        raise InputError(
            f"{path}: the shares sum to {total:.6g}; they must sum to 1, or be given as quantities"
        )
    return {name: share / total for name, share in shares.items()}


def _amount(value: Any, what: str) -> float:
    amount = number_in(value)
    if isinstance(value, bool) or not 0 <= amount < math.inf:
        raise InputError(f'{what} is "{str(value)[:40]}"; write a number of at least 0')
    return amount


def _read(path: Path) -> tuple[str, list[tuple[str, Any]]]:
    """Share or quantity, and each name with what the file says of it."""
    try:
        return _read_json(path) if path.suffix.lower() == ".json" else _read_csv(path)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a CSV or JSON file of what is held") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); give a CSV or JSON file of what is held"
        ) from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        raise InputError(f"{path}: not a table of holdings; {_FORMS}") from None


def _read_json(path: Path) -> tuple[str, list[tuple[str, Any]]]:
    # In pairs, because of a name that occurs twice JSON would take the last.
    content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
    top = dict(content)
    if "quantities" not in top:
        return "share", [(name, share) for name, share in top.get("allocation", content)]
    others = top.keys() - {"quantities", CASH, "date"}
    if others:
        raise InputError(f'{path}: {_MIXED} ("{min(others)}" stands beside "quantities")')
    money = [(name, value) for name, value in content if name == CASH]
    return "quantity", [*((name, units) for name, units in top["quantities"]), *money]


def _read_csv(path: Path) -> tuple[str, list[tuple[str, Any]]]:
    # Names are text, as in the prices: 000001 and NA too.
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table = table.rename(columns=lambda name: str(name).strip().lower())
    kinds = [kind for kind in ("share", "quantity") if kind in table.columns]
    if len(kinds) == 2:
        raise InputError(f"{path}: {_MIXED}")
    kind = kinds[0] if kinds else "share"
    names = [name.strip() for name in table["ticker"]]
    return kind, list(zip(names, table[kind].str.strip(), strict=True))
