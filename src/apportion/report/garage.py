"""A garage as its operator sees it: a day's power, who left with what, and every scheduler beside it."""

from typing import Any

import pandas as pd

from apportion.report.drawing import COLOURS, distinct, numbers, time_axis, times
from apportion.report.page import Part, Plot, Section, Table

_SCHEDULES = (
    "All share the same feeder among the same cars. Left short: cars with less than 80 % of their need. "
    "Fairness is Jain's index of the shares of need met. In brackets: 95 % intervals by clusters of "
    "days. Clairvoyant and optimum know the future; llf-recalled is no garage's: it reads what the policy "
    "reads of earlier days."
)


def sections(
    kw: pd.DataFrame | None, cars: pd.DataFrame | None, schedules: pd.DataFrame | None
) -> list[Section]:
    """Sections for the tables that a run has."""
    found = []
    if kw is not None:
        parts: list[Part] = [power(kw)]
        if cars is not None:
            about = "What each car left with, as a share of what it needed, under each schedule."
            parts.append(Table("Who left with what", cars, about))
        lead = "The busiest day of the last test, and the learned policy at work on it."
        found.append(Section("One day", parts, lead))
    if schedules is not None:
        tables: list[Part] = [
            Table(str(name), _served(rows)) for name, rows in schedules.groupby("test", sort=False)
        ]
        found.append(Section("Against the schedulers that garages use", tables, _SCHEDULES))
    return found


def power(kw: pd.DataFrame) -> Plot:
    """Stacked area: a row for each quarter of an hour, a column for each station and one unused."""
    stations = kw.drop(columns="unused")
    order = stations.sum().sort_values(ascending=False).index
    data: list[dict[str, Any]] = [
        {
            "type": "area",
            "step": True,
            "y": numbers(stations[column]),
            "name": name,
            "color": place % COLOURS + 1,
        }
        for place, (column, name) in enumerate(zip(order, distinct(order), strict=True))
    ]
    feeder = float(kw.sum(axis=1).max())
    full = {"type": "line", "y": [round(feeder, 3)] * len(kw), "name": "the feeder"}
    data.append(full | {"color": 12, "width": 1.5, "dash": "dash"})
    layout = {
        "x": times(kw.index),
        "xaxis": time_axis(kw.index),
        "yaxis": {"title": "power (kW)", "kind": "number"},
    }
    energy = stations.sum().sum() / 4
    words = (
        f"{len(order)} stations behind a feeder of {feeder:.1f} kW drew {energy:.0f} kWh together; "
        f"{order[0]} drew most, {stations[order[0]].sum() / 4:.1f} kWh, and "
        f"{kw['unused'].sum() / 4:.0f} kWh of the time shown stayed unused."
    )
    return Plot("A day's power, as it was shared", words, data, layout, wide=True)


def _served(rows: pd.DataFrame) -> pd.DataFrame:
    """Schedules as text: need met, cars left short, and the policy's lead in points."""
    shown = []
    for row in rows.to_dict("records"):
        known = pd.notna(row["ahead"])
        ends = f"[{100 * row['low']:+.2f}, {100 * row['high']:+.2f}]" if known else ""
        shown.append(
            {
                "schedule": row["schedule"],
                "need met": f"{row['served']:.2%}",
                "cars left short": f"{row['left_short']:.1%}"
                if pd.notna(row["left_short"])
                else "",
                "fairness": f"{row['fairness']:.3f}" if pd.notna(row["fairness"]) else "",
                "the policy's lead, points": f"{100 * row['ahead']:+.2f} {ends}" if known else "",
            }
        )
    return pd.DataFrame(shown)
