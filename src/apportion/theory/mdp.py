"""Finite MDPs M = <X, A, R, P, gamma> and stacks of them, with exact V^pi, V* and rho^pi.

A family of tasks M_1..M_T is one `MDP` whose leading axis is the task. `average` is the MDP of Corollary 1,
whose reward and kernel are the means over tasks. All functions use float64 NumPy and any number of leading
axes.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float, Int

from apportion.errors import InputError

Kernel = Float[np.ndarray, "*batch states actions states"]
Reward = Float[np.ndarray, "*batch states actions"]
Policy = Int[np.ndarray, "... states"]
Value = Float[np.ndarray, "... states"]


@dataclass(frozen=True)
class MDP:
    """A finite MDP, or a stack of MDPs along leading axes.

    Parameters
    ----------
    kernel
        P[x, a, y], the probability of y after a in x.
    reward
        R[x, a].
    gamma
        Discount factor in (0, 1).

    Examples
    --------
    >>> family = random_family(states=4, actions=2, tasks=3, spread=0.2, gamma=0.7, seed=1)
    >>> len(family), family.average().reward.shape
    (3, (4, 2))
    >>> policy, value = family.average().optimal()
    >>> bool(np.allclose(family.average().value(policy), value))
    True
    """

    kernel: Kernel
    reward: Reward
    gamma: float

    def __post_init__(self):
        if not 0 < self.gamma < 1:
            raise InputError(f"gamma: {self.gamma} is outside (0, 1); choose a discount in it")
        for name, array in (("kernel", self.kernel), ("reward", self.reward)):
            if not np.isfinite(array).all():
                raise InputError(
                    f"{name}: {np.count_nonzero(~np.isfinite(array))} values are not finite"
                )
        if self.kernel.shape[:-1] != self.reward.shape:
            raise InputError(
                f"reward: shape {self.reward.shape} does not fit a kernel of shape "
                f"{self.kernel.shape}; it must be {self.kernel.shape[:-1]}"
            )
        if (self.kernel < 0).any():
            place = tuple(int(i) for i in np.argwhere(self.kernel < 0)[0])
            raise InputError(
                f"kernel: entry {place} is {self.kernel[place]:.3g}; probabilities must be >= 0"
            )
        sums = self.kernel.sum(-1)
        if (np.abs(sums - 1) > 1e-8).any():
            place = tuple(int(i) for i in np.argwhere(np.abs(sums - 1) > 1e-8)[0])
            raise InputError(
                f"kernel: the row at {place} (state, action last) sums to {sums[place]:.6g}; "
                "every row must sum to 1"
            )

    def __len__(self) -> int:
        self._require_family()
        return self.reward.shape[0]

    def __getitem__(self, index) -> "MDP":
        self._require_family()
        return MDP(self.kernel[index], self.reward[index], self.gamma)

    def _require_family(self) -> None:
        if self.reward.ndim < 3:
            raise InputError(
                "mdp: this is a single MDP, not a family; stack tasks along a leading axis"
            )

    @property
    def states(self) -> int:
        """Number of states."""
        return self.reward.shape[-2]

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.reward.shape[-1]

    @property
    def reward_bound(self) -> Float[np.ndarray, "*batch"]:
        """R_max, the largest absolute reward."""
        return np.asarray(np.abs(self.reward).max((-1, -2)))

    @property
    def value_bound(self) -> Float[np.ndarray, "*batch"]:
        """V_max = R_max / (1 - gamma)."""
        return np.asarray(self.reward_bound / (1 - self.gamma))

    def average(self) -> "MDP":
        """Return the average MDP over the tasks, the last leading axis (Corollary 1)."""
        self._require_family()
        return MDP(self.kernel.mean(-4), self.reward.mean(-3), self.gamma)

    def under(self, policy: Policy) -> tuple[Float[np.ndarray, "... states states"], Value]:
        """Return P^pi and R^pi; leading axes of policy and MDP are broadcast."""
        lead = np.broadcast_shapes(policy.shape[:-1], self.reward.shape[:-2])
        chosen = np.broadcast_to(policy, (*lead, self.states))[..., None]
        reward = np.broadcast_to(self.reward, (*lead, *self.reward.shape[-2:]))
        kernel = np.broadcast_to(self.kernel, (*lead, *self.kernel.shape[-3:]))
        return (
            np.take_along_axis(kernel, chosen[..., None], -2)[..., 0, :],
            np.take_along_axis(reward, chosen, -1)[..., 0],
        )

    def value(self, policy: Policy) -> Value:
        """Return the exact V^pi."""
        kernel, reward = self.under(policy)
        return np.linalg.solve(np.eye(self.states) - self.gamma * kernel, reward[..., None])[..., 0]

    def backup(self, value: Value) -> Float[np.ndarray, "... states actions"]:
        """Return the action values R + gamma P V."""
        return self.reward + self.gamma * np.einsum("...xay,...y->...xa", self.kernel, value)

    def greedy(self, value: Value) -> Policy:
        """Return the greedy policy with respect to V; ties go to the first action."""
        return self.backup(value).argmax(-1)

    def operator(self, policy: Policy, value: Value) -> Value:
        """Return T^pi V."""
        kernel, reward = self.under(policy)
        return reward + self.gamma * np.einsum("...xy,...y->...x", kernel, value)

    def optimal(self) -> tuple[Policy, Value]:
        """Return pi* and V* by policy iteration."""
        policy = self.reward.argmax(-1)
        while True:
            value = self.value(policy)
            action_values = self.backup(value)
            kept = np.take_along_axis(action_values, policy[..., None], -1)[..., 0]
            # The tolerance prevents that two equal actions alternate because of rounding.
            better = action_values.max(-1) > kept + 1e-12 * (1 + np.abs(kept))
            if not better.any():
                return policy, value
            policy = np.where(better, action_values.argmax(-1), policy)

    def stationary(self, policy: Policy) -> Value:
        """Return rho^pi, for policies whose chain has one recurrent class."""
        kernel, _ = self.under(policy)
        # rho (I - P + 1 1') = 1' has the unique solution rho if and only if the class is unique.
        system = np.swapaxes(np.eye(self.states) - kernel + 1, -1, -2)
        if (np.linalg.cond(system) > 1e12).any():
            raise InputError(
                "stationary distribution: a policy's chain has several recurrent classes; "
                "it has no single stationary distribution"
            )
        return np.linalg.solve(system, np.ones((*kernel.shape[:-1], 1)))[..., 0]

    def suboptimality(self, policy: Policy) -> Value:
        """Return V* - V^pi."""
        return self.optimal()[1] - self.value(policy)


def every_policy(states: int, actions: int) -> Int[np.ndarray, "policies states"]:
    """Return all A^S deterministic policies as rows."""
    return np.array(list(product(range(actions), repeat=states)))


def norm(values: Value, weights: Value) -> Float[np.ndarray, "..."]:
    """Return ||f||_mu, the quadratic norm weighted by a distribution."""
    return np.asarray(np.sqrt(np.einsum("...x,...x->...", weights, values**2)))


def random_family(
    *,
    states: int,
    actions: int,
    tasks: int,
    spread: float,
    gamma: float,
    concentration: float = 1.0,
    runs: int | None = None,
    seed: int = 0,
) -> MDP:
    """Sample random tasks, each a mixture of a common MDP and, with weight `spread`, one of its own.

    Rows of kernels are Dirichlet and rewards uniform on [0, 1]. A spread of 0 gives equal tasks, 1 gives
    unrelated tasks; `runs` adds a leading axis of independent families. For one seed, the common and own
    parts are the same at every spread, so that comparisons across spreads are paired.

    >>> same = random_family(states=3, actions=2, tasks=4, spread=0.0, gamma=0.5)
    >>> float(np.ptp(same.reward, axis=0).max())
    0.0
    """
    if not 0 <= spread <= 1:
        raise InputError(
            f"spread: {spread} is outside [0, 1]; 0 makes the tasks equal, 1 unrelated"
        )
    rng = np.random.default_rng(seed)
    lead = () if runs is None else (runs,)
    rows = np.full(states, concentration)
    common_kernel = rng.dirichlet(rows, (*lead, 1, states, actions))
    common_reward = rng.uniform(size=(*lead, 1, states, actions))
    own_kernel = rng.dirichlet(rows, (*lead, tasks, states, actions))
    own_reward = rng.uniform(size=(*lead, tasks, states, actions))
    kernel = (1 - spread) * common_kernel + spread * own_kernel
    return MDP(kernel, (1 - spread) * common_reward + spread * own_reward, gamma)
