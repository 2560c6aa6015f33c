"""Why shares matter in a federation: eight clients see the digits 0-5, two see 6-9.

The share of the two clients decides if the model learns their digits. FedAvg weights by samples; a fixed
larger share must know the two clients; a learned policy has to find them.
"""

import jax

from apportion.domains.federated import (
    UNIFORM,
    Fixed,
    paper_world,
    read_digits,
    reduced_size,
    run_episodes,
)

settings = reduced_size(model="perceptron", width=16, rounds=6, samples=60, unseen=4)
federation, [(_, unseen)] = paper_world(settings, read_digits(settings), seeds=[0])

# The same keys give every aggregator the same first models and the same batches.
keys = jax.random.split(jax.random.key(0), len(unseen))
for name, aggregator in (
    ("FedAvg", UNIFORM),
    ("45 % to the two", Fixed.minority(0.45)),
    ("80 % to the two", Fixed.minority(0.80)),
):
    record = run_episodes(federation, aggregator, unseen, keys)
    tested = record.tested.mean(0)
    print(f"{name:18} test accuracy by round: {' '.join(f'{x:.2f}' for x in tested.tolist())}")
