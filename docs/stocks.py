"""Builds the price file of the portfolio studies from its public source.

    python docs/stocks.py FILE.parquet            downloads 68 files, about 35 MB, and builds
    python docs/stocks.py FILE.parquet FOLDER     builds from the files TICKER.csv of a folder

docs/stocks.md describes the source, the choice of the 68 and the adjustment.
"""

import sys
from pathlib import Path

import pandas as pd

from apportion.domains.portfolio.prices import load_prices
from apportion.runs.files import write_atomic

TICKERS = (  # noqa: SIM905
    "AAPL MSFT GOOGL INTC NFLX CSCO T IBM QCOM ORCL VZ V DIS CMCSA MU MA HPQ TXN CRM AMAT NVDA ACN ADBE "
    "GLW CTSH WDC STX NTAP ATVI EA NLOK ADP JNPR XLNX INTU CTXS LRCX SWKS ADI AMD ADSK FFIV KLAC MSI "
    "AKAM OMC ADS PAYX WU MCHP TEL DISH DISCA MXIM VRSN FIS FISV IPG APH GPN CDNS TTWO FLIR SNPS ANSS "
    "BR IT IPGP"
).split()
"""By median daily dollar volume over 2009 to 2018, highest first."""
SOURCE = (
    "https://raw.githubusercontent.com/Bluefin-Tuna/Yahoo-Finance-Historical-Data/"
    "8b34492b150d8478d353d7441e36978e1b3092e2"
)
FIRST, LAST, DAYS = "2009-01-02", "2019-12-31", 2768
FINGERPRINT = "fd1f09898614961f"
"""Of the prices that the committed results were computed from."""


def adjusted(raw: pd.DataFrame, ticker: str) -> pd.DataFrame:
    """One ticker's days, adjusted for splits and dividends.

    The source adjusts open, high, low and close for splits. Multiplied by Adj Close / Close of the same
    day they are adjusted for dividends too. Volume stays adjusted for splits alone.
    """
    raw = raw[raw["Date"].between(FIRST, LAST)]
    if len(raw) != DAYS or raw.isna().any(axis=None):
        sys.exit(f"{ticker}: {len(raw.dropna())} whole days from {FIRST} to {LAST}, not {DAYS}")
    factor = raw["Adj Close"] / raw["Close"]
    prices = {
        name.lower(): (raw[name] * factor).round(6) for name in ("Open", "High", "Low", "Close")
    }
    days = pd.DataFrame({"date": pd.to_datetime(raw["Date"]), "ticker": ticker, **prices})
    return days.assign(volume=raw["Volume"].astype("int64"))


def main(out: Path, source: str) -> None:
    frames = []
    for ticker in TICKERS:
        try:
            frames.append(adjusted(pd.read_csv(f"{source}/{ticker}.csv"), ticker))
        except (OSError, KeyError, ValueError) as error:
            sys.exit(f"{source}/{ticker}.csv: cannot be read ({error}); give a folder that has it")
    whole = pd.concat(frames).sort_values(["ticker", "date"], ignore_index=True)
    write_atomic(out, whole.to_parquet(compression="zstd"))
    summary = load_prices(out).summary()
    print(f"wrote {out}: {summary}")
    if FINGERPRINT not in summary:
        print(
            f"these are not the prices of the committed results, which have fingerprint {FINGERPRINT}"
        )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else SOURCE)
