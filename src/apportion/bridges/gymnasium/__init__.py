"""Problems as Gymnasium environments, and Gymnasium environments as problems."""

from apportion.errors import optional_import

with optional_import("apportion.bridges.gymnasium needs Gymnasium", "gym"):
    import gymnasium as gymnasium

from apportion.bridges.gymnasium.environments import ProblemEnv as ProblemEnv
from apportion.bridges.gymnasium.simulator import Simulated as Simulated
from apportion.bridges.gymnasium.simulator import from_gymnasium as from_gymnasium
