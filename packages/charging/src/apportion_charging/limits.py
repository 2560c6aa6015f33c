"""Live limits from an energy manager for feeder, phases and branches, with a time to live.

A live limit applies until its time to live ends, and never exceeds the site's own limit. Before the
first live limit and after the last, the safe limit of the site file applies. Without a safe limit,
the last live limit stays. `capacity_kw` of a request is also a live limit of the feeder, but its
expiry never raises the limit. The load of stations no longer in the site is subtracted.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apportion.errors import InputError, reading
from apportion.runs.files import write_json
from apportion.runs.settings import suggest
from apportion_charging import clock
from apportion_charging.site import Site, is_number

_LONGEST_TTL_SECONDS = 86400.0
_NEVER = 1e12
"""Expiry time of a limit that never expires."""

_log = logging.getLogger("apportion.charging")


class _Live(NamedTuple):
    """A live limit, with its start and expiry in seconds since 1970."""

    limit: float
    since: float
    until: float
    falls: bool = False
    """Whether its expiry can only lower the limit in force."""


class LiveLimits:
    """The limits in force, by the names of `Site.wiring`.

    Parameters
    ----------
    site
        The garage, with its own and its safe limits.
    path
        JSON file that stores live limits across restarts.
    """

    def __init__(self, site: Site, path: Path | None = None):
        wiring = site.wiring()
        self._volts, self._path, self._ttl = site.volts, path, site.capacity_ttl_s
        self._own = dict(zip(wiring.names, wiring.limit.tolist(), strict=True))
        self._safe = self._convert(site.safe_limits())
        self._live: dict[str, _Live] = {}
        self.ahead_seconds = 0.0
        """Seconds to look ahead; the lower of a limit's values now and at that time applies."""
        self._reserved: list[tuple[Mapping[str, float], float]] = []
        if path is not None and path.exists():
            with reading(path, "remove it to start without live limits"):
                kept = json.loads(path.read_text(encoding="utf-8"))
                for name in self._own.keys() & kept.keys():
                    limit, since, until = map(float, kept[name][:3])
                    self._live[name] = _Live(limit, since, until, bool(kept[name][3]))

    def set(self, body: Mapping[str, Any]) -> None:
        """Set the limits of a request; an InputError changes nothing."""
        limits, ttl = body.get("limits"), body.get("ttl_s")
        if ttl is None or not is_number(ttl) or not 0 < ttl <= _LONGEST_TTL_SECONDS:
            raise InputError("ttl_s must be a number of seconds, above 0 and at most 86400")
        if not isinstance(limits, Mapping) or not 0 < len(limits) <= 2 * len(self._own):
            raise InputError('limits must be an object, such as {"feeder L1": {"a": 32}}')
        now, found = clock.now(), self._convert(limits)
        self._keep({name: _Live(limit, now, now + ttl) for name, limit in found.items()})

    def set_capacity(self, kw: Any) -> None:
        """Set the feeder's limit in kW from a request; an InputError changes nothing."""
        if not is_number(kw) or kw < 0:
            raise InputError(
                f"capacity_kw is {kw!r:.40}, no number of at least 0; the last one stays"
            )
        if kw > self._own["feeder"] * (1 + 1e-6):
            _log.warning("capacity_kw is %g, above the site's own %g kW", kw, self._own["feeder"])
        now = clock.now()
        until = _NEVER if self._ttl is None else now + self._ttl
        self._keep({"feeder": _Live(float(kw), now, until, falls=True)})

    def _keep(self, found: Mapping[str, _Live]) -> None:
        self._live |= found
        if self._path is not None:
            try:
                write_json(self._path, self._live)
            except OSError as error:
                _log.warning("%s: the live limits were not saved (%s)", self._path, error)

    def reserve(self, load: Mapping[str, float], until: float) -> None:
        """Subtract a load from the limits of these names until a time in seconds since 1970."""
        self._reserved.append((load, until))

    def in_force(self) -> np.ndarray:
        """Return the present limits in the order of `Site.wiring`: the first in kW, others in A."""
        limits = np.array([self._find(name)[0] for name in self._own])
        phases = [n for n, name in enumerate(self._own) if name.startswith("feeder L")]
        if phases:
            limits[0] = min(limits[0], limits[phases].sum() * self._volts / 1000)
        self._reserved = [(load, until) for load, until in self._reserved if until > clock.now()]
        for load, _ in self._reserved:
            limits -= [load.get(name, 0.0) for name in self._own]
        return np.maximum(limits, 0.0)

    def describe(self, name: str) -> dict[str, Any]:
        """Return a limit's source (site, live, safe, expired) and its live value's age in s."""
        live = self._live.get(name)
        age = None if live is None else round(clock.now() - live.since, 1)
        return {"source": self._find(name)[1], "age_s": age}

    def _find(self, name: str) -> tuple[float, str]:
        """Return a limit and its source: the lower value of now and `ahead_seconds` later."""
        now = clock.now()
        return min(self._at(name, now), self._at(name, now + self.ahead_seconds))

    def _at(self, name: str, time: float) -> tuple[float, str]:
        own, live = self._own[name], self._live.get(name)
        safe = min(own, self._safe.get(name, own))
        if live is None:
            return safe, "safe" if name in self._safe else "site"
        # A clock that was set back must not extend a limit.
        if live.since <= time < live.until:
            return min(own, live.limit), "live"
        if name in self._safe and (not live.falls or safe < live.limit):
            return safe, "safe"
        return min(own, live.limit), "expired"

    def _convert(self, limits: Mapping[str, Any]) -> dict[str, float]:
        """Convert to the units of `Site.wiring`; a feeder or branch name means all its phases."""
        found: dict[str, float] = {}
        for name, given in limits.items():
            if not isinstance(given, Mapping) or not given or not given.keys() <= {"a", "kw"}:
                raise InputError(f'limit {name:.60}: give {{"a": NUMBER}} or {{"kw": NUMBER}}')
            phases = [one for one in self._own if one.rpartition(" L")[0] == name]
            if name not in self._own and not phases:
                raise InputError(f"there is no limit {name:.60}{suggest(name, list(self._own))}")
            for unit, value in given.items():
                if not is_number(value) or value < 0:
                    raise InputError(f"limit {name}: {unit} is not a number of at least 0")
                if unit == "a" and name == "feeder" and not phases:
                    raise InputError("limit feeder: the site limits its power; give kw")
                rows = [name] if name in self._own and (unit == "kw" or not phases) else phases
                if unit == "a" or name == "feeder":
                    each = value
                else:
                    each = value * 1000 / self._volts / len(rows)
                for row in rows:
                    found[row] = min(float(each), found.get(row, math.inf))
        return found
