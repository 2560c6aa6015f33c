"""Ten noisy patterns in place of digits, so that tests need no data and train in no time."""

import numpy as np

from apportion.domains.federated.data import Digits


def made_up_digits(count=1200, side=6, server=300):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 10
    patterns = rng.random((10, side, side))
    images = np.clip(patterns[labels] + 0.3 * rng.normal(size=(count, side, side)), 0, 1)
    kept = np.arange(count) >= count - server
    return Digits(images.astype(np.float32), labels.astype(np.int32), kept)
