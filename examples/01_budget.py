"""Train one policy on some advertising campaigns, and use it on campaigns it has never seen."""

import jax
import numpy as np

from apportion import Direct, Recurrent, draw_tasks, split_entities, train
from apportion.certify.statistics import compare
from apportion.composition import EqualShares
from apportion.domains.budget.problem import Budget
from apportion.problem import evaluate

key = jax.random.key(0)
problem = Budget.simulate(universe=60, periods=80, seed=0)
seen, unseen = split_entities(60, held_out=20)

# A task is five campaigns that share a budget; 64 tasks are sampled from the 40 training campaigns.
tasks = draw_tasks(seen, 5, 64)
policy = Recurrent(channels=2, hidden=8, key=key)
result = train(problem, tasks, policy, Direct(16, 1e-2), steps=400, key=key)
print(result.summary())

for name, entities in (("campaigns trained on", seen), ("campaigns never seen", unseen)):
    fresh = draw_tasks(entities, 5, 20, seed=1)
    learned = evaluate(problem, result.policy, fresh, key=key).mean_reward[:, 0]
    equal = evaluate(problem, EqualShares(), fresh, key=key).mean_reward[:, 0]
    gain = compare(np.asarray(learned / equal), np.ones(len(fresh)))
    print(f"sales over equal shares, {name}: {gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]")
