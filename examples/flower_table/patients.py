"""Tumours with 30 measures, malignant or benign, and their logistic regression in NumPy."""

from functools import cache

import numpy as np
from sklearn.datasets import load_breast_cancer

HOSPITALS, LATE = 7, 2
"""Number of hospitals, and of those that join late; only these have malignant tumours."""
TESTED, SAMPLES = 150, 80
"""Patients in the test, and samples of the server."""


@cache
def patients():
    """Standardised measures and classes: 0 is malignant, 1 is benign."""
    table, classes = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    scaled = (table - table.mean(0)) / table.std(0)
    return scaled[order].astype(np.float32), classes[order]


def server_patients():
    """Return the patients in the test and the server's samples."""
    measures, classes = patients()
    rows = slice(0, TESTED), slice(TESTED, TESTED + SAMPLES)
    return [(measures[own], classes[own]) for own in rows]


def hospital(number):
    """Return a hospital's patients, who are all of one class."""
    measures, classes = (array[TESTED + SAMPLES :] for array in patients())
    late = number >= HOSPITALS - LATE
    of_class = np.flatnonzero(classes == (0 if late else 1))
    parts = np.array_split(of_class, LATE if late else HOSPITALS - LATE)
    own = parts[number - (HOSPITALS - LATE) if late else number]
    return measures[own], classes[own]


def start():
    """First parameters: a column of weights for each class, and a bias."""
    return [np.zeros((30, 2), np.float32), np.zeros(2, np.float32)]


def scores(arrays, measures):
    """A row of two scores for each patient."""
    weights, bias = arrays
    return measures @ weights + bias


def trained(arrays, measures, classes, epochs=10, rate=0.5):
    """The parameters after some steps down the cross-entropy."""
    weights, bias = (array.copy() for array in arrays)
    for _ in range(epochs):
        error = np.exp(measures @ weights + bias)
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(classes)), classes] -= 1
        error *= rate / len(classes)
        weights -= measures.T @ error
        bias -= error.sum(0)
    return [weights, bias]
