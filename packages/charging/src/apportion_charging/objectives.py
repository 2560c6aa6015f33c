"""Objectives of an operator: the reward of a period as a function of the energy drawn in it.

`energy` is the kWh drawn. `fair` is concave in each car's share of its need, so the first kWh of a
car counts more than its last. `promise` is the energy and a bonus for 80 % of each car's need.
`cost` is the value of the energy minus its price and the charge for the day's highest power. Each
reward is differentiable and known after its period; the rewards of a day sum to its objective.
Rewards may use needs, which are hidden from policies, because training uses past sessions.
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
"""Constant added to a car's share before the root, which keeps the gradient at 0 finite."""
_PER_CAR_KWH = 10.0
"""Value in kWh of a kept promise, in addition to its energy, and scale of `fair`."""


class Objective(eqx.Module):
    """Reward of a period; `at` returns the objective of a station's site."""

    @abstractmethod
    def __call__(
        self, seen: StationView, drawn_kwh: PerStation, peak_kw: Float[Array, ""]
    ) -> Float[Array, ""]:
        """Return the reward of a period.

        Parameters
        ----------
        peak_kw
            Highest power so far on this day.
        """

    def at(self, station: Int[Array, ""]) -> "Objective":
        """Return the objective of this station's site."""
        return self


class Energy(Objective):
    """Energy drawn, in kWh."""

    def __call__(self, seen, drawn_kwh, peak_kw):
        return drawn_kwh.sum()


class _Fair(Objective):
    """Square root of each car's share of its need."""

    def __call__(self, seen, drawn_kwh, peak_kw):
        def worth(kwh: PerStation) -> PerStation:
            share = jnp.clip(kwh / jnp.maximum(seen.car_need_kwh, 1e-3), 0.0, 1.0)
            return jnp.sqrt(share + _FIRST)

        got = seen.known.got_kwh
        return _PER_CAR_KWH * (worth(got + drawn_kwh) - worth(got)).sum()


class _Promise(Objective):
    """Energy, and a bonus for 80 % of each car's need.

    The bonus is quadratic in the progress towards 80 %, so that power goes to cars whose promise
    can be kept.
    """

    def __call__(self, seen, drawn_kwh, peak_kw):
        need, got = seen.car_need_kwh, seen.known.got_kwh

        def kept(kwh: PerStation) -> PerStation:
            return jnp.clip(kwh / jnp.maximum(0.8 * need, 1e-3), 0.0, 1.0) ** 2

        return drawn_kwh.sum() + _PER_CAR_KWH * (kept(got + drawn_kwh) - kept(got)).sum()


class _Cost(Objective):
    """Value of the energy minus its cost."""

    per_kwh: Float[Array, "*universe hours"]
    worth_per_kwh: Float[Array, "*universe"]
    peak_per_kw: Float[Array, "*universe"]
    period_hours: float = eqx.field(static=True)

    @classmethod
    def of(cls, sites: Sequence[Days]) -> "_Cost":
        """Collect the prices of every station of these sites."""
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
    """Create the objective of a run for these sites.

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
