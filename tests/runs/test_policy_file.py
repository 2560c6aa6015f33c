"""A saved policy comes back to the bit; a file that is not one is refused in one sentence."""

import hashlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from apportion.composition import Ensemble, EqualShares, PartialTrading, ShrunkToEqual
from apportion.domains.federated.policy import FOLDER
from apportion.errors import InputError
from apportion.policy import Policy, Pooled, Recurrent
from apportion.runs import policy_file
from apportion.runs.files import SUMS, pack, read_arrays, write_arrays, write_atomic, write_json
from apportion.runs.plugins import DOMAINS
from apportion.runs.policy_file import _ARRAYS as ARRAYS
from apportion.runs.policy_file import _DESCRIPTION as DESCRIPTION
from apportion.runs.policy_file import load_about, load_policy, save_policy
from apportion.simplex import Head
from plugins import installed

KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)


def _ensemble() -> Ensemble:
    return Ensemble(eqx.filter_vmap(lambda key: Recurrent(1, 4, key=key))(KEYS))


class Own(Policy):
    """A user's policy, with every kind of argument: size, array, text, policy, list, optional."""

    slope: Float[Array, " channels"]
    inner: Policy
    temperature: Float[Array, ""]
    channels: int = eqx.field(static=True)
    name: str = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)
    others: list[Policy]
    note: str | None = eqx.field(static=True, default=None)

    def __init__(self, channels, inner, temperature=1.0, *, name, limits, others, note=None, key):
        self.slope = jax.random.normal(key, (channels,))
        self.inner, self.others = inner, others
        self.temperature = jnp.asarray(temperature, float)
        self.channels, self.name, self.limits, self.note = channels, name, limits, note

    def encode(self, history, mask):
        return history[:, -1] @ self.slope

    def allocate(self, features, held, mask, bounds=None):
        return Head()(features / self.temperature, mask)


def _own() -> Own:
    inner = PartialTrading(EqualShares(), 0.25)
    others = [ShrunkToEqual(EqualShares(), 0.75)]
    return Own(2, inner, 0.5, name="own", limits=(0.1, 0.9), others=others, key=KEY)


# Functions, because making a policy compiles many small programs.
POLICIES = {
    "Recurrent": lambda: Recurrent(3, 5, head=Head(cap=0.5), key=KEY),
    "Pooled": lambda: Pooled(2, 4, reach=3.0, head=Head(floor=0.01, cash=True), key=KEY),
    "PartialTrading": lambda: PartialTrading(ShrunkToEqual(_ensemble(), 0.5), 0.1),
    "stacked over runs": lambda: _ensemble().members,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_policy_comes_back_the_same_to_the_bit(name, tmp_path):
    policy = POLICIES[name]()
    save_policy(policy, tmp_path, {"entities": ["A", "B"]})
    for place in (tmp_path, tmp_path / ARRAYS, tmp_path / DESCRIPTION):
        assert eqx.tree_equal(load_policy(place), policy)
        assert load_about(place) == {"entities": ["A", "B"]}


def test_a_users_own_policy_comes_back_only_where_its_class_is_given(tmp_path, monkeypatch):
    policy = PartialTrading(_own(), 0.5)
    save_policy(policy, tmp_path, {"x": 1})
    for kind in (Own, (Own, EqualShares)):
        assert eqx.tree_equal(load_policy(tmp_path, kind=kind), policy)
    for kind in ((), Recurrent):
        with pytest.raises(InputError, match=rf"class {__name__}\.Own, .*kind=Own\)"):
            load_policy(tmp_path, kind=kind)
    # A class that has moved to another module is found by its name.
    with monkeypatch.context() as patch:
        patch.setattr(Own, "__module__", "where.it.was")
        save_policy(policy, tmp_path / "moved")
    assert eqx.tree_equal(load_policy(tmp_path / "moved", kind=Own), policy)


OUTSIDE = """
from apportion.composition import EqualShares
class Shares(EqualShares):
    pass
class Other:
    pass
"""


def test_a_class_of_an_unregistered_package_is_refused_by_name_and_not_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "outside_package.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    _forge(tmp_path, {"class": "outside_package.Shares", "arguments": {}}, {})
    with pytest.raises(
        InputError, match=r"outside_package\.Shares, which is not part of apportion"
    ):
        load_policy(tmp_path)
    assert "outside_package" not in sys.modules


def test_a_class_of_a_registered_plugin_is_loaded_if_it_is_a_policy(tmp_path, monkeypatch):
    (tmp_path / "outside_plugin.py").write_text(OUTSIDE)
    with installed(tmp_path, {DOMAINS: {"outside": "outside_plugin:DOMAIN"}}):
        _forge(tmp_path, {"class": "outside_plugin.Shares", "arguments": {}}, {})
        assert type(load_policy(tmp_path)).__name__ == "Shares"
        _forge(tmp_path, {"class": "outside_plugin.Other", "arguments": {}}, {})
        with pytest.raises(InputError, match=r"outside_plugin has no policy outside_plugin\.Other"):
            load_policy(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_plugin")


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "apportion.runs.files.X",
        "apportion.runs.files.write_atomic",
        "apportion_charging.os.system",
        "apportion.__main__.main",
    ],
)
def test_a_forged_path_calls_nothing(path, tmp_path, monkeypatch):
    called = []
    _forge(tmp_path, {"class": path, "arguments": {"command": "true"}}, {})
    monkeypatch.setattr("os.system", called.append)
    monkeypatch.setattr("apportion.runs.files.write_atomic", lambda *_: called.append(path))
    with pytest.raises(InputError, match="which is not part of|does not describe a valid policy"):
        load_policy(tmp_path)
    assert not called


class Forgetful(Own):
    def __init__(self, channels, width, *, key):
        super().__init__(channels, EqualShares(), name="", limits=(), others=[], key=key)


class Doubling(EqualShares):
    size: int = eqx.field(static=True)

    def __init__(self, size):
        self.size = 2 * size


class Shaped(EqualShares):
    size: int = eqx.field(static=True)
    values: Array

    def __init__(self, size):
        self.size, self.values = size, jnp.zeros(size)


class Holding(EqualShares):
    value: object = eqx.field(static=True)


UNSAVABLE = {
    "Forgetful": (
        lambda: Forgetful(2, 3, key=KEY),
        "Forgetful: does not store the constructor argument 'width'",
    ),
    "Doubling": (lambda: Doubling(2), "Doubling: differs when it is rebuilt from its fields"),
    "Shaped": (
        lambda: eqx.tree_at(lambda p: p.values, Shaped(2), jnp.zeros(3)),
        r"array values is float32\[3\], expected float32\[2\]",
    ),
    "Holding0": (
        lambda: Holding(len),
        "value is of type builtin_function_or_method, which cannot be saved",
    ),
    "Recurrent": (
        lambda: eqx.tree_at(
            lambda p: p.recurrence.bias, Recurrent(1, 2, key=KEY), jnp.array([0, jnp.inf])
        ),
        "array recurrence/bias has values that are not finite",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_a_policy_that_could_not_be_loaded_again_is_not_saved(name, tmp_path):
    make, message = UNSAVABLE[name]
    policy = make()
    with pytest.raises(InputError, match=message):
        save_policy(policy, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_shipped_policy_matches_its_checksums():
    lines = (FOLDER / SUMS).read_text().splitlines()
    found = {name: hashlib.sha256((FOLDER / name).read_bytes()) for name in (DESCRIPTION, ARRAYS)}
    assert lines == [f"{digest.hexdigest()}  {name}" for name, digest in found.items()]


def test_arrays_of_something_else_or_without_their_description_are_refused(tmp_path):
    save_policy(EqualShares(), tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    with pytest.raises(InputError, match=r"policy\.json: no such file; it belongs next to"):
        load_about(tmp_path)
    write_arrays(tmp_path / ARRAYS, {"x": np.zeros(3)}, {"format": "something else"})
    with pytest.raises(InputError, match="not a policy"):
        load_policy(tmp_path)


def _forge(folder, described, arrays) -> None:
    """A policy's files without checksums, whatever they say."""
    content = {"format": policy_file._FORMAT, "policy": described, "about": {}}
    header = {"format": policy_file._FORMAT, "description": policy_file._digest(content)}
    write_json(folder / DESCRIPTION, content)
    write_atomic(folder / ARRAYS, pack(arrays, header))
    (folder / SUMS).unlink(missing_ok=True)


def _call(cls: str, **arguments) -> dict:
    return {"class": f"apportion.{cls}", "arguments": arguments}


def _recurrent(**changes) -> dict:
    head = _call("simplex.Head", floor=0.0, cap=1.0, cash=False)
    return _call("policy.Recurrent", **({"channels": 3, "hidden": 5, "head": head} | changes))


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (_call("policy.Policy"), "abstract"),
        (_call("nowhere.Recurrent"), "nowhere"),
        (_call("simplex.Head"), "Head is not a policy"),
        (_recurrent(channels=-3), "channels is -3; it must be a whole number"),
        (_recurrent(hidden=2**40), "hidden is 1099511627776"),
        (_recurrent(hidden={"array": "nowhere"}), "nowhere"),
        (_recurrent(hidden={"eval": "5"}), "is not a description"),
        (_recurrent(surprise=1), "surprise"),
        (_recurrent(head=_call("simplex.Head", cap=7.0)), "floor 0.0 and cap 7.0"),
        (_recurrent(channels=4), r"array recurrence/from_input is float32\[3, 5\], expected"),
        (
            _call("policy.Pooled", channels=1, hidden=5, reach=5.0, head=None),
            "array .* is missing|not expected",
        ),
        (None, "NoneType is not a policy"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_description_that_does_not_fit_its_arrays_makes_no_policy(described, reason, tmp_path):
    arrays, _ = read_arrays(save_policy(Recurrent(3, 5, key=KEY), tmp_path))
    _forge(tmp_path, described, arrays)
    with pytest.raises(InputError, match=rf"does not describe a valid policy \(.*({reason})"):
        load_policy(tmp_path)
