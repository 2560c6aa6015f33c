"""What cars take and how long they stay, regressed on what their drivers state.

The logarithms of need and stay are linear in the logarithms of the requested energy and of the stated
stay, in whether anything was stated, and in the hour of arrival (two waves of the day). Fitted by least
squares on training days alone; everything used is known when the car arrives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from apportion.domains.charging.coming import still_to_come
from apportion.domains.charging.days import Days
from apportion.domains.charging.garage import PERIOD_HOURS, PERIODS, Medians
from apportion.domains.charging.sessions import count
from apportion.errors import InputError

LEAST_KWH = 0.5
LEAST_HOURS = PERIOD_HOURS


@dataclass(frozen=True, eq=False)
class Predictor:
    """Coefficients of the two regressions, and what stands in for what is missing."""

    need: np.ndarray
    stay: np.ndarray
    medians: Medians
    """For statements."""
    to_come_kwh: np.ndarray
    """For earlier days: what was still to come after each period, in the mean of days and sites."""

    @classmethod
    def fit(cls, *training: Days) -> "Predictor":
        """Least squares on these days, which may be of several sites."""
        medians = joint_medians(*training)
        features, needs, stays = [], [], []
        for days in training:
            there = days.departure > days.arrival
            features.append(_features(days, medians)[there])
            needs.append(np.maximum(days.need_kwh[there], LEAST_KWH))
            stays.append((days.departure - days.arrived)[there] * PERIOD_HOURS)
        x = np.concatenate(features)
        if len(x) < x.shape[1]:
            raise InputError(
                f"predictions: {count(len(x), 'session')} cannot fix {x.shape[1]} coefficients; give "
                "more days"
            )
        need, *_ = np.linalg.lstsq(x, np.log(np.concatenate(needs)))
        stay, *_ = np.linalg.lstsq(x, np.log(np.concatenate(stays)))
        usual = np.mean([still_to_come(days).mean(0) for days in training], 0)
        return cls(need, stay, medians, usual)

    def apply(self, days: Days) -> Days:
        """The days with predicted needs and departures."""
        x, there = _features(days, self.medians), days.departure > days.arrival
        need = np.exp(x @ self.need)
        departure = days.arrived + np.exp(x @ self.stay) / PERIOD_HOURS
        return replace(
            days,
            predicted_need_kwh=np.where(there, need, 0).astype(np.float32),
            predicted_departure=np.where(there, departure, 0).astype(np.float32),
        )

    def to_dict(self) -> dict[str, list[float]]:
        """Plain numbers, to be saved with a policy."""
        medians = [float(self.medians.requested_kwh), float(self.medians.stay_hours)]
        return {
            "need": self.need.tolist(),
            "stay": self.stay.tolist(),
            "medians": medians,
            "to_come_kwh": self.to_come_kwh.tolist(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Predictor":
        """The predictor that `to_dict` wrote.

        Raises
        ------
        InputError
            Where the numbers are not what a predictor has.
        """
        try:
            need, stay, medians = (
                np.asarray(saved[name], float) for name in ("need", "stay", "medians")
            )
            # Policies saved before it was seen have none.
            to_come = np.asarray(saved.get("to_come_kwh", [0.0] * PERIODS), float)
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "the policy's file has no sound predictions of needs and stays; train it again"
            ) from None
        found = (need, stay, medians, to_come)
        shapes = [x.shape for x in found]
        if shapes != [(8,), (8,), (2,), (PERIODS,)] or not all(np.isfinite(x).all() for x in found):
            raise InputError(
                "the policy's file has damaged predictions of needs and stays; train it again"
            )
        return cls(need, stay, Medians(jnp.float32(medians[0]), jnp.float32(medians[1])), to_come)


def joint_medians(*training: Days) -> Medians:
    """Medians of the statements of several sites' training days together."""
    if len(training) == 1:
        return training[0].medians()
    flat = {
        name: np.concatenate([getattr(days, name).ravel() for days in training])
        for name in (
            "arrival",
            "departure",
            "arrived",
            "need_kwh",
            "requested_kwh",
            "stated_departure",
            "stated",
        )
    }
    return replace(training[0], **flat).medians()


def _features(days: Days, medians: Medians) -> np.ndarray:
    """What is known on arrival, (days, stations, sessions, features)."""
    requested = np.where(days.stated, days.requested_kwh, float(medians.requested_kwh))
    hours = (days.stated_departure - days.arrived) * PERIOD_HOURS
    stay = np.where(days.stated, hours, float(medians.stay_hours))
    angle = 2 * np.pi * days.arrived.astype(float) / PERIODS
    return np.stack(
        [
            np.ones_like(angle),
            np.log(np.maximum(requested, LEAST_KWH)),
            np.log(np.maximum(stay, LEAST_HOURS)),
            days.stated.astype(float),
            np.sin(angle),
            np.cos(angle),
            np.sin(2 * angle),
            np.cos(2 * angle),
        ],
        -1,
    )
