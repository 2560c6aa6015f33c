"""The settings of the market demo; nothing here starts JAX."""

from dataclasses import dataclass

from apportion.errors import InputError


@dataclass(frozen=True)
class DemoSettings:
    """The main job in small, on the 20 embedded stocks: train, backtest, report what held."""

    experiments: int = 5
    """Independent draws of held-out stocks and tasks."""
    steps: int = 2500
    """Updates of every policy, whatever its method."""
    tasks: int = 20
    """Tasks T of a multi-task policy."""
    seed: int = 0
    """Decides everything random."""

    def __post_init__(self):
        for name in ("experiments", "steps", "tasks"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
