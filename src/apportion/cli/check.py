"""`apportion check`: what is installed, what there is to compute on, and whether a file is valid."""

from pathlib import Path
from typing import Any

from apportion.cli.options import AllowJumps, File, Json
from apportion.errors import InputError
from apportion.runs.environment import EXTRAS, devices, installed, versions


def check(
    *,
    prices: File = None,
    allow_jumps: AllowJumps = False,
    sessions: File = None,
    timezone: str | None = None,
    json: Json = False,
) -> Any:
    """Show versions, devices and extras, and check a data file.

    Starts no JAX, so it answers at once. What is wrong with a file is said in a sentence each, and exit
    code 2.

    Example: `apportion check --prices prices.csv`

    Example: `apportion check --sessions sessions.csv`

    Parameters
    ----------
    prices
        CSV or Parquet file of daily prices.
    sessions
        CSV or Parquet file of charging sessions.
    timezone
        Where the garage is, such as America/Los_Angeles, for sessions whose times carry a zone.
    """
    found: dict[str, Any] = {
        "versions": versions(),
        "devices": devices(),
        "extras": {
            extra: {package: installed(package) for package in packages}
            for extra, packages in EXTRAS.items()
        },
    }
    if prices is not None:
        found["prices"] = _describe_prices(prices, allow_jumps)
    if sessions is not None:
        found["sessions"] = _describe_sessions(sessions, timezone)
    return found if json else _text(found)


def _describe_sessions(path: Path, timezone: str | None) -> dict[str, Any]:
    from apportion.domains.charging.sessions import fingerprint, inspect_sessions

    checked = inspect_sessions(path, timezone=timezone)
    if checked.refusals:
        raise InputError("\n".join(checked.refusals))
    return {
        "file": str(path),
        "summary": checked.summary(),
        "notes": list(checked.notes),
        "fingerprint": fingerprint(checked.frame),
    }


def _describe_prices(path: Path, allow_jumps: bool) -> dict[str, Any]:
    from apportion.domains.portfolio.prices import find_jumps, load_prices, refuse_jumps

    prices = load_prices(path)
    if not allow_jumps:
        refuse_jumps(prices, path)
    return {
        "file": str(path),
        "tickers": len(prices.tickers),
        "days": len(prices.dates),
        "first": str(prices.dates[0]),
        "last": str(prices.dates[-1]),
        "series": ["close"] if prices.high is None else ["close", "high", "low"],
        "jumps": [jump.describe() for jump in find_jumps(prices)],
        "fingerprint": prices.fingerprint,
    }


def _text(found: dict[str, Any]) -> str:
    lines = [f"{name:12} {version or 'missing'}" for name, version in found["versions"].items()]
    lines += ["", *(f"device       {device}" for device in found["devices"]), ""]
    for extra, packages in found["extras"].items():
        missing = ", ".join(name for name, version in packages.items() if version is None)
        present = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        install = f"missing {missing}: pip install 'apportion[{extra}]'"
        lines.append(f"{extra:12} {install if missing else present}")
    if "prices" in found:
        p = found["prices"]
        lines += [
            "",
            f"{p['file']}: valid; {p['tickers']} tickers, {p['days']} days, {p['first']} to "
            f"{p['last']}, {', '.join(p['series'])}, fingerprint {p['fingerprint']}",
            *(f"moves far: {jump}" for jump in p["jumps"]),
        ]
    if "sessions" in found:
        lines += ["", f"valid: {found['sessions']['summary']}", *found["sessions"]["notes"]]
    return "\n".join(lines)
