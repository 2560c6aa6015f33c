"""Meter values of charge points: parsing of OCPP samples, and the readings of a car's session.

Power and energy are the reported total or, without one, the sum of the phases; neutral is ignored.
A register that falls, or rises by more than the cable delivers, is rejected at first. If the next
reading is consistent with it, the register was replaced, and the energy delivered so far is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from apportion_charging.site import PHASES, find_single_phase, is_number

_MEASURANDS = ("Energy.Active.Import.Register", "Power.Active.Import", "Current.Import")
_PHASES = {f"L{phase}{end}": phase - 1 for phase in PHASES for end in ("", "-N")}
_MAX_EXPONENT = 9
_SLACK_WH = 100.0
"""Tolerance in Wh for registers that run ahead, because clocks differ and starts are rounded."""
MARGIN = 1.2
"""Largest plausible power of a meter, relative to the full power of the cable."""


class Samples(NamedTuple):
    """Readings of one OCPP meter value."""

    wh: float | None = None
    kw: float | None = None
    currents_a: tuple[float, ...] | None = None
    """Current of each phase of the site in A, if all three are sent."""
    bad: str | None = None
    """The unreadable value, or None."""


def read_samples(samples: Any, volts: float, phases: Sequence[int]) -> Samples:
    """Parse a meter value; `phases` are the site's phases in the order of the station's own.

    >>> read_samples([{"value": "1.5", "unit": "kWh"}], 230.0, (1, 2, 3)).wh
    1500.0
    >>> read_samples([{"value": "10", "measurand": "Current.Import", "phase": "L1"}], 230.0, (2,)).kw
    2.3
    """
    total: dict[str, float] = {}
    by_phase: dict[str, dict[int, float]] = {name: {} for name in _MEASURANDS}
    bad = None
    for sample in samples if isinstance(samples, list) else []:
        measurand, phase = sample.get("measurand", _MEASURANDS[0]), sample.get("phase")
        if measurand not in _MEASURANDS or sample.get("location", "Outlet") not in (
            *("Outlet", "Cable"),
        ):
            continue
        value = _read_value(sample)
        if value is None:
            bad = repr(sample.get("value"))[:40]
        elif phase is None:
            total[measurand] = value
        elif phase in _PHASES:
            by_phase[measurand][_PHASES[phase]] = value
    wh, kw = (
        total.get(name, sum(by_phase[name].values()) if by_phase[name] else None)
        for name in _MEASURANDS[:2]
    )
    currents = by_phase[_MEASURANDS[2]]
    if kw is None and (currents or _MEASURANDS[2] in total):
        # A current without a phase applies to each phase.
        together = sum(currents.values()) if currents else total[_MEASURANDS[2]] * len(phases)
        kw = together * volts
    shown = None
    if len(currents) == len(phases) == len(PHASES):
        by_site = {site: currents[own] for own, site in enumerate(phases)}
        shown = tuple(by_site[phase] for phase in PHASES)
    return Samples(wh, kw if kw is None else kw / 1000, shown, bad)


def _read_value(sample: Mapping[str, Any]) -> float | None:
    """Return a sample's value in Wh, W or A, or None if it is not a number in range."""
    measure = sample.get("unit_of_measure") or {}
    value, exponent = read_number(sample.get("value")), measure.get("multiplier", 0)
    if value is None or value < 0 or not is_number(exponent) or abs(exponent) > _MAX_EXPONENT:
        return None
    kilo = (sample.get("unit") or measure.get("unit")) in ("kWh", "kW")
    return value * 10 ** int(exponent) * (1000 if kilo else 1)


def read_number(value: Any) -> float | None:
    """Convert a value of a message to float, or return None if it is not a plausible number.

    >>> read_number("7.5"), read_number("nan"), read_number(10**400)
    (7.5, None, None)
    """
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) < 1e12 else None


@dataclass
class Meter:
    """Meter readings of the car at a station."""

    most_kw: float
    """Largest plausible power in kW; higher readings are rejected."""
    start_wh: float | None = None
    register_wh: float | None = None
    read_at: float = 0.0
    """Time of the last register reading, in seconds since 1970."""
    currents_a: tuple[float, ...] | None = None
    """Current of each phase of the site in A, when the car last drew power."""
    shown_kw: float | None = None
    heard_at: float | None = None
    _suspect: tuple[float, float] | None = None
    _registers: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of time and register since the last decision, recorded once its offer has settled."""
    _powers: list[float] = field(default_factory=list)

    @property
    def phase(self) -> int | None:
        """The only phase that the car uses, or None."""
        return None if self.currents_a is None else find_single_phase(self.currents_a) or None

    def delivered_kwh(self) -> float | None:
        """Return the energy delivered according to the register, or None if it is unknown."""
        if self.start_wh is None or self.register_wh is None:
            return None
        return (self.register_wh - self.start_wh) / 1000

    def drawn_kw(self) -> float | None:
        """Return the mean power since the last decision, or None if there are too few values."""
        if self._powers:
            return sum(self._powers) / len(self._powers)
        if len(self._registers) < 2:
            return None
        (begun, before), (now, wh) = self._registers[0], self._registers[-1]
        return (wh - before) * 3.6 / (now - begun) if now > begun else None

    def begin_period(self, keep: bool = True) -> None:
        """Clear the values of the period; with `keep`, the last register starts the next one."""
        self.shown_kw = self.shown_kw if (drawn := self.drawn_kw()) is None else drawn
        self._registers, self._powers = self._registers[-1:] if keep else [], []

    def take(self, found: Samples, moment: float, settled: bool) -> str | None:
        """Record a meter value; return a description of the rejected part, or None."""
        bad = found.bad
        if found.wh is not None:
            bad = self._take_register(found.wh, moment, settled) or bad
        if found.kw is not None and found.kw > self.most_kw:
            bad = f"a power of {found.kw:g} kW"
        elif found.kw is not None:
            self.shown_kw = found.kw
            self._powers += [found.kw] * settled
        if found.currents_a is not None and find_single_phase(found.currents_a) is not None:
            self.currents_a = found.currents_a
        return bad

    def _take_register(self, wh: float, moment: float, settled: bool) -> str | None:
        if self.register_wh is None or self.start_wh is None:
            self.start_wh = wh
        elif not self._can_follow(self.register_wh, self.read_at, wh, moment):
            before, self._suspect = self._suspect, (wh, moment)
            if before is None or not self._can_follow(*before, wh, moment):
                return f"its register went from {self.register_wh:g} to {wh:g} Wh"
            self.start_wh += before[0] - self.register_wh
            self._registers = []
        self.register_wh, self.read_at, self._suspect = wh, moment, None
        self._registers += [(moment, wh)] * settled
        return None

    def _can_follow(self, before_wh: float, begun: float, wh: float, moment: float) -> bool:
        most = self.most_kw * max(moment - begun, 0.0) / 3.6 + _SLACK_WH
        return -1.0 <= wh - before_wh <= most
