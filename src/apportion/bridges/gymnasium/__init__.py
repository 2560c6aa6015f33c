"""Gymnasium both ways: any problem as its environments, and any simulator of yours as a problem.

Importing this module registers `apportion/Budget-v0` and `apportion/Charging-v0`.
"""

from apportion.errors import optional_import

with optional_import("apportion.bridges.gymnasium needs Gymnasium", "gym"):
    import gymnasium as gymnasium

from apportion.bridges.gymnasium.environment import ProblemEnv as ProblemEnv
from apportion.bridges.gymnasium.registered import register_all
from apportion.bridges.gymnasium.simulated import Simulated as Simulated
from apportion.bridges.gymnasium.simulated import from_gymnasium as from_gymnasium
from apportion.bridges.gymnasium.vector import ProblemVectorEnv as ProblemVectorEnv

register_all()
