"""Advertising budget over campaigns with saturation and carry-over.

The goodwill of campaign i is g_i <- carry_i g_i + a_i, and its sales in period n are
efficiency_{i,n} g_i / (g_i + saturation_i). Efficiencies drift and are observed only through a finite,
noisy record, so a policy trained on few campaigns overfits. The paper's introduction names this
application beside portfolios and federated learning.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, equal_shares
from apportion.tasks import Task


class BudgetState(eqx.Module):
    """Period, goodwill of each campaign, and shares of the previous period."""

    n: Int[Array, ""]
    goodwill: Allocation
    held: Allocation


class Budget(Problem):
    """Divide the budget of each period among the campaigns of a task.

    An episode starts after the first `window` periods and ends with the record.

    Parameters
    ----------
    efficiency : array of shape (universe, time)
        Sales of each campaign at full saturation, which determine the reward.
    measured : array of shape (universe, time)
        Noisy measurements of the log efficiency, which the policy observes.
    saturation : array of shape (universe,)
        Goodwill at which a campaign reaches half of its efficiency.
    carry : array of shape (universe,)
        Fraction of goodwill that remains after a period, in [0, 1).
    window : int
        Measurements that an observation contains.

    Raises
    ------
    InputError
        If the record is not longer than the window or a parameter is out of range.

    Examples
    --------
    >>> import jax
    >>> from apportion.tasks import Task
    >>> problem = Budget.simulate(universe=20, periods=60, seed=0)
    >>> task = Task.of([[0, 1, 2]])[0]
    >>> state = problem.reset(task, key=jax.random.key(0))
    >>> problem.observe(task, state).history.shape
    (3, 8, 2)
    """

    efficiency: Float[Array, "universe time"]
    measured: Float[Array, "universe time"]
    saturation: Float[Array, " universe"]
    carry: Float[Array, " universe"]
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    window: int = eqx.field(static=True)

    def __init__(self, efficiency, measured, saturation, carry, *, window: int = 8):
        self.efficiency = jnp.asarray(efficiency, float)
        self.measured = jnp.asarray(measured, float)
        self.saturation = jnp.asarray(saturation, float)
        self.carry = jnp.asarray(carry, float)
        self.universe, periods = self.efficiency.shape
        self.window = window
        self.horizon = periods - window
        if self.horizon < 1:
            raise InputError(
                f"budget: the record has {periods} periods; more than the window of {window} are needed"
            )
        if not (np.asarray(self.efficiency) > 0).all():
            raise InputError("budget: efficiency must be positive everywhere")
        if not ((np.asarray(self.carry) >= 0) & (np.asarray(self.carry) < 1)).all():
            raise InputError("budget: carry must be in [0, 1), so that goodwill stays finite")
        if not (np.asarray(self.saturation) > 0).all():
            raise InputError("budget: saturation must be positive")

    @classmethod
    def simulate(
        cls, universe: int = 60, periods: int = 80, *, noise: float = 0.6, seed: int = 0
    ) -> "Budget":
        """Simulate a market in which each log efficiency is an AR(1) process around its own level.

        Parameters
        ----------
        universe : int
            Number of campaigns.
        periods : int
            Length of the record.
        noise : float
            Standard deviation of the measurement noise.
        seed : int
            Seed of the simulation.

        Returns
        -------
        Budget
            The simulated market.
        """
        rng = np.random.default_rng(seed)
        level = rng.normal(0.0, 0.5, universe)
        log_efficiency = np.empty((universe, periods))
        log_efficiency[:, 0] = level + rng.normal(0.0, 0.6, universe)
        for n in range(1, periods):
            gap = log_efficiency[:, n - 1] - level
            log_efficiency[:, n] = level + 0.9 * gap + rng.normal(0.0, 0.26, universe)
        return cls(
            np.exp(log_efficiency),
            log_efficiency + rng.normal(0.0, noise, log_efficiency.shape),
            rng.uniform(0.1, 0.4, universe),
            rng.uniform(0.0, 0.6, universe),
        )

    def reset(self, task: Task, *, key: PRNGKeyArray) -> BudgetState:
        shares = equal_shares(task.mask)
        # The stationary goodwill of equal shares.
        goodwill = shares / (1 - self.carry[task.members])
        return BudgetState(jnp.zeros((), jnp.int32), goodwill, shares)

    def observe(self, task: Task, state: BudgetState) -> Observation:
        """Return the last `window` measurements and, as a second channel, the goodwill."""
        places = state.n + jnp.arange(self.window, dtype=jnp.int32)
        record = self.measured[task.members[:, None], places[None, :]]
        goodwill = jnp.broadcast_to(state.goodwill[:, None], record.shape)
        return Observation(jnp.stack([record, goodwill], -1), state.held)

    def step(
        self, task: Task, state: BudgetState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        goodwill = self.carry[task.members] * state.goodwill + allocation
        efficiency = self.efficiency[task.members, state.n + self.window]
        sales = efficiency * goodwill / (goodwill + self.saturation[task.members])
        reward = jnp.where(task.mask, sales, 0.0).sum() / task.mask.sum()
        n = state.n + 1
        following = BudgetState(n, jnp.where(task.mask, goodwill, 0.0), allocation)
        return Step(following, reward, jnp.array(False), n >= self.horizon)
