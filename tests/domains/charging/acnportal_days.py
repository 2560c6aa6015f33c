"""Run by the python of an environment with acnportal: its own simulator on days that were saved.

Reads arrays (days, stations, sessions), runs one of its sorted algorithms on every day, and writes the
energy each session got and the seconds it took. Nothing of ours is imported.
"""

import sys
import time
from datetime import datetime

import numpy as np
from acnportal import acnsim, algorithms
from acnportal.algorithms.upper_bound_estimator import UpperBoundEstimatorBase

VOLTS, AMPERES, MINUTES = 208, 32, 15
# Its interface shows no rates of the first period, so that all days start one later.
LATER = 1


class FullCars(UpperBoundEstimatorBase):
    """A car that was offered over .3 kW and drew less than 90 % of it gets nothing any more."""

    def __init__(self):
        super().__init__()
        self.full = set()

    def get_maximum_rates(self, sessions):
        pilots = self.interface.last_applied_pilot_signals
        rates = self.interface.last_actual_charging_rate
        bounds = {}
        for session in sessions:
            offered = pilots.get(session.session_id, 0.0)
            drawn = rates.get(session.session_id, 0.0)
            if offered * VOLTS / 1000 > 0.3 and drawn < 0.9 * offered:
                self.full.add(session.session_id)
            # The caller looks bounds up by station, whatever its documentation says.
            bounds[session.station_id] = 0.0 if session.session_id in self.full else AMPERES
        return bounds


def run_day(day, sort, capacity_kw):
    stations, places = day["arrival"].shape
    network = acnsim.ChargingNetwork()
    for i in range(stations):
        network.register_evse(acnsim.EVSE(str(i), max_rate=AMPERES), VOLTS, 0)
    everyone = acnsim.Current([str(i) for i in range(stations)])
    network.add_constraint(everyone, capacity_kw * 1000 / VOLTS, name="feeder")
    cars = {}
    for i, k in zip(*np.nonzero(day["departure"] > day["arrival"]), strict=True):
        need = float(day["need"][i, k])
        cars[i, k] = acnsim.EV(
            int(day["arrival"][i, k]) + LATER,
            int(day["departure"][i, k]) + LATER,
            float(day["requested"][i, k]),
            str(i),
            f"{i}-{k}",
            acnsim.Battery(need, 0, VOLTS * AMPERES / 1000),
            estimated_departure=float(day["leaves"][i, k]) + LATER,
        )
    events = acnsim.EventQueue([acnsim.PluginEvent(car.arrival, car) for car in cars.values()])
    algorithm = algorithms.SortedSchedulingAlgo(
        sort, estimate_max_rate=True, max_rate_estimator=FullCars()
    )
    simulator = acnsim.Simulator(
        network, algorithm, events, datetime(2019, 5, 1), period=MINUTES, verbose=False
    )
    simulator.run()
    energy = np.zeros((stations, places))
    for place, car in cars.items():
        energy[place] = car.energy_delivered
    return energy


def main(source, target):
    days = np.load(source)
    sorts = {
        "edf": algorithms.earliest_deadline_first,
        "llf": algorithms.least_laxity_first,
        "fcfs": algorithms.first_come_first_served,
    }
    found = {}
    for name, sort in sorts.items():
        started = time.perf_counter()
        fields = ("arrival", "departure", "need", "requested", "leaves")
        found[name] = np.stack(
            [
                run_day({field: days[field][d] for field in fields}, sort, float(days["capacity"]))
                for d in range(len(days["arrival"]))
            ]
        )
        found[f"{name}/seconds"] = time.perf_counter() - started
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
