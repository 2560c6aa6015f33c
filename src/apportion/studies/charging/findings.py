"""What the charging study concludes from the kWh that every schedule delivered: table, figure, verdicts.

Points are of the need: 100 x (kWh drawn by one - by the other) / kWh needed. Intervals are by clusters
of days, as the days of one test share their weather and their week; the table also has those by days
and stations together, which are wider.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.domains.charging.backtest import CLAIRVOYANT, HINDSIGHT, OPTIMUM, POLICY
from apportion.statistics import Estimate, clustered_ratio
from apportion.studies.study import Conclusion, Verdict, concludes

SITE_NAMES = {"caltech": "Caltech", "jpl": "JPL"}
RECALLED = "llf-recalled"
"""Reads the recollections that the policy does; the seven others go by statements or a regression."""
_LEARNED = {
    "pmtl": "P-MTL",
    "stl": "STL",
    "ppo": "PPO",
    "only-caltech": "Caltech only",
    "only-jpl": "JPL only",
    "plain": "MTL without recall",
}


@concludes(
    "charging", "Charging: one policy for every garage, at stations and in a year it never saw"
)
def conclude(rows: Any, settings: dict[str, Any]) -> Conclusion:
    """The study from the rows of all cells."""
    table = summarise(rows)
    return table, _verdicts(rows, table), lambda: plot(table), _notes(table)


Name = tuple[str, str]
"""A schedule by the cell that computed it and its name there."""
Kwh = dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]
"""Of each cell, schedule and unit: what was drawn and needed, (places, policies)."""


def kwh_of(rows: Any) -> Kwh:
    """The rows of one test as arrays; a cell's policies come one after the other, places in order."""
    found: Kwh = {}
    some = rows[rows.unit != "all"]
    for key, group in some.groupby(["trained", "schedule", "unit"], sort=False):
        policies = group.policy.nunique()
        arrays = [group[name].to_numpy() for name in ("drawn_kwh", "need_kwh")]
        found[key] = tuple(x.reshape(policies, -1).T for x in arrays)
    return found


def lead(kwh: Kwh, first: Name, second: Name, *, both: bool = False) -> Estimate:
    """What one schedule serves more than another in one test, in points of the need.

    Where one side has several policies, their mean is meant, and the policies are a clustering of their
    own.
    """
    clusterings = []
    for unit in ("day", "station") if both else ("day",):
        (one, need), (other, _) = kwh[(*first, unit)], kwh[(*second, unit)]
        clusterings.append((100 * (one.mean(1) - other.mean(1)), need.mean(1)))
    (one, need), (other, _) = kwh[(*first, "day")], kwh[(*second, "day")]
    policies = max(one.shape[1], other.shape[1])
    if policies > 1:
        gains = (one.sum(0) - other.sum(0)) / policies
        sizes = np.broadcast_to(need.sum(0), gains.shape) / policies
        clusterings.append((100 * gains, sizes))
    return clustered_ratio(*clusterings)


def summarise(rows: Any) -> pd.DataFrame:
    """A row for each test and schedule: what it served, how cars left, and MTL's lead over it."""
    found = []
    for key, test in rows.groupby(["site", "test", "capacity", "stations"], sort=False):
        about = dict(zip(("site", "test", "capacity", "stations"), key, strict=True))
        peers = test[test.trained == "schedulers"].schedule.unique()
        kwh = kwh_of(test)
        learned = [kind for kind in _LEARNED if (kind, POLICY, "day") in kwh]
        names = [("mtl", POLICY), *((kind, POLICY) for kind in learned)]
        for name in [*names, *(("schedulers", peer) for peer in peers)]:
            found.append(about | _row(test, kwh, name))
    return pd.DataFrame(found)


def _row(test: Any, kwh: Kwh, name: Name) -> dict[str, Any]:
    drawn, need = kwh[(*name, "day")]
    some = test[(test.trained == name[0]) & (test.schedule == name[1]) & (test.unit == "all")]
    learned = name[1] == POLICY
    row: dict[str, Any] = {
        "schedule": {"mtl": "MTL", **_LEARNED}[name[0]] if learned else name[1],
        "served": float(drawn.sum() / need.sum()),
        "left_short": some.left_short.mean(),
        "fairness": some.fairness.mean(),
        "days": len(drawn),
    }
    if name != ("mtl", POLICY):
        ahead = lead(kwh, ("mtl", POLICY), name)
        row |= {"mtl_ahead": ahead.value, "low": ahead.low, "high": ahead.high}
        if name[1] != OPTIMUM:
            wide = lead(kwh, ("mtl", POLICY), name, both=True)
            row |= {"low_with_stations": wide.low, "high_with_stations": wide.high}
    return row


def _best_peer(table: Any, key: Any) -> str:
    site, test, capacity = key
    here = table[(table.site == site) & (table.test == test) & (table.capacity == capacity)]
    here = here[(here.stations == 10) & ~here.schedule.isin([*HINDSIGHT, RECALLED, "MTL"])]
    peers = here[~here.schedule.isin(list(_LEARNED.values()))]
    return str(peers.loc[peers.served.idxmax(), "schedule"])


def _verdicts(rows: Any, table: pd.DataFrame) -> list[Verdict]:
    verdicts = []
    of_ten = rows[rows.stations == 10]
    for key, test in of_ten.groupby(["site", "test", "capacity"], sort=False):
        where = f"{SITE_NAMES[key[0]]}, {key[1]}, feeder {key[2]:.0%}"
        best, kwh = _best_peer(table, key), kwh_of(test)
        apart = [RECALLED] if (test.schedule == RECALLED).any() else []
        for peer in dict.fromkeys((best, "llf", *apart)):
            note = f"{peer}, the best scheduler there" if peer == best else peer
            ahead = lead(kwh, ("mtl", POLICY), ("schedulers", peer))
            verdicts.append(
                Verdict.of(f"MTL serves more than {note} ({where})", ahead, paper=False)
            )
    for site, test in of_ten.groupby("site", sort=False):
        name = SITE_NAMES[site]
        kwh = kwh_of(_one_test(test))
        pairs = [
            ("MTL serves more than STL at equal updates", "mtl", "stl"),
            ("P-MTL serves more than MTL", "pmtl", "mtl"),
            ("MTL serves more than without recalling earlier days", "mtl", "plain"),
        ]
        pairs = [pair for pair in pairs if (pair[2], POLICY, "day") in kwh]
        for claim, one, other in pairs:
            ahead = lead(kwh, (one, POLICY), (other, POLICY))
            verdicts.append(Verdict.of(f"{claim} ({name})", ahead, paper=False))
        ahead = lead(kwh, ("ppo", POLICY), ("schedulers", "llf"))
        verdicts.append(Verdict.of(f"PPO serves more than llf ({name})", ahead, paper=False))
        other = next(kind for kind in ("only-caltech", "only-jpl") if not kind.endswith(site))
        ahead = lead(kwh, (other, POLICY), ("schedulers", "llf"))
        claim = f"Trained at the other site alone it serves more than llf ({name})"
        verdicts.append(Verdict.of(claim, ahead, paper=False))
    for (site, stations), test in rows[rows.stations != 10].groupby(
        ["site", "stations"], sort=False
    ):
        ahead = lead(kwh_of(test), ("mtl", POLICY), ("schedulers", "llf"))
        claim = f"Trained on 10 stations it serves more than llf on {stations}"
        verdicts.append(Verdict.of(f"{claim} ({SITE_NAMES[site]}, 2021)", ahead, paper=False))
    return verdicts


def _one_test(rows: Any) -> Any:
    """All tests of a site as one: a day of one test is another unit than the same day of another."""
    # A day's tests at several feeders are one cluster; 2019 and 2021 share no day.
    sums = ["drawn_kwh", "need_kwh"]
    keys = ["trained", "schedule", "unit", "policy", "place"]
    return rows.groupby(keys, sort=False)[sums].sum().reset_index()


def _notes(table: pd.DataFrame) -> tuple[str, ...]:
    closed, leads = [], []
    for key, here in table[table.stations == 10].groupby(["site", "test", "capacity"], sort=False):
        served = here.set_index("schedule").served
        best = served[_best_peer(table, key)]
        closed.append((served["MTL"] - best) / max(served[CLAIRVOYANT] - best, 1e-12))
        leads.append(100 * (served["MTL"] - best))
    return (
        f"MTL is at least as good as the best scheduler of each test in {sum(x >= 0 for x in leads)} "
        f"of {len(leads)} tests; its lead is {min(leads):.2f} to {max(leads):.2f} points.",
        f"It closes {min(closed):.0%} to {max(closed):.0%} of the gap from the best scheduler to the "
        "clairvoyant one.",
        "The best scheduler is chosen for each test in hindsight, of the seven that go by statements or "
        f"a regression; no single one is best in all. {RECALLED}, which reads the recollections that "
        "the policy reads, is claimed apart.",
        "The policies of one cell are averaged over seeds: intervals are over days, and do not hold "
        "for other seeds and other splits of the stations.",
    )


def _leads(axes: Axes, x: Any, rows: Any, **style: Any) -> None:
    ends = [rows.mtl_ahead - rows.low, rows.high - rows.mtl_ahead]
    axes.errorbar(x, rows.mtl_ahead, ends, **style)


def plot(table: Any) -> Figure:
    """MTL's lead over every scheduler in the 12 tests, what each way to learn adds, and other sizes."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    (a, b), (c, d) = figure.subplots(2, 2)
    tens = table[table.stations == 10]
    labels = []
    colours = {"llf": "C0", "edf": "C1", "equal": "C2", "llf-predicted": "C4", CLAIRVOYANT: "0.6"}
    for place, (key, here) in enumerate(tens.groupby(["site", "test", "capacity"], sort=False)):
        labels.append(f"{SITE_NAMES[key[0]]}\n{key[1][:4]}\n{key[2]:.0%}")
        rows = here.set_index("schedule")
        for number, (name, colour) in enumerate(colours.items()):
            style = {"fmt": "o", "ms": 4, "color": colour, "label": name if place == 0 else None}
            _leads(a, [place + 0.14 * (number - 2)], rows.loc[[name]], **style)
        for number, name in enumerate(("STL", "P-MTL", "PPO")):
            style = {"fmt": "s", "ms": 4, "color": f"C{number + 5}"}
            label = name if place == 0 else None
            _leads(b, [place + 0.2 * (number - 1)], rows.loc[[name]], label=label, **style)
        for number, name in enumerate(("MTL", "llf", "edf", "equal")):
            colour = {"MTL": "k"}.get(name, colours.get(name))
            c.bar(place + 0.2 * (number - 1.5), 100 * rows.loc[name].left_short, 0.2, color=colour,
                  label=name if place == 0 else None)  # fmt: skip
    for axes, title in (
        (a, "MTL's lead in energy, points of the need"),
        (b, "MTL's lead over other ways to learn, points of the need"),
        (c, "cars that left with less than 80 % of their need, %"),
    ):
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.axhline(0, color="k", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=7, ncols=3)
    sized = table[(table.test == "2021") & (table.capacity == 0.15)]
    for site, here in sized.groupby("site", sort=False):
        llf = here[here.schedule == "llf"].sort_values("stations")
        _leads(d, llf.stations, llf, fmt="o-", capsize=3, label=SITE_NAMES[site])
    d.axhline(0, color="k", linewidth=0.8)
    d.set_xlabel("stations behind the feeder; trained on 10")
    d.set_title("MTL's lead over llf in 2021, feeder 15 %", fontsize=10)
    d.legend(fontsize=8)
    return figure
