"""What a garage's controller asks every minute: who is plugged in now, and how many kW to offer each.

A `Controller` is made once, which compiles; each call of `allocate` then takes milliseconds. It
remembers which cars are full, so that they are not offered power again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.charging.backtest import check_facts
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import EarlierDays, Predictor
from apportion.domains.charging.garage import (
    NOTICEABLE_KW,
    PERIODS,
    TAKEN,
    Garage,
    State,
    StationView,
    see,
)
from apportion.domains.charging.schedulers import HINDSIGHT, SCHEDULERS, PolicySchedule
from apportion.domains.charging.sessions import RATE_KW
from apportion.errors import InputError, reading
from apportion.policy import Policy
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PERIOD = pd.Timedelta(minutes=15)
_NUMBERS = ("max_kw", "requested_kwh", "delivered_kwh", "offered_kw", "drawn_kw")
_TIMES = ("arrival", "stated_departure")
_COLUMNS = {"id": object} | dict.fromkeys(("plugged", "full", "stated"), bool)
_COLUMNS |= dict.fromkeys(_NUMBERS, float) | dict.fromkeys(_TIMES, "datetime64[s]")
"""Of a row for each station, and their types."""
_MOST = 1e12
"""No feeder gives so many kW."""


@dataclass(frozen=True)
class PowerOffers:
    """The kW to offer each station until the next question, and what nobody can take."""

    allocation_kw: dict[str, float]
    unused_kw: float

    def summary(self) -> str:
        """A line for each station."""
        width = max(map(len, self.allocation_kw))
        shown = self.allocation_kw | {"unused": self.unused_kw}
        return "\n".join(f"  {name:{width}}  {kw:7.3f} kW" for name, kw in shown.items())

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion allocate --json`."""
        return asdict(self)

    def to_frame(self) -> pd.DataFrame:
        """A row for each station."""
        return pd.Series(self.allocation_kw, name="kw").rename_axis("station").reset_index()

    def plot(self) -> "Figure":
        """A bar for each station."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.bar(list(self.allocation_kw), list(self.allocation_kw.values()))
        axes.set_ylabel("power offered (kW)")
        return figure


def read_now(path: Path) -> dict[str, Any]:
    """A JSON file of what the controller sees."""
    with reading(path, "give a JSON file; see the page on charging"):
        return json.loads(Path(path).read_text(encoding="utf-8"))


class Controller:
    """A trained charging policy, ready to be asked.

    Parameters
    ----------
    policy, about
        A policy and what was saved with it.
    stations
        The most stations behind the feeder; more are possible, and compile once more.
    baseline
        Who decides where the policy is not trusted in full: a scheduler, by its name.
    earlier
        Sessions of the garage's earlier days, as `read_sessions` gives them, for a policy that recalls
        them: similar requests, and the cars still to come. Without any it decides as in a garage
        without a past, where as much is to come as in training.

    Examples
    --------
    >>> controller = Controller.load("runs/garage")  # doctest: +SKIP
    >>> controller.allocate({"time": "2021-06-01 09:00", ...})["allocation_kw"]  # doctest: +SKIP
    """

    def __init__(
        self,
        policy: Policy,
        about: Mapping[str, Any],
        *,
        stations: int = 16,
        baseline: str | None = None,
        earlier: pd.DataFrame | None = None,
    ):
        check_facts(about)
        if baseline is not None and (baseline not in SCHEDULERS or baseline in HINDSIGHT):
            raise InputError(f"there is no scheduler {baseline!r}; choose one such as llf or equal")
        self._policy = PolicySchedule(policy)
        self._baseline = None if baseline is None else SCHEDULERS[baseline]
        self._predictor = Predictor.from_dict(about.get("predictor", {}))
        recall, past = about.get("recall", False), None
        if earlier is not None:
            sites = sorted(map(str, earlier.site.unique()))
            if not recall:
                raise InputError(
                    "the policy recalls no earlier days; train one with recall, or leave them out"
                )
            if len(sites) != 1:
                raise InputError(
                    f"earlier sessions are of {len(sites)} sites; give those of this garage's site alone"
                )
            past = Days.of(earlier, sites[0])
        self._past = EarlierDays.of(past, self._predictor) if recall else None
        # Full cars that are there, by station and arrival.
        self._full: set[tuple[str, pd.Timestamp]] = set()
        self._width = _width(stations)
        everyone = [{"id": str(i), "plugged": False} for i in range(max(stations, 1))]
        nobody = {"time": "2000-01-01 00:00", "capacity_kw": 1.0, "stations": everyone}
        self.allocate(nobody, trust=1.0 if baseline is None else 0.5)

    @classmethod
    def load(cls, folder: Path | str, **options: Any) -> "Controller":
        """The controller of a finished charging run; options as above."""
        return cls(load_run(folder).policy, load_about(folder), **options)

    def allocate(self, now: Mapping[str, Any], *, trust: float = 1.0) -> dict[str, Any]:
        """The kW to offer each station until the next call, and what nobody can take.

        Parameters
        ----------
        now
            `time` (local), `capacity_kw`, and `stations`: for each `id`, `max_kw`, `plugged`,
            `arrival`, `stated_departure`, `requested_kwh`, `delivered_kwh` so far, and `offered_kw`
            and `drawn_kw` in the period before. What the driver did not state is null or left out;
            `full` may say that a car has all it wants.
        trust
            The policy's part in the decision, such as `apportion certify --json` says; the rest is the
            baseline's.

        Raises
        ------
        InputError
            Everything that is wrong with it, a sentence for each.
        """
        if not 0 <= trust <= 1:
            raise InputError(f"trust is {trust}; it must be between 0 and 1")
        if trust < 1 and self._baseline is None:
            raise InputError(f"trust is {trust}, and nobody decides the rest; name a baseline")
        table, time, capacity = check_now(now)
        table["full"] = self._remember(table)
        seen = self._see(table, time, capacity)
        kw = np.asarray(_offer(self._policy, seen), float)
        if trust < 1:
            usual = np.asarray(_offer(self._baseline, seen), float)
            kw = usual + trust * (kw - usual)
        kw = np.minimum(kw, np.asarray(seen.limit_kw))[: len(table)]
        kw *= min(1.0, capacity / max(kw.sum(), 1e-9))
        return {
            "allocation_kw": dict(zip(table["id"], kw.tolist(), strict=True)),
            "unused_kw": max(capacity - float(kw.sum()), 0.0),
        }

    def _remember(self, table: pd.DataFrame) -> np.ndarray:
        """Who is full: those said to be, and those who took clearly less than they were offered."""
        offered, drawn = table["offered_kw"], table["drawn_kw"]
        cars = list(zip(table["id"], table["arrival"], strict=True))
        known = np.array([car in self._full for car in cars])
        full = table["full"] | ((offered > NOTICEABLE_KW) & (drawn < TAKEN * offered)) | known
        self._full = {cars[place] for place in np.flatnonzero(full & table["plugged"])}
        return full.to_numpy()

    def _see(self, table: pd.DataFrame, time: Any, capacity: float) -> StationView:
        """What is seen of the stations; there are more of them, where no car is, than in the table."""
        width, midnight = max(self._width, _width(len(table))), time.normalize()
        n = int((time - midnight) / _PERIOD)

        def wide(values: Any) -> np.ndarray:
            dtype = np.bool_ if values.dtype == bool else np.float32
            return np.pad(np.asarray(values, dtype), (0, width - len(values)))

        def periods(times: Any) -> np.ndarray:
            return wide(((times - midnight) / _PERIOD).fillna(0))

        plugged = wide(table["plugged"])
        # Nobody knows what they need or when they leave. All came before this period, so that what was
        # drawn so far is theirs.
        cars = {
            "arrival": np.where(plugged, n - 1, 0).astype(np.int32),
            "departure": np.where(plugged, PERIODS, 0).astype(np.int32),
            "arrived": periods(table["arrival"]),
            "need_kwh": np.zeros(width, np.float32),
            "requested_kwh": wide(table["requested_kwh"]),
            "stated_departure": periods(table["stated_departure"]),
            "stated": wide(table["stated"]),
        }
        today = Garage(**{name: x[None, :, None] for name, x in cars.items()})
        if self._past is None:
            today = self._predictor.apply(today)
        else:
            today = self._past.apply(today, np.array([midnight.date()], "datetime64[D]"))
        garage = jax.tree.map(lambda x: x[0], today)
        had = (wide(table[name]) for name in ("delivered_kwh", "offered_kw", "drawn_kw", "full"))
        state = State(*map(jnp.asarray, had))
        seen = _seen(garage, state, jnp.int32(n), jnp.float32(capacity))
        limit = jnp.where(seen.can_draw, wide(table["max_kw"]), 0.0)
        return eqx.tree_at(lambda s: s.limit_kw, seen, limit)


def _width(stations: int) -> int:
    """Padded to a power of two, so that a garage that grows is not compiled anew every time."""
    return max(8, 1 << (stations - 1).bit_length())


_seen = eqx.filter_jit(see)
_offer = eqx.filter_jit(lambda schedule, seen: schedule(seen))


def check_now(now: Any) -> tuple[pd.DataFrame, pd.Timestamp, float]:
    """What the controller sees as a table, its time and its capacity; everything wrong is said at once."""
    found: list[str] = []
    if not isinstance(now, Mapping):
        raise InputError("now: it must be a JSON object with time, capacity_kw and stations")
    time = _time(now.get("time"), "time", found)
    capacity = _number(now.get("capacity_kw"), "capacity_kw", found)
    if not found and not capacity > 0:
        found.append(f"now: capacity_kw is {now.get('capacity_kw')!r}; it must be above 0")
    stations = now.get("stations")
    if not isinstance(stations, list) or not stations:
        raise InputError("now: stations must be a list of at least one station")
    rows = []
    for number, station in enumerate(stations):
        if isinstance(station, Mapping) and "id" in station:
            rows.append(_station(station, time, found))
        else:
            found.append(f"now: station {number} has no id; give each a name of its own")
    names = [row["id"] for row in rows]
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(f"now: station {name} is there twice; give each a name of its own")
    if found or time is None:
        raise InputError("\n".join(found))
    return pd.DataFrame(rows).astype(_COLUMNS), time, capacity


def _station(
    station: Mapping[str, Any], time: pd.Timestamp | None, found: list[str]
) -> dict[str, Any]:
    """A row of the table."""
    name, plugged = f"station {station['id']}", station.get("plugged", False)
    if not isinstance(plugged, bool):
        found.append(f"now: {name}: plugged is {plugged!r}; it must be true or false")
    row: dict[str, Any] = dict.fromkeys(_NUMBERS, 0.0) | {"max_kw": RATE_KW}
    row |= {"id": str(station["id"]), "plugged": bool(plugged), "full": bool(station.get("full"))}
    told = {field: value for field, value in station.items() if value is not None}
    for field in _NUMBERS:
        if field in told:
            row[field] = _number(told[field], f"{name}: {field}", found)
        if row[field] < 0:
            found.append(f"now: {name}: {field} is {told[field]}; it must be >= 0")
    for field in _TIMES:
        row[field] = _time(told[field], f"{name}: {field}", found) if field in told else None
    stated = "requested_kwh" in told and row["stated_departure"] is not None
    row["stated"] = row["plugged"] and stated
    if plugged and "arrival" not in told:
        found.append(f"now: {name}: a car is plugged in, but arrival is missing")
    if plugged and row["arrival"] is not None and time is not None and row["arrival"] > time:
        found.append(f"now: {name}: arrival {row['arrival']} is after the time {time}")
    return row


def _number(value: Any, what: str, found: list[str]) -> float:
    # A whole number of JSON may be too long for a float.
    small = isinstance(value, int | float) and abs(value) < _MOST
    if isinstance(value, bool) or not small:
        found.append(f"now: {what} is {repr(value)[:40]}; it must be a number within {_MOST:g}")
        return 0.0
    return float(value)


def _time(value: Any, what: str, found: list[str]) -> pd.Timestamp | None:
    try:
        time = pd.Timestamp(value) if isinstance(value, str) else pd.NaT
    except ValueError:
        time = pd.NaT
    if isinstance(time, pd.Timestamp):
        return time.tz_localize(None)
    found.append(f"now: {what} is {value!r}; write local time as 2021-06-01 09:00")
    return None
