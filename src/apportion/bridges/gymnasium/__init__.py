"""Problems as Gymnasium environments, and Gymnasium environments as problems.

Importing this module registers the domains with embedded data, such as `apportion/Budget-v0` and
`apportion/Charging-v0`. `gymnasium.make("apportion.bridges.gymnasium:apportion/Budget-v0")` imports the
module and makes the environment.
"""

from apportion.errors import optional_import

with optional_import("apportion.bridges.gymnasium needs Gymnasium", "gym"):
    import gymnasium as gymnasium

from apportion.bridges.gymnasium.environments import ProblemEnv as ProblemEnv
from apportion.bridges.gymnasium.environments import register_domains
from apportion.bridges.gymnasium.simulator import Simulated as Simulated
from apportion.bridges.gymnasium.simulator import from_gymnasium as from_gymnasium

register_domains()
