"""What certificates said, on their page: filled from what benchmarks/certificates.py wrote."""

from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).parent / "results" / "certificates"
MARKS = ("certificates", "certificates-simulated")


def on_page_markdown(markdown, **_):
    for mark, filled in zip(MARKS, (certificates, simulated), strict=True):
        comment = f"<!-- {mark} -->"
        markdown = markdown.replace(comment, filled()) if comment in markdown else markdown
    return markdown


def certificates():
    """A row for each certificate: what was asked, and what it said."""
    table = pd.read_csv(RESULTS / "table.csv")
    lines = [
        "| | asked | verdict | mean gain, points | at any time within |",
        "|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        asked = f"`{row['trained']}`, `certify {row['certified']}`"
        mean, lower, upper = (
            f"{round(100 * row[key], 3) + 0.0:.3f}" for key in ("mean", "lower", "upper")
        )
        lines.append(f"| {row['name']} | {asked} | {said(row)} | {mean} | {lower} to {upper} |")
    return "\n".join(lines)


def said(row):
    """The verdict, and when it fell."""
    blocks = (
        f"blocks of {row['block']} {row['period']}s" if row["block"] > 1 else f"{row['period']}s"
    )
    if pd.isna(row["bet"]):
        return f"{row['verdict']} after {row['bets']} {blocks}"
    return f"{row['verdict']} after {int(row['bet'])} of {row['bets']} {blocks}"


def simulated():
    """How often gains of known mean are certified."""
    table = pd.read_csv(RESULTS / "simulated.csv")
    lines = ["| gains | certified | half of them after |", "|---|---|---|"]
    for row in table.to_dict("records"):
        after = "" if pd.isna(row["half_after"]) else f"{row['half_after']:.0f} periods"
        lines.append(f"| {row['gains']} | {100 * row['certified']:.1f} % | {after} |")
    return "\n".join(lines)
