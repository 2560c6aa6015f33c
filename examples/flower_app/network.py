"""The model of this federation: one hidden layer of ReLU units, in NumPy alone.

Client processes then start at once, and nothing here knows how the models are aggregated.
"""

import numpy as np

HIDDEN, CLASSES = 32, 10


def start(pixels, seed=0, classes=CLASSES):
    """Return the first parameters as a list of arrays."""
    rng = np.random.default_rng(seed)
    shapes = [(pixels, HIDDEN), (HIDDEN, classes)]
    bounds = [(6 / pixels) ** 0.5, (3 / HIDDEN) ** 0.5]
    first, second = (rng.uniform(-b, b, s) for b, s in zip(bounds, shapes, strict=True))
    arrays = [first, np.zeros(HIDDEN), second, np.zeros(classes)]
    return [array.astype(np.float32) for array in arrays]


def logits(arrays, images):
    """Return a row of scores for each image."""
    first, first_bias, second, second_bias = arrays
    return np.maximum(images @ first + first_bias, 0) @ second + second_bias


def trained(arrays, images, labels, rng, epochs=4, batch=20, rate=0.15):
    """Return the parameters after some epochs of SGD on the cross-entropy."""
    first, first_bias, second, second_bias = (array.copy() for array in arrays)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for chosen in np.array_split(order, max(1, len(labels) // batch)):
            x, y = images[chosen], labels[chosen]
            hidden = np.maximum(x @ first + first_bias, 0)
            scores = hidden @ second + second_bias
            error = np.exp(scores - scores.max(1, keepdims=True))
            error /= error.sum(1, keepdims=True)
            error[np.arange(len(y)), y] -= 1
            error *= rate / len(y)
            back = (error @ second.T) * (hidden > 0)
            second -= hidden.T @ error
            second_bias -= error.sum(0)
            first -= x.T @ back
            first_bias -= back.sum(0)
    return [first, first_bias, second, second_bias]
