"""An advertising budget over campaigns: saturating, carried-over response to what is spent.

Campaign i keeps goodwill g_i <- carry_i g_i + a_i from period to period and sells
efficiency_{i,n} g_i / (g_i + saturation_i). Efficiencies drift and are known only from a finite,
noisy record, so a policy trained on few campaigns over-fits them: the setting of the paper's
introduction that is neither a portfolio nor a federation.
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
    """The period of the record, goodwill of each campaign, and last period's shares."""

    n: Int[Array, ""]
    goodwill: Allocation
    held: Allocation


class Budget(Problem):
    """Share one period's budget over the campaigns of a task, for as long as the record lasts.

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
    """Sales at full saturation, the truth that pays."""
    measured: Float[Array, "universe time"]
    """Log efficiency as measured, the record a policy may read."""
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
            raise InputError("budget: carry must be in [0, 1), or goodwill would grow for ever")
        if not (np.asarray(self.saturation) > 0).all():
            raise InputError("budget: saturation must be positive")

    @classmethod
    def simulate(
        cls, universe: int = 60, periods: int = 80, *, noise: float = 0.6, seed: int = 0
    ) -> "Budget":
        """A market of campaigns: log efficiency is a slow AR(1) about each campaign's own level."""
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
        # Goodwill starts where equal shares would have brought it.
        goodwill = shares / (1 - self.carry[task.members])
        return BudgetState(jnp.zeros((), jnp.int32), goodwill, shares)

    def observe(self, task: Task, state: BudgetState) -> Observation:
        """The last `window` measurements before the period, with goodwill beside each."""
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
