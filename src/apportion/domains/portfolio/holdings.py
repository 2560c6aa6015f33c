"""What is held today, read from a file and checked: one share for each ticker of the prices."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.errors import InputError


def read_holdings(path: Path, tickers: Sequence[str]) -> np.ndarray:
    """Today's shares in the order of `tickers`; one that the file leaves out holds nothing.

    The file is a CSV with columns ticker and share, a JSON object of ticker to share, or what
    `apportion allocate --json` printed.
    """
    try:
        names, shares = _read(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a CSV or JSON file of shares") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); give a CSV or JSON file of shares"
        ) from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        raise InputError(
            f"{path}: not a table of shares; write a CSV with columns ticker and share, or a JSON "
            "object of ticker to share"
        ) from None
    unknown = [name for name in names if name not in set(tickers)]
    if unknown or len(set(names)) < len(names):
        what = f"{unknown[0]} is not among the prices" if unknown else "a ticker occurs twice"
        raise InputError(f"{path}: {what}; name each ticker of the price file at most once")
    if not np.isfinite(shares).all() or (shares < 0).any() or abs(shares.sum() - 1) > 1e-3:
        raise InputError(
            f"{path}: the shares sum to {shares.sum():.6g} and the smallest is "
            f"{shares.min(initial=0):.6g}; shares must be >= 0 and sum to 1"
        )
    held = pd.Series(shares / shares.sum(), index=names)
    return held.reindex(list(tickers), fill_value=0.0).to_numpy()


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    if path.suffix.lower() == ".json":
        # In pairs, because of a name that occurs twice JSON would take the last.
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
        pairs = dict(content).get("allocation", content)
        return [name for name, _ in pairs], np.array([float(share) for _, share in pairs])
    # Names are text, as in the prices: 000001 and NA too.
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [name.strip() for name in table["ticker"]], table["share"].to_numpy(float)
