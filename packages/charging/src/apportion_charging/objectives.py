"""The objectives of an operator: the reward of a period, from the energy drawn in it.

`energy` is kWh. `fair` is concave in each car's share of its need, so that the first kWh of a car counts
more than its last. `promise` counts 80 % of each car's need first, and then energy.
`cost` is what the energy is worth less its price at that hour, and less the charge for the day's highest
power. Each is known when it happens, adds up over a day to what the day is judged by, and has a gradient.
Rewards may look at needs, which are hidden from policies: they are for learning from the past.
"""

from abc import abstractmethod
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from apportion.errors import InputError
from apportion_charging.days import Days
from apportion_charging.garage import PerStation, StationView
from apportion_charging.settings import ChargingSettings

_FIRST = 0.05
"""Keeps the first kWh's worth finite: a car's share counts as the root of it and this."""
_PER_CAR_KWH = 10.0
"""What a promise kept counts, beyond its energy; and a car fully and fairly served."""


class Objective(eqx.Module):
    """A reward; `at` returns the one of a station's site."""

    @abstractmethod
    def __call__(
        self, seen: StationView, drawn_kwh: PerStation, peak_kw: Float[Array, ""]
    ) -> Float[Array, ""]:
        """The reward of a period.

        Parameters
        ----------
        peak_kw
            The highest power of the day before this period.
        """

    def at(self, station: Int[Array, ""]) -> "Objective":
        """The objective of this station's site."""
        return self


class Energy(Objective):
    """KWh drawn."""

    def __call__(self, seen, drawn_kwh, peak_kw):
        return drawn_kwh.sum()


class _Fair(Objective):
    """The root of each car's share of its need."""

    def __call__(self, seen, drawn_kwh, peak_kw):
        def worth(kwh: PerStation) -> PerStation:
            share = jnp.clip(kwh / jnp.maximum(seen.car_need_kwh, 1e-3), 0.0, 1.0)
            return jnp.sqrt(share + _FIRST)

        got = seen.known.got_kwh
        return _PER_CAR_KWH * (worth(got + drawn_kwh) - worth(got)).sum()


class _Promise(Objective):
    """80 % of each car's need first, then energy.

    Nearly kept counts little: progress counts by its square, so that power goes where a promise can be
    kept with it.
    """

    def __call__(self, seen, drawn_kwh, peak_kw):
        need, got = seen.car_need_kwh, seen.known.got_kwh

        def kept(kwh: PerStation) -> PerStation:
            return jnp.clip(kwh / jnp.maximum(0.8 * need, 1e-3), 0.0, 1.0) ** 2

        return drawn_kwh.sum() + _PER_CAR_KWH * (kept(got + drawn_kwh) - kept(got)).sum()


class _Cost(Objective):
    """What the energy is worth less what it costs."""

    per_kwh: Float[Array, "*universe hours"]
    worth_per_kwh: Float[Array, "*universe"]
    peak_per_kw: Float[Array, "*universe"]
    period_hours: float = eqx.field(static=True)

    @classmethod
    def of(cls, sites: Sequence[Days]) -> "_Cost":
        """The prices of every station of these sites."""
        rows = []
        for days in sites:
            if days.prices is None:
                raise InputError(
                    f'site "{days.site}": no prices are known for the objective cost; add a table '
                    "[prices] to the TOML file of the site"
                )
            own = days.prices
            rows += [(own.per_kwh, own.worth_per_kwh, own.peak_per_kw)] * len(days.stations)
        per_kwh, worth, peak = (jnp.asarray(x, jnp.float32) for x in zip(*rows, strict=True))
        return cls(per_kwh, worth, peak, sites[0].physics.period_hours)

    def at(self, station):
        worth, peak = self.worth_per_kwh[station], self.peak_per_kw[station]
        return _Cost(self.per_kwh[station], worth, peak, self.period_hours)

    def __call__(self, seen, drawn_kwh, peak_kw):
        kwh = drawn_kwh.sum()
        price = self.per_kwh[(seen.hour % 24).astype(jnp.int32)]
        above = jnp.maximum(kwh / self.period_hours - peak_kw, 0.0)
        return (self.worth_per_kwh - price) * kwh - self.peak_per_kw * above


def make_objective(settings: ChargingSettings, sites: Sequence[Days]) -> Objective:
    """The objective of a run, at these sites.

    Examples
    --------
    >>> make_objective(ChargingSettings(objective="promise"), [])
    _Promise()
    """
    if settings.objective == "cost":
        return _Cost.of(sites)
    if settings.objective == "promise":
        return _Promise()
    return _Fair() if settings.objective == "fair" else Energy()
