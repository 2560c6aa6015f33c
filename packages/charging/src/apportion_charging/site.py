"""Wiring of a garage, read from a TOML file: stations, their cables and the limits above them.

    timezone = "Europe/Berlin"
    volts = 230              # voltage to neutral of each phase that a station uses
    feeder_a = 63            # limit of each phase; alternatively feeder_kw
    capacity_ttl_s = 900     # optional: seconds for which a request's capacity_kw is valid
    period_minutes = 5
    [stations.N1]
    max_a = 32
    phases = 3               # or 1, with the phase of the site: phase = 2
    rotation = [2, 3, 1]     # optional: the site's phases at the station's L1, L2 and L3
    min_a = 6                # smallest current at which a car charges
    [branches.north]         # optional; branches may share stations, for example in a tree
    limit_a = 32             # limit of each phase
    stations = ["N1", "N2"]
    safe_a = 16              # optional: limit while the energy manager is silent; also safe_kw
    [prices]                 # optional
    per_kwh = [0.06, 0.06, ...]   # price of energy in each of the 24 hours of the day
    peak_per_kw = 0.5        # charge for the highest power of a day
    worth_per_kwh = 0.5      # value of a kWh delivered; by default twice the highest price

The feeder may have safe limits, too. Every limit bounds a weighted sum of the stations' currents,
so it is a row of one matrix (`_Wiring`). Importing this module does not import JAX.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from apportion.errors import InputError
from apportion.runs.settings import read_toml, suggest

_T = TypeVar("_T")

PHASES = (1, 2, 3)
_TABLES = ("stations", "branches", "prices")
_LEAST_A = 6.0
"""Smallest charging current in A (IEC 61851)."""
_USED_A = 1.0
"""Current in A below which a phase counts as unused."""
_RATINGS = ((16.0, (1,)), (32.0, (1,)), (16.0, PHASES), (32.0, PHASES))
"""Current in A and phases of the usual cables, by increasing power."""


def is_number(value: Any) -> bool:
    """Return whether a value is a plausible number of volts, amperes, kW or a price.

    >>> is_number(7), is_number(True), is_number(float("nan")), is_number(1e9)
    (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def find_single_phase(currents_a: Sequence[float]) -> int | None:
    """Return the only phase of the site with a current, 0 for several, None if all are too low.

    >>> find_single_phase((0.0, 15.8, 0.1)), find_single_phase((9, 9, 9)), find_single_phase((0, 2, 0))
    (2, 0, None)
    """
    if max(currents_a) < _LEAST_A / 2:
        return None
    used = [phase for phase, a in zip(PHASES, currents_a, strict=True) if a >= _USED_A]
    return used[0] if len(used) == 1 else 0


@dataclass(frozen=True)
class Station:
    """A charging station: its cable's limit, and the phases it is wired to."""

    max_a: float = 32.0
    phases: tuple[int, ...] = PHASES
    """Phases of the site, in the order of the station's L1, L2 and L3."""
    min_a: float = _LEAST_A


@dataclass(frozen=True)
class Branch:
    """A limit on the total current of some stations on each phase."""

    limit_a: float
    stations: tuple[str, ...]
    safe_a: float | None = None
    """Limit of each phase in A while the energy manager is silent; `safe_kw` is the total in kW."""
    safe_kw: float | None = None


@dataclass(frozen=True)
class Tariff:
    """Prices of energy by hour of local time, in any currency."""

    per_kwh: tuple[float, ...]
    worth_per_kwh: float
    """Value of a kWh delivered to a car; at higher prices no energy is bought."""
    peak_per_kw: float = 0.0
    """Charge per kW of the highest power of a day."""

    def __post_init__(self):
        for name, values, least in (
            ("per_kwh", self.per_kwh, None),
            ("worth_per_kwh", (self.worth_per_kwh,), 0),
            ("peak_per_kw", (self.peak_per_kw,), 0),
        ):
            for value in values:
                if not is_number(value) or (least is not None and value < least):
                    raise InputError(f"site: prices: {name} is {value!r}; it must be a number")
        if len(self.per_kwh) != 24:
            raise InputError(
                f"site: prices: per_kwh has {len(self.per_kwh)} numbers; give one for each of 24 hours"
            )

    def cost(self, kwh: np.ndarray, hours: np.ndarray, period_hours: float) -> np.ndarray:
        """Return the cost of days from the kWh of each period, (..., periods), and its hour."""
        per_kwh = np.asarray(self.per_kwh)[(hours % 24).astype(int)]
        return (kwh * per_kwh).sum(-1) + self.peak_per_kw * kwh.max(-1) / period_hours


@dataclass(frozen=True, eq=False)
class _Wiring:
    """Limits of a site as arrays, in the order of its stations; the first is the feeder's power.

    A set-point is feasible if `load @ amperes <= limit` and each station has 0 A or a current from
    `min_a` to `max_a`.
    """

    max_a: np.ndarray
    min_a: np.ndarray
    kw_per_a: np.ndarray
    """Power in kW of one ampere on all phases of a station."""
    load: np.ndarray
    """Use of each limit by one ampere at each station, (limits, stations)."""
    limit: np.ndarray
    """Limits, (limits,); the first is in kW, the others are in A."""
    names: tuple[str, ...] = ()
    """Name of each limit, (limits,)."""

    @property
    def max_kw(self) -> np.ndarray:
        """Full power of each station in kW."""
        return self.max_a * self.kw_per_a


@dataclass(frozen=True)
class Site:
    """Description of a garage.

    Examples
    --------
    >>> site = Site(stations={"N1": Station(), "N2": Station(16.0, (2,))}, feeder_a=40.0)
    >>> site.wiring().max_kw.round(2).tolist(), round(site.capacity_kw, 1)
    ([22.08, 3.68], 27.6)
    """

    stations: Mapping[str, Station]
    feeder_a: float | None = None
    """Limit of each phase in A."""
    feeder_kw: float | None = None
    volts: float = 230.0
    branches: Mapping[str, Branch] = field(default_factory=dict)
    timezone: str | None = None
    period_minutes: int = 15
    prices: Tariff | None = None
    safe_a: float | None = None
    """Limit of each phase in A while the energy manager is silent; `safe_kw` is the total in kW."""
    safe_kw: float | None = None
    capacity_ttl_s: float | None = None
    """Seconds after which a lower safe limit replaces a request's `capacity_kw`; None: never."""

    def safe_limits(self) -> dict[str, dict[str, float]]:
        """Return the safe limits of the feeder and the branches, by unit."""
        found = {
            name: {"a": one.safe_a, "kw": one.safe_kw}
            for name, one in (("feeder", self), *self.branches.items())
        }
        given = {n: {u: x for u, x in one.items() if x is not None} for n, one in found.items()}
        return {name: units for name, units in given.items() if units}

    def __post_init__(self):
        feeder = {"feeder_a": self.feeder_a, "feeder_kw": self.feeder_kw}
        numbers = {"volts": self.volts}
        optional = feeder | {"capacity_ttl_s": self.capacity_ttl_s}
        numbers |= {what: value for what, value in optional.items() if value is not None}
        for name, station in self.stations.items():
            numbers[f"station {name}: max_a"] = station.max_a
            numbers[f"station {name}: min_a"] = station.min_a
        for name, branch in self.branches.items():
            numbers[f"branch {name}: limit_a"] = branch.limit_a
        for what, value in numbers.items():
            if not is_number(value) or value <= 0:
                raise InputError(f"site: {what} is {value!r}; it must be a number above 0")
        for name, units in self.safe_limits().items():
            for unit, value in units.items():
                if not is_number(value) or value < 0:
                    raise InputError(f"site: {name}: safe_{unit} is {value!r}; give a number >= 0")
        if not self.stations:
            raise InputError("site: no station is described; add a table [stations.NAME]")
        if (self.feeder_a is None) == (self.feeder_kw is None):
            raise InputError("site: give one of feeder_a, amperes on each phase, and feeder_kw")
        if self.period_minutes not in (5, 15):
            raise InputError(f"site: period_minutes is {self.period_minutes}; it must be 5 or 15")
        if self.timezone is not None:
            try:
                ZoneInfo(self.timezone)
            except (LookupError, OSError, ValueError, TypeError):
                said = f"no such time zone as {self.timezone!r}; name it as Europe/Berlin"
                raise InputError(f"site: {said}") from None
        for name, station in self.stations.items():
            if station.min_a > station.max_a:
                raise InputError(
                    f"site: station {name}: min_a {station.min_a:g} is above max_a {station.max_a:g}"
                )
            wired = set(station.phases)
            if not wired or not wired <= set(PHASES) or len(wired) < len(station.phases):
                raise InputError(f"site: station {name}: its phases must be among 1, 2 and 3")
        for name, branch in self.branches.items():
            for station in branch.stations:
                if station not in self.stations:
                    raise InputError(
                        f"site: branch {name}: there is no station {station}"
                        f"{suggest(station, list(self.stations))}"
                    )

    @property
    def capacity_kw(self) -> float:
        """Power of the feeder over all phases, in kW."""
        if self.feeder_kw is not None:
            return self.feeder_kw
        assert self.feeder_a is not None
        used = {phase for station in self.stations.values() for phase in station.phases}
        return self.feeder_a * self.volts * len(used) / 1000

    @property
    def fingerprint(self) -> str:
        """Hash of the site, independent of prices, safe limits and the order of stations."""
        wired = asdict(self)
        del wired["prices"], wired["capacity_ttl_s"]
        for part in (wired, *wired["branches"].values()):
            del part["safe_a"], part["safe_kw"]
        plain = json.dumps(wired, sort_keys=True, default=list)
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    def wiring(self, one_phase: Mapping[str, int] | None = None) -> _Wiring:
        """Return the limits as arrays; `one_phase` maps stations to the only phase of their car."""
        stations, single = self.stations.values(), one_phase or {}
        wired = np.array([[p in s.phases for s in stations] for p in PHASES], float)
        on_phase = wired * [[single.get(name, p) == p for name in self.stations] for p in PHASES]
        kw_per_a = on_phase.sum(0) * self.volts / 1000
        load, limit, names = [kw_per_a], [self.capacity_kw], ["feeder"]
        above: list[tuple[str, float, set[str]]] = []
        if self.feeder_a is not None:
            above.append(("feeder", self.feeder_a, set(self.stations)))
        above += [(name, b.limit_a, set(b.stations)) for name, b in self.branches.items()]
        for what, limit_a, below in above:
            here = np.array([name in below for name in self.stations], float)
            for phase, row, own in zip(PHASES, on_phase * here, wired * here, strict=True):
                if own.any():
                    load.append(row)
                    limit.append(limit_a)
                    names.append(f"{what} L{phase}")
        return _Wiring(
            np.array([s.max_a for s in stations], float),
            np.array([s.min_a for s in stations], float),
            kw_per_a,
            np.stack(load),
            np.array(limit, float),
            tuple(names),
        )

    @classmethod
    def read(cls, path: Path | str) -> "Site":
        """Read a site from a TOML file.

        Raises
        ------
        InputError
            If the file is not valid.
        """
        content = read_toml(Path(path))
        try:
            return cls.of(content)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Site":
        """Create a site from the tables of a TOML file."""
        _require_known(cls, "site", content)
        described = dict(content)
        for name, read in (("stations", _station), ("branches", _branch)):
            tables = content.get(name, {})
            if not isinstance(tables, Mapping) or not all(
                isinstance(table, Mapping) for table in tables.values()
            ):
                raise InputError(f"site: {name} must be tables, such as [{name}.NAME]")
            described[name] = {str(one): read(str(one), table) for one, table in tables.items()}
        if "prices" in content:
            described["prices"] = _prices(content["prices"])
        return cls(**described)

    @classmethod
    def infer(cls, sessions: pd.DataFrame, *, timezone: str | None = None) -> "Site":
        """Infer a site in which each station has the smallest usual cable for its observed power.

        The observed power is the delivered energy divided by the stay, so a cable may be larger.
        The feeder supplies all stations at full power.
        """
        hours = (sessions.departure - sessions.arrival).dt.total_seconds() / 3600
        power = (sessions.delivered_kwh / hours.where(hours > 0.25)).groupby(
            sessions.station.astype(str)
        )
        volts, stations = 230.0, {}
        for name, most in power.max().fillna(0.0).items():
            fitting = [
                (max_a, phases)
                for max_a, phases in _RATINGS
                if max_a * len(phases) * volts / 1000 >= most
            ]
            stations[str(name)] = Station(*(fitting or _RATINGS[-1:])[0])
        whole = sum(s.max_a * len(s.phases) for s in stations.values()) * volts / 1000
        return cls(stations, feeder_kw=round(whole, 3), volts=volts, timezone=timezone)

    def describe(self) -> str:
        """Describe the site in one line."""
        rates = pd.Series(np.round(self.wiring().max_kw, 1)).value_counts().sort_index()
        each = ", ".join(f"{number} of {kw:g} kW" for kw, number in rates.items())
        return f"{len(self.stations)} stations ({each}), feeder {self.capacity_kw:.1f} kW"

    def to_toml(self) -> str:
        """Return the TOML file that describes the site."""
        lines, tables = [], {}
        for name in (f.name for f in fields(self) if f.name not in _TABLES):
            value = getattr(self, name)
            if value is not None:
                lines.append(f"{name} = {json.dumps(value)}")
        for name, station in self.stations.items():
            wired = {"max_a": station.max_a, "phases": len(station.phases)}
            if len(station.phases) == 1:
                wired["phase"] = station.phases[0]
            elif station.phases != PHASES:
                wired["rotation"] = list(station.phases)
            tables[f"stations.{json.dumps(name)}"] = wired | {"min_a": station.min_a}
        for name, branch in self.branches.items():
            described = {k: v for k, v in asdict(branch).items() if v is not None}
            tables[f"branches.{json.dumps(name)}"] = described
        if self.prices is not None:
            tables["prices"] = asdict(self.prices)
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        return "\n".join([*lines, ""])


@cache
def embedded_site(name: str) -> Site:
    """Read the description of a site of the embedded sessions."""
    return Site.read(Path(__file__).parent / "data" / f"{name}.toml")


def describe_sites(
    frame: pd.DataFrame,
    chosen: Iterable[str] = (),
    *,
    embedded: bool = False,
    timezone: str | None = None,
) -> dict[str, Site]:
    """Return the sites of a table of sessions by name, read from a file, embedded or inferred.

    Parameters
    ----------
    chosen
        Names of sites, or TOML files that describe them; with several sites, a file is named after
        its site. By default all sites.
    """
    known = {str(name): str(name) for name in sorted(frame.site.unique())}
    found: dict[str, Site] = {}
    for one in chosen or known:
        by_file = one.endswith(".toml")
        wanted = Path(one).stem if by_file else one
        name = next(iter(known)) if by_file and len(known) == 1 else find_site(known, wanted)
        if name is None:
            raise InputError(
                f'site "{wanted}": no session is from there; the sites are {", ".join(known)}'
            )
        if by_file:
            described = Site.read(one)
            found[name] = replace(described, timezone=described.timezone or timezone)
        if name not in found:
            rows = frame.loc[frame.site == name]
            zone = timezone or (str(rows.arrival.dt.tz) if rows.arrival.dt.tz else None)
            found[name] = embedded_site(name) if embedded else Site.infer(rows, timezone=zone)
    return found


def find_site(kept: Mapping[str, _T], site: str) -> _T | None:
    """Look up a site by name, ignoring case.

    >>> find_site({"north": 1}, "North")
    1
    """
    same = (value for name, value in kept.items() if name.casefold() == site.casefold())
    return next(same, None)


def find_zone(chosen: Iterable[str], timezone: str | None) -> str | None:
    """Return the time zone given or named in the sites' files; raise InputError if they differ."""
    files = [one for one in chosen if one.endswith(".toml")]
    zones = {zone for zone in (timezone, *(Site.read(one).timezone for one in files)) if zone}
    if len(zones) > 1:
        raise InputError(
            f"sessions of one file are of one time zone, not {', '.join(sorted(zones))}"
        )
    return next(iter(zones), None)


def saved_site(about: Mapping[str, Any], chosen: str | None) -> Site:
    """Return the site of a TOML file, or one of the sites saved with a policy."""
    if chosen is not None and chosen.endswith(".toml"):
        described = Site.read(chosen)
        return replace(described, timezone=described.timezone or about.get("timezone"))
    saved = about.get("sites", {})
    if not isinstance(saved, Mapping) or not saved:
        raise InputError("the policy's own facts describe no site; give a TOML file with --site")
    if chosen is None and len(saved) > 1:
        raise InputError(
            f"the policy was trained on {len(saved)} sites; name one, or a TOML file, with --site: "
            f"{', '.join(saved)}"
        )
    name = next(iter(saved)) if chosen is None else chosen
    text = find_site(saved, name)
    if text is None:
        raise InputError(f'there is no site "{name}"{suggest(name, list(saved))}; give a TOML file')
    return Site.of(tomllib.loads(text))


def _station(name: str, table: Mapping[str, Any]) -> Station:
    _require_known(Station, f"station {name}", table, "phase", "rotation")
    phases, phase = table.get("phases", 3), table.get("phase", 1)
    if phases not in (1, 3) or phase not in PHASES or ("phase" in table and phases == 3):
        raise InputError(
            f"site: station {name}: phases must be 1 or 3, and phase, of a station of one, 1, 2 or 3"
        )
    rotation = table.get("rotation", list(PHASES))
    if rotation not in map(list, permutations(PHASES)) or (
        rotation != list(PHASES) and phases == 1
    ):
        raise InputError(
            f"site: station {name}: rotation must be the site's phases at its L1, L2 and L3, as [2, 3, 1]"
        )
    wired = tuple(rotation) if phases == 3 else (phase,)
    return Station(table.get("max_a", 32.0), wired, table.get("min_a", _LEAST_A))


def _branch(name: str, table: Mapping[str, Any]) -> Branch:
    _require_known(Branch, f"branch {name}", table)
    stations = table.get("stations", [])
    if not isinstance(stations, list) or not stations or "limit_a" not in table:
        raise InputError(f"site: branch {name}: give limit_a and a list of stations")
    safe = table.get("safe_a"), table.get("safe_kw")
    return Branch(table["limit_a"], tuple(map(str, stations)), *safe)


def _prices(table: Any) -> Tariff:
    if not isinstance(table, Mapping) or not isinstance(table.get("per_kwh"), list):
        raise InputError("site: [prices] needs per_kwh, a list of 24 numbers, one for each hour")
    _require_known(Tariff, "prices", table)
    per_kwh = tuple(table["per_kwh"])
    dearest = max((x for x in per_kwh if isinstance(x, int | float)), default=0.0)
    worth = table.get("worth_per_kwh", 2 * dearest)
    return Tariff(per_kwh, worth, table.get("peak_per_kw", 0.0))


def _require_known(kind: type, what: str, table: Mapping[str, Any], *more: str) -> None:
    known = [*(f.name for f in fields(kind)), *more]
    for key in table:
        if key not in known:
            raise InputError(f"site: {what}: there is no {key!r}{suggest(key, known)}")
