"""An environment for workers in processes of their own, which import this file and no more."""

import gymnasium
import numpy as np


class Lottery(gymnasium.Env):
    """Random prizes, a random end, limits, and a memory of everything: what is hard to repeat."""

    ends = 0.2

    def __init__(self, entities):
        self.entities = np.array(entities, np.float32)
        self.over = True

    def show(self):
        limits = self.np_random.uniform(0.3, 1.0, len(self.entities))
        return {"history": np.stack([self.entities / 10, self.prize], 1), "limits": limits}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.prize, self.pot, self.over = self.np_random.random(len(self.entities)), 0.0, False
        return self.show(), {}

    def step(self, shares):
        assert not self.over, "stepped after its end"
        self.pot = 0.5 * self.pot + float(shares @ self.prize)
        self.prize = self.np_random.random(len(self.entities))
        self.over = bool(self.np_random.random() < self.ends)
        return self.show(), self.pot, self.over, False, {}
