"""Run the simulator of acnportal on saved sessions, with the Python of an environment that has it.

The input is one-dimensional arrays of sessions, with times in periods of 15 minutes since the first
midnight. The output is the energy of each session and the seconds of each sorted algorithm.
Stations are AeroVironment's: whole amperes from 6 to 32, or none. This program does not import
apportion.
"""

import math
import sys
import time
from datetime import datetime

import numpy as np
from acnportal import acnsim, algorithms
from acnportal.acnsim.models.evse import get_evse_by_type
from acnportal.algorithms.upper_bound_estimator import UpperBoundEstimatorBase

VOLTS, AMPERES, LEAST, MINUTES = 208, 32, 6, 15
# acnportal's interface shows no rates of the first period, so all sessions start one period later.
LATER = 1


class LearnedLimits(UpperBoundEstimatorBase):
    """Limit a car to what it draws of its pilot; a car that twice draws nothing is done.

    These are the rules of `garage.learn` for a one-phase station, by acnportal's interface.
    """

    def __init__(self):
        super().__init__()
        self.limit, self.idle = {}, {}

    def get_maximum_rates(self, sessions):
        pilots = self.interface.last_applied_pilot_signals
        rates = self.interface.last_actual_charging_rate
        bounds = {}
        for session in sessions:
            name = session.session_id
            limit, idle = self.limit.get(name, AMPERES), self.idle.get(name, 0)
            offered, drawn = pilots.get(name, 0.0), rates.get(name, 0.0)
            if offered > 0:
                idle = idle + 1 if drawn < 0.5 else 0
                if drawn < 0.9 * offered:
                    limit = min(max(math.ceil(drawn) + 1, LEAST), AMPERES)
                elif offered > limit - 1:
                    limit = min(AMPERES, 1.5 * limit)
            self.limit[name], self.idle[name] = limit, idle
            # The caller looks up bounds by station, contrary to its documentation.
            bounds[session.station_id] = 0.0 if idle >= 2 else limit
        return bounds


def run(sessions, sort, capacity_kw):
    network = acnsim.ChargingNetwork()
    names = [str(i) for i in range(int(sessions["station"].max()) + 1)]
    for name in names:
        network.register_evse(get_evse_by_type(name, "AeroVironment"), VOLTS, 0)
    network.add_constraint(acnsim.Current(names), capacity_kw * 1000 / VOLTS, name="feeder")
    cars = [
        acnsim.EV(
            int(sessions["arrival"][k]) + LATER,
            int(sessions["departure"][k]) + LATER,
            float(sessions["requested"][k]),
            str(sessions["station"][k]),
            str(k),
            acnsim.Battery(float(sessions["need"][k]), 0, VOLTS * AMPERES / 1000),
            estimated_departure=float(sessions["leaves"][k]) + LATER,
        )
        for k in range(len(sessions["arrival"]))
    ]
    events = acnsim.EventQueue([acnsim.PluginEvent(car.arrival, car) for car in cars])
    algorithm = algorithms.SortedSchedulingAlgo(
        sort, estimate_max_rate=True, max_rate_estimator=LearnedLimits()
    )
    simulator = acnsim.Simulator(
        network, algorithm, events, datetime(2019, 5, 1), period=MINUTES, verbose=False
    )
    simulator.run()
    return np.array([car.energy_delivered for car in cars])


def main(source, target):
    sessions = dict(np.load(source))
    capacity = float(sessions.pop("capacity"))
    sorts = {
        "edf": algorithms.earliest_deadline_first,
        "llf": algorithms.least_laxity_first,
        "fcfs": algorithms.first_come_first_served,
        "largest-remaining": algorithms.largest_remaining_processing_time,
    }
    found = {}
    for name, sort in sorts.items():
        started = time.perf_counter()
        found[name] = run(sessions, sort, capacity)
        found[f"{name}/seconds"] = time.perf_counter() - started
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
