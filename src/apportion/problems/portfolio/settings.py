"""Everything that decides a portfolio run, as one frozen dataclass that is also its command line.

The defaults are the policy worth having: an ensemble that is shrunk to equal shares, trades part of
the way, and was penalised for straying from them. `PortfolioSettings.paper()` is the paper's. The
command line chooses k, eta and the updates anew on validation years.
"""

from dataclasses import dataclass
from typing import Literal

from apportion.errors import InputError

Method = Literal["pmtl", "mtl", "stl"]
Protocol = Literal["per-policy", "per-task"]


@dataclass(frozen=True)
class PortfolioSettings:
    """Settings of a portfolio run.

    Examples
    --------
    >>> PortfolioSettings.paper().updates
    18000
    >>> PortfolioSettings.paper(method="mtl", protocol="per-task", steps=300, tasks=5).updates
    1500
    """

    method: Method = "pmtl"
    """pmtl prioritises tasks, mtl draws them uniformly, stl learns from the first task alone."""
    tasks: int = 30
    """Number of tasks T."""
    task_size: int = 10
    """Instruments in a task, m."""
    steps: int = 6000
    """Updates: of the policy, or of each task (see protocol)."""
    protocol: Protocol = "per-policy"
    """What `steps` counts: per-policy gives every method as many updates of its policy; per-task is
    the paper's, where a multi-task policy gets `steps` updates for each of its tasks."""
    members: int = 4
    """Policies trained from different seeds, whose allocations are averaged."""
    k: float = 0.5
    """Trust in the learned policy: the target is (1 - k)/m + k times its allocation."""
    eta: float = 0.1
    """Fraction of the way from what is held to the target that is traded each day."""
    tracking: float = 15.0
    """Penalty in the reward on the squared daily difference of log growth from equal shares."""
    window: int = 31
    """Days of history a decision sees, H."""
    batch: int = 109
    """Consecutive days in a batch, B."""
    hidden: int = 25
    """Units of the recurrent network."""
    learning_rate: float = 2.8e-4
    """Step size of Adam."""
    cost: float = 0.0025
    """Commission c, a fraction of the value traded."""
    alpha: float = 0.5
    """Degree of prioritisation (pmtl)."""
    beta: float = 1.0
    """Correction of the sampling bias (pmtl)."""
    smoothing: float = 0.2
    """Weight of a task's old score when it is scored anew."""
    scorer: str = "max-deviation"
    """What a task is scored by: one of apportion.scorers.SCORERS."""
    recency: float = 5e-5
    """How strongly batches favour recent days."""
    acting: int = 0
    """Days acted in the drawn task after each update, n_e; the batch's own write-back keeps memory
    fresh without it."""
    held_out: int = 0
    """Instruments never trained on, drawn by the seed."""
    seed: int = 0
    """Decides tasks, held-out instruments, first parameters and batches."""

    def __post_init__(self):
        for name in ("tasks", "task_size", "steps", "members", "window", "batch", "hidden"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("k", "eta"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        if self.method not in ("pmtl", "mtl", "stl"):
            raise InputError(f"method {self.method!r}: choose pmtl, mtl or stl")
        if self.protocol not in ("per-policy", "per-task"):
            raise InputError(f"protocol {self.protocol!r}: choose per-policy or per-task")
        if self.tracking < 0 or self.learning_rate <= 0:
            raise InputError("tracking must be >= 0 and learning_rate > 0")

    @classmethod
    def paper(cls, **changes) -> "PortfolioSettings":
        """The paper's policy: one seed, the allocation as it is, no penalty, 18,000 updates."""
        plain = {"steps": 18_000, "members": 1, "k": 1.0, "eta": 1.0, "tracking": 0.0}
        return cls(**(plain | changes))

    @property
    def updates(self) -> int:
        """Gradient steps of one policy."""
        per_task = self.protocol == "per-task" and self.method != "stl"
        return self.steps * (self.tasks if per_task else 1)
