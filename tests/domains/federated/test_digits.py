import numpy as np
import pytest

from apportion.domains.federated.digits import Digits, load_mnist
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
