"""A simulator in plain Python: support desks share agents."""

import gymnasium
import jax
import numpy as np

from apportion import PPO, Pooled, draw_tasks, split_entities, train
from apportion.bridges.gymnasium import from_gymnasium
from apportion.certify.statistics import compare
from apportion.composition import EqualShares
from apportion.problem import evaluate

RATES = np.random.default_rng(0).lognormal(1.0, 0.8, 40)  # tickets per hour at each desk


class Desks(gymnasium.Env):
    """Tickets arrive every hour; each agent answers 4 of the tickets at its desk."""

    def __init__(self, desks):
        self.rates = RATES[desks]
        self.capacity = 4.0 * len(desks)

    def show(self):
        return np.log1p(np.stack([self.waiting, self.arrived], axis=1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.arrived = self.np_random.poisson(self.rates)
        self.waiting, self.hour = 1.0 * self.arrived, 0
        return self.show(), {}

    def step(self, shares):
        answered = np.minimum(self.waiting, self.capacity * shares)
        self.arrived = self.np_random.poisson(self.rates)
        self.waiting, self.hour = self.waiting - answered + self.arrived, self.hour + 1
        return self.show(), answered.mean(), False, self.hour == 16, {}


problem = from_gymnasium(Desks, universe=40, horizon=16)
key = jax.random.key(0)
seen, unseen = split_entities(40, held_out=12)
policy, learner = Pooled(channels=2, hidden=16, key=key), PPO(rollouts=8, learning_rate=3e-3)
tasks = draw_tasks(seen, 5, 32)
result = train(problem, tasks, policy, learner, steps=100, key=key)

fresh = draw_tasks(unseen, 5, 20, seed=1)
learned = evaluate(problem, result.policy, fresh, key=key, episodes=4).mean_reward.mean(1)
equal = evaluate(problem, EqualShares(), fresh, key=key, episodes=4).mean_reward.mean(1)
gain = compare(np.asarray(learned / equal) - 1, np.zeros(len(fresh)))
print(f"tickets answered at desks never seen: gain {gain} over equal shares")
