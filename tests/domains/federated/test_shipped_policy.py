"""The shipped policy discounts sample counts: small clients keep their say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.federated.aggregators import Learned, run_episodes
from apportion.domains.federated.data import embedded_digits, halves, mixture
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import shares_by_samples


@pytest.mark.slow
def test_small_clients_keep_between_half_and_twice_of_fedavgs_share():
    settings = GradientSettings(rounds=10, evaluation=200, test=200)
    digits = embedded_digits().pooled(2)
    wanted = [("sizes", 10, seed) for seed in range(3)]
    dealt = mixture(digits, wanted, halves(digits)[1], samples=settings.samples)
    sets = {"drawn": (200, 200), "gate": True}
    federation = Federation(dealt.digits, dealt.partition, settings, **sets)

    smallest = np.argsort(np.asarray(federation.counts).reshape(3, 10), 1)[:, None, :4]

    aggregator = Learned(shipped_policy(), gated=False)
    record = run_episodes(
        federation, aggregator, dealt.tasks, jax.random.split(jax.random.key(1), 3)
    )
    # Mean share of the four smallest clients over the later rounds, by federation.
    now = np.take_along_axis(np.asarray(record.shares)[:, 5:], smallest, 2).sum(2).mean(1)
    counts = np.asarray(federation.counts, np.float32).reshape(3, 10)
    plain = jax.vmap(shares_by_samples, (0, None))(counts, jnp.ones(10, bool))
    plain = np.take_along_axis(np.asarray(plain), smallest[:, 0], 1).sum(1)
    assert ((now > plain / 2) & (now < plain * 2)).all()
