"""Any problem as a Gymnasium environment, and any simulator of yours as a problem.

Importing this module registers the domains that have a problem of embedded data by their names:
`apportion/Budget-v0` and `apportion/Charging-v0`. Without an import of yours,
`gymnasium.make("apportion.bridges.gymnasium:apportion/Budget-v0")` makes one.
"""

from apportion.errors import optional_import

with optional_import("apportion.bridges.gymnasium needs Gymnasium", "gym"):
    import gymnasium as gymnasium

from apportion.bridges.gymnasium.environments import ProblemEnv as ProblemEnv
from apportion.bridges.gymnasium.environments import register_domains
from apportion.bridges.gymnasium.simulator import Simulated as Simulated
from apportion.bridges.gymnasium.simulator import from_gymnasium as from_gymnasium

register_domains()
