"""The live controller: computes the amperes to offer each station from the present cars.

A `Controller` compiles once per site; each call of `allocate` then takes milliseconds. It observes
cars, learns from meters and computes set-points with the simulator's functions, which a certificate
has tested. `allocate` never raises: it ignores invalid data with a warning, and falls back to the
baseline if the policy fails. A state file lets it continue after a restart.
"""

import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from apportion.composition import mix_allocations
from apportion.domains.tables import require_finite
from apportion.errors import InputError, reading
from apportion.policy import Policy
from apportion.runs.files import write_json
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_about
from apportion.runs.settings import suggest
from apportion_charging import clock
from apportion_charging.backtest import check_facts
from apportion_charging.days import Days, make_stations
from apportion_charging.forecasts import EarlierDays, Predictor
from apportion_charging.garage import (
    Garage,
    GarageState,
    StationView,
    initial_state,
    learn,
    make_physics,
    offer,
    see,
)
from apportion_charging.limits import LiveLimits
from apportion_charging.problem import PolicySchedule
from apportion_charging.schedulers import find_scheduler
from apportion_charging.site import Site, find_single_phase, is_number

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = ("max_kw", "requested_kwh", "delivered_kwh", "offered_a", "drawn_kw")
_TIMES = ("arrival", "stated_departure")
FIELDS = ("id", "plugged", "full", "fixed_a", "currents_a", *_NUMBERS, *_TIMES)
_LONGEST_GAP_HOURS = 24.0
"""Longest gap between two calls, in hours, after which meter values still update the state."""
_NO_ZONE_WARNING = "a time has a zone but the site has none; the site's clock is assumed to be UTC"
_FULL_HOURS = 1e3
"""Idle time in hours assigned to a car that is reported as full."""
_MAX_NAMED_STATIONS = 20
"""Maximum number of unknown stations named in warnings."""
_SAME_ARRIVAL = timedelta(minutes=5)
"""Tolerance for two arrival times of the same car, because clocks may differ."""

_logger = logging.getLogger("apportion.charging")


@dataclass(frozen=True)
class PowerOffers:
    """The amperes offered to each station until the next call, and the unused power."""

    allocation_a: dict[str, int]
    allocation_kw: dict[str, float]
    unused_kw: float
    decided_by: str
    """policy, the baseline's name, both, or none if the baseline failed."""
    warnings: tuple[str, ...] = ()
    """One sentence for each invalid value that was ignored and for each failure."""

    def summary(self) -> str:
        """Format a line for each station, and the warnings."""
        width = max(map(len, self.allocation_a))
        lines = [
            f"  {name:{width}}  {amperes:3d} A {self.allocation_kw[name]:7.3f} kW"
            for name, amperes in self.allocation_a.items()
        ]
        lines.append(
            f"  {'unused':{width}}        {self.unused_kw:7.3f} kW; decided by {self.decided_by}"
        )
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """Return what `apportion allocate --json` prints."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """Return a table with a row for each station."""
        import pandas as pd

        offers = {"amperes": self.allocation_a, "kw": self.allocation_kw}
        return pd.DataFrame(offers).rename_axis("station").reset_index()


@dataclass
class _Car:
    """Validated data about the car at a station."""

    arrival: datetime
    """Arrival in the site's standard time, as all times of this class."""
    stated_departure: datetime | None = None
    requested_kwh: float | None = None
    delivered_kwh: float | None = None
    drawn_kw: float | None = None
    offered_a: float | None = None
    """Offer in force at the station in A, if it differs from the last answer."""
    max_kw: float | None = None
    full: bool | None = None
    currents_a: list[float] | None = None
    """Current on each of the site's three phases in A."""


def read_now(path: Path) -> dict[str, Any]:
    """Read the garage's present state from a JSON file."""
    with reading(path, "give a JSON file; see the page on charging"):
        return json.loads(Path(path).read_text(encoding="utf-8"))


class Controller:
    """A live controller for one site around a trained charging policy.

    Parameters
    ----------
    policy, about
        The policy and the facts saved with it.
    site
        The garage: its stations, their cables and the limits above them.
    baseline
        Name of the scheduler that has the share 1 - `trust`, or decides alone if the policy fails.
    trust
        The policy's share of the decision, in [0, 1], for example from `apportion certify --json`.
        It may be changed between calls.
    earlier
        Sessions of the garage's earlier days, as returned by `read_sessions`, for a policy trained with
        recall. They improve the forecasts of needs, stays and later arrivals. Without them the
        controller uses the training days' means.
    state
        JSON file with the state of the cars, written after each decision and read at start.

    Examples
    --------
    >>> controller = Controller.load("runs/garage", site=Site.read("site.toml"))  # doctest: +SKIP
    >>> controller.allocate({"time": "2021-06-01 09:00", ...}).allocation_a  # doctest: +SKIP
    """

    def __init__(
        self,
        policy: Policy,
        about: Mapping[str, Any],
        site: Site,
        *,
        baseline: str = "llf",
        trust: float = 1.0,
        earlier: "pd.DataFrame | None" = None,
        state: Path | None = None,
    ):
        check_facts(about)
        self.site, self.baseline, self.trust = site, baseline, trust
        self._names = list(site.stations)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._stations = make_stations(site)
        self._physics = make_physics(
            site.period_minutes, objective=about.get("objective", "energy")
        )
        self._schedule = PolicySchedule(policy, spare=not self._physics.fill)
        self._baseline_schedule = find_scheduler(baseline)
        self._predictor = Predictor.from_dict(about.get("predictor", {}))
        self._past = self._earlier_days(about, earlier)
        self._arrivals: list[datetime | None] = [None] * len(self._names)
        self._stays = np.zeros(len(self._names), bool)
        self._fresh = self._known = jax.tree.map(np.asarray, initial_state(self._stations))
        self._time: datetime | None = None
        self._path = state
        self._one_phase: dict[str, int] = {}
        """Phase of each station whose car uses a single phase of the site."""
        self.seen: dict[str, _Car] = {}
        """The cars of the last call, by station."""
        self.limits = LiveLimits(site, state and state.with_suffix(".limits.json"))
        self._unheard: set[str] = set(self._names)
        """Stations that neither a statement nor a state file has listed."""
        self._unheard_until = -math.inf
        self._removed: dict[str, dict[str, Any]] = {}
        """Saved state of stations that had an offer and are no longer in the site."""
        self._limit_names = site.wiring().names
        # Compile everything before the first call, the policy even if trust is 0.
        self.trust = 1.0
        self._learn({}, self._physics.period_hours)
        nothing = np.zeros(len(self._stations.limit_a))
        self._decide(datetime(2020, 1, 1, 12), {}, 1.0, nothing, [])
        self.trust = trust
        if state is not None and state.exists():
            with reading(state, "remove it to start without it"):
                content = json.loads(state.read_text(encoding="utf-8"))
            self.restore(content, str(state))

    @classmethod
    def load(cls, folder: Path | str, site: Site, **options: Any) -> "Controller":
        """Load the policy of a finished charging run; `options` are those of `Controller`."""
        return cls(load_run(folder).policy, load_about(folder), site, **options)

    def reserve_unheard(self, seconds: float) -> None:
        """Reserve power for stations whose offer is unknown, for at most some seconds.

        It reserves the full cable of each station that the state file does not list, until a
        statement lists it, and the last offer to each station that is no longer in the site.
        """
        self._unheard_until = clock.now() + seconds
        for car in self._removed.values():
            until = car.setdefault("until", self._unheard_until)
            load = {name: car["offered_a"] * x for name, x in car["load"].items()}
            self.limits.reserve(load, until)

    @property
    def trust(self) -> float:
        """The policy's share of the decision, in [0, 1]."""
        return self._trust

    @trust.setter
    def trust(self, trust: float) -> None:
        if not 0 <= trust <= 1:
            raise InputError(f"trust is {trust}; it must be between 0 and 1")
        self._trust = trust

    def _earlier_days(
        self, about: Mapping[str, Any], earlier: "pd.DataFrame | None"
    ) -> EarlierDays | None:
        recall = about.get("recall", False)
        if earlier is not None and not recall:
            raise InputError(
                "the policy recalls no earlier days; train one with recall, or leave them out"
            )
        if not recall:
            return None
        if earlier is None:
            return EarlierDays.of(None, self._predictor)
        sites = sorted(map(str, earlier.site.unique()))
        if len(sites) != 1:
            raise InputError(
                f"earlier sessions are of {len(sites)} sites; give those of this garage's site alone"
            )
        past = Days.of(earlier, sites[0], self.site, physics=self._physics)
        return EarlierDays.of(past, self._predictor)

    def allocate(self, now: Any) -> PowerOffers:
        """Compute the amperes to offer each station until the next call. Never raises.

        Parameters
        ----------
        now
            `time` (local, or with a zone), `capacity_kw` if the feeder's power changes, and
            `stations`: for each `id`, `plugged`, `arrival`, `stated_departure`, `requested_kwh`,
            `delivered_kwh` so far, and `drawn_kw`, the mean since the last call. Unknown values are null or
            absent. Optional: `full`, whether the car needs no more energy; `offered_a`, the offer
            in force at the station; `max_kw`, the car's stated maximum; `fixed_a`, the current that
            the station may draw if it accepts no offers; `currents_a`, the car's current on each of
            the site's three phases. The last offer of an absent station stays reserved.
        """
        warnings: list[str] = []
        time, cars, silent, fixed, held = self._read(now, warnings)
        limits = self.limits.in_force()
        capacity = float(limits[0])
        hours = 0.0 if self._time is None else (time - self._time).total_seconds() / 3600
        self._meet(cars, silent, held)
        self._learn(cars, hours if 0 < hours <= _LONGEST_GAP_HOURS else 0.0)
        kept = np.where(np.isnan(fixed), self._known.offered_a, fixed)
        reserved = np.where(silent, kept, 0.0)
        unheard = [name in self._unheard for name in self._names]
        if clock.now() >= self._unheard_until:
            unheard = np.zeros(len(unheard), bool)
        held_a = np.where(unheard, self._stations.max_a, reserved)
        left_kw = max(capacity - float(held_a @ self._stations.kw_per_a), 0.0)
        limit_a = np.minimum(self._stations.limit_a, limits[1:])
        left_a = np.maximum(limit_a - self._stations.load @ held_a, 0.0)
        amperes, decided_by = self._decide(time, cars, left_kw, left_a, warnings)
        # A silent station may not receive a lower offer, so its last one stays reserved.
        offered = np.where(silent, reserved, amperes)
        self._known = replace(self._known, offered_a=_single(offered))
        fits = np.cumsum(reserved * self._stations.kw_per_a) <= capacity + 1e-3
        answer = np.where(silent, np.where(fits, reserved, 0.0), amperes)
        self._time, self.seen = time, cars
        if self._path is not None:
            try:
                write_json(self._path, self.state())
            except OSError as error:
                # A full disk must not stop the controller.
                warnings.append(f"{self._path}: the controller's state was not saved ({error})")
        kw = answer * self._stations.kw_per_a
        return PowerOffers(
            {name: int(a) for name, a in zip(self._names, answer, strict=True)},
            {name: round(float(x), 6) for name, x in zip(self._names, kw, strict=True)},
            max(capacity - float(kw.sum()), 0.0),
            decided_by,
            tuple(warnings),
        )

    def _decide(
        self,
        time: datetime,
        cars: Mapping[str, _Car],
        capacity_kw: float,
        limit_a: np.ndarray,
        warnings: list[str],
    ) -> tuple[np.ndarray, str]:
        """Compute whole amperes for each station, and `PowerOffers.decided_by`."""
        try:
            seen = self._see(time, cars, capacity_kw, limit_a)
            baseline = np.nan_to_num(_wishes(self._baseline_schedule, seen))
        except Exception as error:
            _logger.exception("the baseline failed")
            warnings.append(f"the baseline failed ({error}); no power is offered")
            return np.zeros(len(self._names)), "none"
        wishes, decided_by = baseline, self.baseline
        if self.trust > 0:
            try:
                own = require_finite(_wishes(self._schedule, seen), "what it wants")
                wishes = mix_allocations(own, baseline, self.trust)
                decided_by = "policy" if self.trust == 1 else f"policy and {self.baseline}"
            except Exception as error:
                _logger.exception("the policy failed")
                warnings.append(f"the policy failed ({error}); {self.baseline} decided")
        return np.asarray(_set_points(seen, jnp.asarray(wishes), self._physics), float), decided_by

    def _meet(
        self, cars: Mapping[str, _Car], silent: np.ndarray, held: Mapping[str, _Car | None]
    ) -> None:
        """Update arrivals and phases, and reset the state of each station whose car has changed."""
        arrivals = [
            before if is_silent else getattr(cars.get(name), "arrival", None)
            for name, before, is_silent in zip(self._names, self._arrivals, silent, strict=True)
        ]
        pairs = zip(self._arrivals, arrivals, strict=True)
        stays = self._stays = np.array([old is not None and old == new for old, new in pairs])
        self._known = jax.tree.map(
            lambda old, new: np.where(stays, old, new), self._known, self._fresh
        )
        self._arrivals = arrivals
        before, stay = self._one_phase, dict(zip(self._names, stays, strict=True))
        known = {name: phase for name, phase in before.items() if stay[name] and name not in held}
        for name, car in (*cars.items(), *held.items()):
            currents = None if car is None else car.currents_a
            phase = None if currents is None else find_single_phase(currents)
            if phase is not None and len(self.site.stations[name].phases) > 1:
                known[name] = phase
        self._one_phase = {name: phase for name, phase in known.items() if phase}
        if self._one_phase != before:
            self._stations = make_stations(self.site, self._one_phase)

    def _values(
        self, cars: Mapping[str, _Car], field: str, since: datetime | None = None
    ) -> np.ndarray:
        """Collect a field of each station's car; NaN if unknown. Times become hours after `since`."""
        values = [getattr(cars.get(name), field, None) for name in self._names]
        if since is not None:
            values = [None if v is None else (v - since).total_seconds() / 3600 for v in values]
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def _learn(self, cars: Mapping[str, _Car], hours: float) -> None:
        """Update the state from meter values since the last call, or else from expected power."""
        known, stations = self._known, self._stations
        accepted, drawn, delivered, full = (
            self._values(cars, field)
            for field in ("offered_a", "drawn_kw", "delivered_kwh", "full")
        )
        offered = np.fmin(np.where(np.isnan(accepted), known.offered_a, accepted), stations.max_a)
        expected = np.minimum(offered, known.limit_a) * stations.kw_per_a
        expected = np.where(known.single, expected / stations.phases, expected)
        metered = ~np.isnan(drawn)
        kw = np.where(metered, drawn, expected)
        if hours > 0:
            learnt = _learnt(known, stations, offered, kw, metered, np.float32(hours))
            # Meter values from before a car's arrival are not its own.
            known = jax.tree.map(lambda new, old: np.where(self._stays, new, old), learnt, known)
        got = np.where(np.isnan(delivered), known.got_kwh + self._stays * kw * hours, delivered)
        idle = np.where(np.isnan(full), known.idle_hours, _FULL_HOURS * full)
        self._known = replace(known, got_kwh=_single(got), idle_hours=_single(idle))

    def _see(
        self, time: datetime, cars: Mapping[str, _Car], capacity_kw: float, limit_a: Any
    ) -> StationView:
        """Compute the view of the stations that the simulator would pass to a scheduler."""
        midnight = time.replace(hour=0, minute=0, second=0, microsecond=0)
        n = int((time - midnight).total_seconds() / 3600 / self._physics.period_hours)
        plugged = np.array([name in cars for name in self._names])
        zeros = np.zeros(len(plugged), np.float32)
        requested = self._values(cars, "requested_kwh")
        leaves = self._values(cars, "stated_departure", midnight)
        # Needs and departures are unknown. Every car arrives a period earlier, so that `see` keeps the
        # state that `_meet` has already reset for new cars.
        garage = {
            "arrival": np.where(plugged, n - 1, 0).astype(np.int32),
            "departure": np.where(plugged, n + 1, 0).astype(np.int32),
            "arrived": np.nan_to_num(self._values(cars, "arrival", midnight)),
            "need_kwh": zeros,
            "car_a": zeros,
            "car_share": zeros + 1,
            "requested_kwh": np.nan_to_num(requested),
            "stated_departure": np.nan_to_num(leaves),
            "said_energy": ~np.isnan(requested),
            "said_departure": ~np.isnan(leaves),
            "number": zeros.astype(np.int32),
            "stay_hours": zeros,
        }
        date = np.array([midnight.date()], "datetime64[D]")
        noon = midnight + timedelta(hours=12)
        summer = (noon - _to_standard_time(noon, self.site.timezone)).total_seconds() / 3600
        ahead = np.full((1, len(plugged)), summer, np.float32)
        today = Garage(**{name: x[None, :, None] for name, x in garage.items()}, clock_hours=ahead)
        past = self._past
        today = self._predictor.apply(today) if past is None else past.apply(today, date)
        known, stations = self._known, self._stations
        per_a = np.where(known.single, stations.kw_per_a / stations.phases, stations.kw_per_a)
        said_a = np.maximum(self._values(cars, "max_kw") / per_a, stations.min_a)
        known = replace(known, limit_a=_single(np.fmin(known.limit_a, said_a)))
        return _seen(
            jax.tree.map(lambda x: x[0], today),
            replace(stations, limit_a=_single(limit_a)),
            known,
            jnp.int32(n),
            jnp.float32(capacity_kw),
            self._physics,
        )

    def _read(
        self, now: Any, warnings: list[str]
    ) -> tuple[datetime, dict[str, _Car], np.ndarray, np.ndarray, dict[str, _Car | None]]:
        """Validate a statement; append a warning for each invalid value.

        Returns the time, the cars, which stations take no offer now (absent or with `fixed_a`), each
        `fixed_a` or NaN, and the cars at stations with `fixed_a`.
        """
        if not isinstance(now, Mapping):
            warnings.append("now is not a JSON object; all offers stay")
            now = {"stations": []}
        time = self._moment(now.get("time"), "time", warnings) if now.get("time") else None
        if time is not None and self._time is not None and time < self._time:
            # The end of daylight saving time repeats an hour: this is its second pass.
            second = self._moment(now.get("time"), "time", warnings, fold=1)
            time = second if second is not None and second >= self._time else time
        if time is None:
            zone = self.site.timezone
            wall = clock.now_utc().replace(microsecond=0)
            wall = wall if zone else wall.astimezone().replace(tzinfo=None)
            time = _to_standard_time(wall, zone) if self._time is None else self._time
            warnings.append(f"time is missing; {time} is assumed")
        if "capacity_kw" in now:
            try:
                self.limits.set_capacity(now["capacity_kw"])
            except InputError as error:
                warnings.append(str(error))
        stations = now.get("stations")
        if not isinstance(stations, list):
            warnings.append("stations is not a list; all offers stay")
            stations = []
        cars: dict[str, _Car] = {}
        warnings += warn_of_unknown(stations, self._places)
        listed, held, fixed = set(), {}, np.full(len(self._names), np.nan)
        for station in stations:
            name = str(station.get("id")) if isinstance(station, Mapping) else None
            if name is None or name not in self._places:
                continue
            if name in listed:
                warnings.append(f"station {name} is listed twice; the first entry counts")
            else:
                listed.add(name)
                car = self._car(name, station, time, warnings)
                if (still := station.get("fixed_a")) is not None:
                    place = self._places[name]
                    if not is_number(still) or still < 0:
                        warnings.append(
                            f"station {name}: fixed_a is {_shown(still)}; its cable's limit counts"
                        )
                        still = self._stations.max_a[place]
                    fixed[place], held[name] = still, car
                elif car is not None:
                    cars[name] = car
        self._unheard -= listed
        takes_offers = np.array([name in listed for name in self._names]) & np.isnan(fixed)
        return time, cars, ~takes_offers, fixed, held

    def _car(
        self, name: str, station: Mapping[str, Any], time: datetime, warnings: list[str]
    ) -> _Car | None:
        """Validate a station's entry; return its car, or None if there is none."""
        what = f"station {name}"
        for field in station:
            if field not in FIELDS:
                warnings.append(f"{what}: {field!r} is not a known field{_suggest_field(field)}")
        plugged = station.get("plugged")
        if plugged is False or (plugged is None and station.get("arrival") is None):
            return None
        if plugged is not True:
            warnings.append(f"{what}: plugged is {_shown(plugged)}; a car is assumed to be there")
        found: dict[str, Any] = {}
        for field in _NUMBERS:
            value = station.get(field)
            if value is None:
                continue
            if not is_number(value) or value < 0:
                warnings.append(f"{what}: {field} is {_shown(value)}; it is left out")
            else:
                found[field] = float(value)
        for field in _TIMES:
            if station.get(field) is not None:
                found[field] = self._moment(station[field], f"{what}: {field}", warnings)
        place = self._places[name]
        full_kw = float(self._stations.max_a[place] * self._stations.kw_per_a[place])
        for field, most in (("drawn_kw", 1.2 * full_kw), ("delivered_kwh", 24 * full_kw)):
            if found.get(field, 0.0) > most:
                unit = "kWh" if field == "delivered_kwh" else "kW"
                warnings.append(
                    f"{what}: {field} is {found.pop(field):g} {unit}, more than the station can give; "
                    f"it is left out (is it in {unit[1:]}?)"
                )
        arrival, before = found.pop("arrival", None), self._arrivals[place]
        if arrival is None or arrival > time + _SAME_ARRIVAL:
            warnings.append(
                f"{what}: a car is plugged in, and its arrival is "
                f"{'missing' if arrival is None else 'after now'}; "
                f"{'the previous arrival is used' if before is not None else 'now is used'}"
            )
            arrival = before or time
        elif before is not None and abs(arrival - before) <= _SAME_ARRIVAL:
            arrival = before
        arrival = min(arrival, time)
        full = station.get("full")
        if full is not None and not isinstance(full, bool):
            warnings.append(f"{what}: full is {_shown(full)}; it is left out")
            full = None
        currents = station.get("currents_a")
        if currents is not None and not (
            isinstance(currents, list) and len(currents) == 3 and all(map(is_number, currents))
        ):
            warnings.append(f"{what}: currents_a is {_shown(currents)}; give three numbers")
            currents = None
        return _Car(arrival, full=full, currents_a=currents, **found)

    def _moment(self, value: Any, what: str, warnings: list[str], fold: int = 0) -> datetime | None:
        """Parse a time into the site's standard time; None with a warning if it is invalid."""
        try:
            # Only ISO 8601: in 05/02/2018 the month is ambiguous.
            time = datetime.fromisoformat(value.strip())
            if not 1970 <= time.year < 2200:
                raise ValueError
            zoned_alone = time.tzinfo is not None and self.site.timezone is None
            if zoned_alone and _NO_ZONE_WARNING not in warnings:
                warnings.append(_NO_ZONE_WARNING)
            return _to_standard_time(time, self.site.timezone, fold)
        except Exception:
            # The value may have any type.
            warnings.append(f"{what} is {_shown(value)}; write it as 2021-06-01 09:00")
            return None

    def state(self) -> dict[str, Any]:
        """Return the state of the cars as plain JSON values."""
        stations = {}
        for place, name in enumerate(self._names):
            arrival = self._arrivals[place]
            if arrival is not None:
                known = {
                    f.name: getattr(self._known, f.name)[place].item() for f in fields(GarageState)
                }
                one = {"phase": self._one_phase.get(name)}
                above = (self._stations.kw_per_a[place], *self._stations.load[:, place])
                load = dict(zip(self._limit_names, map(float, above), strict=True))
                stations[name] = {"arrival": str(arrival), **one, **known, "load": load}
        now, removed = clock.now(), self._removed.items()
        stations |= {name: car for name, car in removed if car.get("until", now) > now}
        heard = [name for name in self._names if name not in self._unheard]
        return {"time": str(self._time), "heard": heard, "stations": stations}

    def restore(self, content: Any, source: str = "state") -> None:
        """Restore what `state` returned, by station names; InputError if it is invalid."""
        try:
            arrays = {f.name: np.array(getattr(self._known, f.name)) for f in fields(GarageState)}
            kept = {name: x for name, x in content["stations"].items() if name in self._places}
            for name, car in kept.items():
                place = self._places[name]
                self._arrivals[place] = datetime.fromisoformat(car["arrival"])
                for field, values in arrays.items():
                    values[place] = car[field]
            if not all(np.isfinite(values).all() for values in arrays.values()):
                raise ValueError
            arrays["limit_a"] = np.fmin(arrays["limit_a"], self._stations.max_a)
            phases = {name: car.get("phase") for name, car in kept.items()}
            wired = {name: station.phases for name, station in self.site.stations.items()}
            self._one_phase = {
                n: p for n, p in phases.items() if p in wired[n] and len(wired[n]) > 1
            }
            self._stations = make_stations(self.site, self._one_phase)
            self._time = datetime.fromisoformat(content["time"])
            self._known = GarageState(**arrays)
            self._unheard -= {*content.get("heard", self._names)}
            self._removed = {
                name: car
                for name, car in content["stations"].items()
                if name not in kept and car["offered_a"] > 0 and "load" in car
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{source}: not a valid controller state; remove it") from None


def warn_of_unknown(stations: list[Any], known: Collection[str]) -> list[str]:
    """Return a warning for each listed station that is not in the site, up to a maximum."""
    names = [str(one.get("id")) if isinstance(one, Mapping) else f"{one!r}" for one in stations]
    unknown = [name for name in names if name not in known]
    warnings = []
    for name in unknown[:_MAX_NAMED_STATIONS]:
        # Escape what cannot be encoded; search a bounded number of names.
        shown = name[:60].encode("utf-8", "backslashreplace").decode()
        near = suggest(name[:60], list(known)[:1000])
        warnings.append(f"station {shown} is not one of the site; it is ignored{near}")
    if more := len(unknown) - len(warnings):
        warnings.append(f"{more} more stations are not of the site")
    return warnings


@lru_cache(256)
def _suggest_field(field: str) -> str:
    return suggest(str(field), list(FIELDS))


@lru_cache(4096)
def _to_standard_time(time: datetime, zone: str | None, fold: int = 0) -> datetime:
    """Convert a time to the zone's standard time; without a zone, aware times become UTC.

    In the hour that the end of daylight saving time repeats, `fold` 1 means the second pass.
    """
    if time.tzinfo is None:
        wall = time.replace(fold=fold)
        ahead = None if zone is None else ZoneInfo(zone).dst(wall)
    else:
        wall = time.astimezone(ZoneInfo(zone or "UTC"))
        ahead = wall.dst()
    return wall.replace(fold=0, tzinfo=None) - (ahead or timedelta(0))


def _shown(value: Any) -> str:
    return repr(value)[:40]


def _single(values: Any) -> np.ndarray:
    values = np.asarray(values)
    return values if values.dtype == bool else values.astype(np.float32)


_seen = eqx.filter_jit(see)
_wishes = eqx.filter_jit(lambda schedule, seen: schedule(seen))
_set_points = eqx.filter_jit(offer)
_learnt = eqx.filter_jit(learn)
