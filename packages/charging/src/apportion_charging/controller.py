"""What a garage's controller asks every minute: who is plugged in now, and how many amperes to tell each.

A `Controller` is made once for a site, which compiles; each call of `allocate` then takes milliseconds. It
sees and learns by the functions of the simulator, and its wishes go through the same set-points, so that
what was certified is what is sent. It never refuses: a datum that cannot be is set aside with a warning,
and where the policy cannot decide the baseline does. What it knows of the cars survives a restart.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from apportion.composition import mix_allocations
from apportion.errors import InputError, reading
from apportion.policy import Policy
from apportion.runs.files import write_json
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_about
from apportion.runs.settings import suggest
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
from apportion_charging.problem import PolicySchedule
from apportion_charging.schedulers import HINDSIGHT, SCHEDULERS
from apportion_charging.site import Site, is_number

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = ("max_kw", "requested_kwh", "delivered_kwh", "offered_a", "drawn_kw")
_TIMES = ("arrival", "stated_departure")
_FIELDS = ("id", "plugged", "full", "fixed_a", *_NUMBERS, *_TIMES)
_KEPT = ("job", "objective", "predictor", "recall", "channels")
"""The facts about a policy that matter here."""
_LONGEST_GAP_HOURS = 24.0
"""After so long without a question nothing is concluded from the meters."""
_NO_ZONE = "a time carries a zone, and the site has none; its clock is taken to be UTC's"
_FULL_HOURS = 1e3
"""A car that is said to be full counts as idle for so long."""
_NAMED = 20
"""Stations that nobody knows are named up to so many."""
_SAME_CAR = timedelta(minutes=5)
"""Clocks that differ by less tell the same arrival."""

_logger = logging.getLogger("apportion.charging")


@dataclass(frozen=True)
class PowerOffers:
    """The amperes to tell each station until the next question, and what nobody can take."""

    allocation_a: dict[str, int]
    allocation_kw: dict[str, float]
    unused_kw: float
    decided_by: str
    """The policy, the baseline, or both in parts."""
    warnings: tuple[str, ...] = ()
    """What was set aside, a sentence each."""

    def summary(self) -> str:
        """A line for each station, and the warnings."""
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
        """The contract of `apportion allocate --json`."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """A row for each station."""
        import pandas as pd

        told = {"amperes": self.allocation_a, "kw": self.allocation_kw}
        return pd.DataFrame(told).rename_axis("station").reset_index()


@dataclass
class _Car:
    """What is told of the car at a station, once what cannot be is set aside."""

    arrival: datetime
    """On the clock of standard time, as all times."""
    stated_departure: datetime | None = None
    requested_kwh: float | None = None
    delivered_kwh: float | None = None
    drawn_kw: float | None = None
    offered_a: float | None = None
    """What the station took over, where that is not what it was told."""
    max_kw: float | None = None
    full: bool | None = None


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
    site
        The garage: its stations, their cables and the limits above them.
    baseline
        The scheduler, by its name, that decides where the policy cannot, or is not trusted in full.
    trust
        The policy's part in the decision, such as `apportion certify --json` says; the rest is the
        baseline's. It may be changed at any time.
    earlier
        Sessions of the garage's earlier days, as `read_sessions` gives them, for a policy that recalls
        them: similar requests, and the cars still to come. Without any it decides as in a garage
        without a past, where as much is to come as in training.
    state
        A JSON file that keeps what is known of the cars, written after each decision; a controller that is
        made anew goes on from it.

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
        known = [name for name in SCHEDULERS if name not in HINDSIGHT]
        if baseline not in known:
            raise InputError(
                f"there is no scheduler {baseline!r}; choose {', '.join(known)}{suggest(baseline, known)}"
            )
        self.site, self.baseline, self.trust = site, baseline, trust
        self._names = list(site.stations)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._stations = make_stations(site)
        self._physics = make_physics(
            site.period_minutes, objective=about.get("objective", "energy")
        )
        self.policy, self.about = policy, {k: about[k] for k in _KEPT if k in about}
        self._schedule = PolicySchedule(policy, spare=not self._physics.fill)
        self._usual = SCHEDULERS[baseline]
        self.predictor = Predictor.from_dict(about.get("predictor", {}))
        self.past = self._earlier_days(about, earlier)
        self._arrivals: list[datetime | None] = [None] * len(self._names)
        self._stays = np.zeros(len(self._names), bool)
        self._fresh = self._known = jax.tree.map(np.asarray, initial_state(self._stations))
        self._time: datetime | None = None
        self._path = state
        self.seen: dict[str, _Car] = {}
        self.capacity_kw = site.capacity_kw
        """The cars of the last question, and the feeder's power."""
        # Everything is compiled before the first question, the policy even where it is not trusted.
        self.trust = 1.0
        self._learn({}, self._physics.period_hours)
        nothing = np.zeros(len(self._stations.limit_a))
        self._decide(datetime(2020, 1, 1, 12), {}, 1.0, nothing, [])
        self.trust = trust
        if state is not None and state.exists():
            with reading(state, "remove it to begin anew"):
                content = json.loads(state.read_text(encoding="utf-8"))
            self.restore(content, str(state))

    @classmethod
    def load(cls, folder: Path | str, site: Site, **options: Any) -> "Controller":
        """The controller of a finished charging run; options as above."""
        return cls(load_run(folder).policy, load_about(folder), site, **options)

    @property
    def trust(self) -> float:
        """The policy's part in the decision."""
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
            return EarlierDays.of(None, self.predictor)
        sites = sorted(map(str, earlier.site.unique()))
        if len(sites) != 1:
            raise InputError(
                f"earlier sessions are of {len(sites)} sites; give those of this garage's site alone"
            )
        past = Days.of(earlier, sites[0], self.site, physics=self._physics)
        return EarlierDays.of(past, self.predictor)

    def allocate(self, now: Any) -> PowerOffers:
        """The amperes to tell each station until the next call; nothing that is asked raises anything.

        Parameters
        ----------
        now
            `time` (the site's, or with its zone), `capacity_kw` where it is not the site's own, and
            `stations`: for each `id`, `plugged`, `arrival`, `stated_departure`, `requested_kwh`,
            `delivered_kwh` so far, and `drawn_kw` since the last call. What is not known is null or left
            out: a driver's statements, a meter's value. `full` may say that a car has all it wants, or that
            it has not; `offered_a` what a station took over of what it was told; `max_kw` what the car is
            said to take. A station that is left out may draw what it was last told, one with `fixed_a`
            so much, whatever it is told: it does not listen.
        """
        warnings: list[str] = []
        time, capacity, cars, silent, fixed = self._read(now, warnings)
        hours = 0.0 if self._time is None else (time - self._time).total_seconds() / 3600
        self._meet(cars, silent)
        self._learn(cars, hours if 0 < hours <= _LONGEST_GAP_HOURS else 0.0)
        kept = np.where(np.isnan(fixed), self._known.offered_a, fixed)
        reserved = np.where(silent, kept, 0.0)
        left_kw = max(capacity - float(reserved @ self._stations.kw_per_a), 0.0)
        left_a = np.maximum(self._stations.limit_a - self._stations.load @ reserved, 0.0)
        amperes, decided_by = self._decide(time, cars, left_kw, left_a, warnings)
        # Who is silent may not hear that there is less now: what it was told stays reserved.
        offered = np.where(silent, reserved, amperes)
        self._known = replace(self._known, offered_a=_single(offered))
        fits = np.cumsum(reserved * self._stations.kw_per_a) <= capacity + 1e-3
        told = np.where(silent, np.where(fits, reserved, 0.0), amperes)
        self._time, self.seen, self.capacity_kw = time, cars, capacity
        if self._path is not None:
            try:
                write_json(self._path, self.state())
            except OSError as error:
                # A full disk is no reason to stop.
                warnings.append(f"{self._path}: what is known of the cars was not saved ({error})")
        kw = told * self._stations.kw_per_a
        return PowerOffers(
            {name: int(a) for name, a in zip(self._names, told, strict=True)},
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
        """Whole amperes, and who decided: the policy, the baseline where it fails, nobody where both do."""
        nobody = np.zeros(len(self._names))
        try:
            seen = self._see(time, cars, capacity_kw, limit_a)
            usual = np.nan_to_num(_wishes(self._usual, seen))
        except Exception as error:
            _logger.exception("nobody could decide")
            warnings.append(f"nobody could decide ({error}); no power is offered")
            return nobody, "nobody"
        wishes, decided_by = usual, self.baseline
        if self.trust > 0:
            try:
                own = np.asarray(_wishes(self._schedule, seen))
                if not np.isfinite(own).all():
                    raise ValueError("its wishes are not finite")
                wishes = mix_allocations(own, usual, self.trust)
                decided_by = "policy" if self.trust == 1 else f"policy and {self.baseline}"
            except Exception as error:
                _logger.exception("the policy could not decide")
                warnings.append(f"the policy could not decide ({error}); {self.baseline} did")
        return np.asarray(_set_points(seen, jnp.asarray(wishes), self._physics), float), decided_by

    def _meet(self, cars: Mapping[str, _Car], silent: np.ndarray) -> None:
        """Forget the cars that have left: of one that has just come nothing is known."""
        arrivals = [
            before if not_heard else getattr(cars.get(name), "arrival", None)
            for name, before, not_heard in zip(self._names, self._arrivals, silent, strict=True)
        ]
        pairs = zip(self._arrivals, arrivals, strict=True)
        stays = self._stays = np.array([old is not None and old == new for old, new in pairs])
        self._known = jax.tree.map(
            lambda old, new: np.where(stays, old, new), self._known, self._fresh
        )
        self._arrivals = arrivals

    def _told(
        self, cars: Mapping[str, _Car], field: str, since: datetime | None = None
    ) -> np.ndarray:
        """A number of each car that is there, or the hours of a moment since another; NaN where it was
        not told.
        """
        values = [getattr(cars.get(name), field, None) for name in self._names]
        if since is not None:
            values = [None if v is None else (v - since).total_seconds() / 3600 for v in values]
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def _learn(self, cars: Mapping[str, _Car], hours: float) -> None:
        """What the meters say since the last question; where one is silent, what is believed is assumed."""
        known, stations = self._known, self._stations
        accepted, drawn, delivered, full = (
            self._told(cars, field) for field in ("offered_a", "drawn_kw", "delivered_kwh", "full")
        )
        offered = np.fmin(np.where(np.isnan(accepted), known.offered_a, accepted), stations.max_a)
        believed = np.minimum(offered, known.limit_a) * stations.kw_per_a
        believed = np.where(known.single, believed / stations.phases, believed)
        heard = ~np.isnan(drawn)
        kw = np.where(heard, drawn, believed)
        if hours > 0:
            learnt = _learnt(known, stations, offered, kw, heard, np.float32(hours))
            # Of who has just come, the time before says nothing.
            known = jax.tree.map(lambda new, old: np.where(self._stays, new, old), learnt, known)
        got = np.where(np.isnan(delivered), known.got_kwh + self._stays * kw * hours, delivered)
        idle = np.where(np.isnan(full), known.idle_hours, _FULL_HOURS * full)
        self._known = replace(known, got_kwh=_single(got), idle_hours=_single(idle))

    def _see(
        self, time: datetime, cars: Mapping[str, _Car], capacity_kw: float, limit_a: Any
    ) -> StationView:
        """What is seen of the stations now."""
        midnight = time.replace(hour=0, minute=0, second=0, microsecond=0)
        n = int((time - midnight).total_seconds() / 3600 / self._physics.period_hours)
        plugged = np.array([name in cars for name in self._names])
        zeros = np.zeros(len(plugged), np.float32)
        requested = self._told(cars, "requested_kwh")
        leaves = self._told(cars, "stated_departure", midnight)
        # Nobody knows what they need or when they leave. All came before this period, so that what is known
        # of them is theirs.
        garage = {
            "arrival": np.where(plugged, n - 1, 0).astype(np.int32),
            "departure": np.where(plugged, n + 1, 0).astype(np.int32),
            "arrived": np.nan_to_num(self._told(cars, "arrival", midnight)),
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
        past = self.past
        today = self.predictor.apply(today) if past is None else past.apply(today, date)
        known, stations = self._known, self._stations
        per_a = np.where(known.single, stations.kw_per_a / stations.phases, stations.kw_per_a)
        said_a = np.maximum(self._told(cars, "max_kw") / per_a, stations.min_a)
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
    ) -> tuple[datetime, float, dict[str, _Car], np.ndarray, np.ndarray]:
        """The time, the feeder's power, the cars, who was not spoken of or does not listen, and what such
        a one draws, where that is told; the rest is a warning.
        """
        if not isinstance(now, Mapping):
            warnings.append("now is no JSON object; everything stays as it was")
            now = {"stations": []}
        time = self._moment(now.get("time"), "time", warnings) if now.get("time") else None
        if time is not None and self._time is not None and time < self._time:
            # An hour that the clock on the wall shows twice: now it is the second time.
            second = self._moment(now.get("time"), "time", warnings, fold=1)
            time = second if second is not None and second >= self._time else time
        if time is None:
            zone = self.site.timezone
            wall = datetime.now(UTC if zone else None).replace(microsecond=0)
            time = _to_standard_time(wall, zone) if self._time is None else self._time
            warnings.append(f"no time is told; {time} is assumed")
        capacity, own = now.get("capacity_kw"), self.site.capacity_kw
        if capacity is None:
            capacity = own
        elif not is_number(capacity) or capacity < 0:
            warnings.append(f"capacity_kw is {_shown(capacity)}; the site's own {own:g} kW is used")
            capacity = own
        elif capacity > own * (1 + 1e-6):
            warnings.append(
                f"capacity_kw is {capacity:g}, above the site's own {own:g} kW, which is used"
            )
            capacity = own
        stations = now.get("stations")
        if not isinstance(stations, list):
            warnings.append("stations is no list; everything stays as it was")
            stations = []
        cars: dict[str, _Car] = {}
        told, strange, fixed = set(), 0, np.full(len(self._names), np.nan)
        for number, station in enumerate(stations):
            name = str(station.get("id")) if isinstance(station, Mapping) else None
            if name is None or name not in self._places:
                strange += 1
                if strange <= _NAMED:
                    shown = name or str(number)
                    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
                    # In letters that can be written; who was meant is looked for among some.
                    shown = shown.encode("utf-8", "backslashreplace").decode()
                    warnings.append(
                        f"station {shown} is not one of the site; it is told nothing"
                        f"{suggest(name or '', self._names[:1000])}"
                    )
            elif name in told:
                warnings.append(f"station {name} is there twice; the first counts")
            else:
                told.add(name)
                car = self._car(name, station, time, warnings)
                if (still := station.get("fixed_a")) is not None:
                    place = self._places[name]
                    if not is_number(still) or not 0 <= still <= self._stations.max_a[place]:
                        warnings.append(
                            f"station {name}: fixed_a is {_shown(still)}; its cable's limit counts"
                        )
                        still = self._stations.max_a[place]
                    fixed[place] = still
                elif car is not None:
                    cars[name] = car
        if strange > _NAMED:
            warnings.append(f"{strange - _NAMED} more stations are not of the site")
        listens = np.array([name in told for name in self._names]) & np.isnan(fixed)
        return time, float(capacity), cars, ~listens, fixed

    def _car(
        self, name: str, station: Mapping[str, Any], time: datetime, warnings: list[str]
    ) -> _Car | None:
        """The car at a station, or None; what cannot be is left out with a warning."""
        what = f"station {name}"
        for field in station:
            if field not in _FIELDS:
                warnings.append(
                    f"{what}: {field!r} is not known{suggest(str(field), list(_FIELDS))}"
                )
        plugged = station.get("plugged")
        if plugged is False or (plugged is None and station.get("arrival") is None):
            return None
        if plugged is not True:
            warnings.append(f"{what}: plugged is {_shown(plugged)}; a car is taken to be there")
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
        if arrival is None or arrival > time + _SAME_CAR:
            warnings.append(
                f"{what}: a car is plugged in, and its arrival is "
                f"{'missing' if arrival is None else 'after now'}; "
                f"{'what was told before is used' if before is not None else 'now is used'}"
            )
            arrival = before or time
        elif before is not None and abs(arrival - before) <= _SAME_CAR:
            arrival = before
        arrival = min(arrival, time)
        full = station.get("full")
        if full is not None and not isinstance(full, bool):
            warnings.append(f"{what}: full is {_shown(full)}; it is left out")
            full = None
        return _Car(arrival, full=full, **found)

    def _moment(self, value: Any, what: str, warnings: list[str], fold: int = 0) -> datetime | None:
        """A moment in the site's standard time."""
        try:
            # Nothing but ISO 8601: of 05/02/2018 nobody knows which is the month.
            time = datetime.fromisoformat(value.strip())
            if not 1970 <= time.year < 2200:
                raise ValueError
            if time.tzinfo is not None and self.site.timezone is None and _NO_ZONE not in warnings:
                warnings.append(_NO_ZONE)
            return _to_standard_time(time, self.site.timezone, fold)
        except Exception:
            # Whatever it is.
            warnings.append(f"{what} is {_shown(value)}; write it as 2021-06-01 09:00")
            return None

    def state(self) -> dict[str, Any]:
        """What is known of the cars, as JSON."""
        stations = {}
        for place, name in enumerate(self._names):
            arrival = self._arrivals[place]
            if arrival is not None:
                known = {
                    f.name: getattr(self._known, f.name)[place].item() for f in fields(GarageState)
                }
                stations[name] = {"arrival": str(arrival), **known}
        return {"site": self.site.fingerprint, "time": str(self._time), "stations": stations}

    def restore(self, content: Any, source: str = "state") -> None:
        """Go on from what `state` told; that of another site, or no sound one, is refused."""
        if not isinstance(content, Mapping) or content.get("site") != self.site.fingerprint:
            raise InputError(f"{source}: it is of another site; remove it, or name another file")
        try:
            arrays = {f.name: np.array(getattr(self._known, f.name)) for f in fields(GarageState)}
            for name, kept in content["stations"].items():
                place = self._places[name]
                self._arrivals[place] = datetime.fromisoformat(kept["arrival"])
                for field, values in arrays.items():
                    values[place] = kept[field]
            if not all(np.isfinite(values).all() for values in arrays.values()):
                raise ValueError
            self._time = datetime.fromisoformat(content["time"])
            self._known = GarageState(**arrays)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{source}: no sound state of a controller; remove it") from None


@lru_cache(4096)
def _to_standard_time(time: datetime, zone: str | None, fold: int = 0) -> datetime:
    """A moment in the zone's standard time; without a zone its clock is the wall's.

    An hour that the clock on the wall shows twice is the first, or the second with `fold`.
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
