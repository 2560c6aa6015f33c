"""Run by the python of an environment with byzfl: its own aggregators on updates that were saved.

Reads arrays `updates/CASE` and `byzantine/CASE`, writes one aggregate for each aggregator and case.
Nothing of ours is imported.
"""

import importlib
import importlib.util
import sys
import types

import numpy as np

# Importing byzfl as a whole brings torchvision with it, which no aggregator needs.
package = types.ModuleType("byzfl")
package.__path__ = list(importlib.util.find_spec("byzfl").submodule_search_locations)
sys.modules["byzfl"] = package

after, before = (
    importlib.import_module(f"byzfl.aggregators.{name}")
    for name in ("aggregators", "preaggregators")
)
given, found = dict(np.load(sys.argv[1])), {}
for name, updates in given.items():
    kind, _, case = name.partition("/")
    if kind != "updates":
        continue
    f = int(given[f"byzantine/{case}"])
    found[f"median/{case}"] = after.Median()(updates)
    found[f"trimmed mean/{case}"] = after.TrMean(f)(updates)
    # Krum sums over the m - f - 2 nearest; byzfl's, over m - f - 1.
    found[f"Krum/{case}"] = after.Krum(f + 1)(updates)
    found[f"nearest-neighbour mixing/{case}"] = after.TrMean(f)(before.NNM(f)(updates))
np.savez(sys.argv[2], **found)
