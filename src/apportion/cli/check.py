"""`apportion check`: what is installed, what there is to compute on, and whether a file is sound."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from apportion.cli.parsing import parse
from apportion.runs.environment import EXTRAS, devices, installed, versions


@dataclass(frozen=True)
class Check:
    """Versions, devices and extras; with --prices, whether the file is sound.

    Starts no JAX, so it answers at once. A file that is not sound is told in one sentence, exit 2.

    Example: apportion check --prices prices.csv
    """

    prices: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """CSV or Parquet file of daily prices."""
    json: bool = False
    """Print one JSON object."""


def check(arguments: Sequence[str]) -> Any:
    """Run `apportion check`."""
    given = parse(Check, arguments, "check")
    found: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "extras": {
            extra: {package: installed(package) for package in packages}
            for extra, packages in EXTRAS.items()
        },
    }
    if given.prices is not None:
        from apportion.domains.portfolio.prices import load_prices

        prices = load_prices(given.prices)
        found["prices"] = {
            "file": str(given.prices),
            "tickers": len(prices.tickers),
            "days": len(prices.dates),
            "first": str(prices.dates[0]),
            "last": str(prices.dates[-1]),
            "series": ["close"] if prices.high is None else ["close", "high", "low"],
            "fingerprint": prices.fingerprint,
        }
    return found if given.json else _text(found)


def _text(found: dict[str, Any]) -> str:
    lines = [f"{name:12} {version or 'missing'}" for name, version in found["versions"].items()]
    lines += ["", *(f"device       {device}" for device in found["devices"]), ""]
    for extra, packages in found["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        words = f"missing {', '.join(missing)}: pip install 'apportion[{extra}]'"
        lines.append(f"{extra:12} {words if missing else have}")
    if "prices" in found:
        p = found["prices"]
        lines += [
            "",
            f"{p['file']}: sound; {p['tickers']} tickers, {p['days']} days, {p['first']} to "
            f"{p['last']}, {', '.join(p['series'])}, fingerprint {p['fingerprint']}",
        ]
    return "\n".join(lines)
