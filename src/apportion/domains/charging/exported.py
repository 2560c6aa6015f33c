"""What `export_controller` puts around a controller where there is NumPy and nothing else.

Few of JAX's and Equinox's functions are called to decide. Here are these in NumPy, so that the source of
garage, schedulers, policy and controller runs as it stands; and the two ways to ask.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from apportion.domains.charging.controller import Controller, read_now
from apportion.domains.charging.forecasts import EarlierDays
from apportion.domains.charging.site import Site
from apportion.errors import InputError


class Module:
    """A frozen record."""

    def __init_subclass__(cls):
        dataclass(frozen=True, eq=False)(cls)


def _tree_map(change: Callable[..., Any], tree: Any, *others: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _tree_map(change, x, *(o[name] for o in others)) for name, x in tree.items()}
    if isinstance(tree, Module):
        return _record(type(tree), _tree_map(change, vars(tree), *map(vars, others)))
    return change(tree, *others)


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    made = object.__new__(kind)
    vars(made).update(values)
    return made


def _quietly(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        # What is divided by 0 is not chosen.
        with np.errstate(all="ignore"):
            return run(*given)

    return call


def _scan(step: Callable[..., Any], carried: Any, rows: Any, **options: Any) -> Any:
    done = []
    for row in zip(*rows, strict=True):
        carried, one = step(carried, row)
        done.append(one)
    return carried, np.stack(done)


def _while_loop(goes_on: Callable[..., Any], step: Callable[..., Any], carried: Any) -> Any:
    while goes_on(carried):
        carried = step(carried)
    return carried


def _softmax(scores: np.ndarray, where: np.ndarray) -> np.ndarray:
    powers = np.where(where, np.exp(scores - np.max(scores)), 0)
    return powers / powers.sum()


def _mapped(run: Callable[..., Any]) -> Callable[..., Any]:
    """The results for each member of an ensemble, one after the other."""

    def call(*given: Any) -> np.ndarray:
        sizes: list[int] = []
        _tree_map(
            lambda x: sizes.append(np.size(x, 0)) if isinstance(x, np.ndarray) else x, given[0]
        )

        def member(place: int) -> list[Any]:
            own = lambda x: x[place] if isinstance(x, np.ndarray) else x  # noqa: E731
            return [_tree_map(own, one) for one in given]

        return np.stack([run(*member(place)) for place in range(sizes[0])])

    return call


def _same(*given: Any) -> Any:
    return given[0]


def _field(*, static: bool = False, **options: Any) -> Any:
    return field(**options)


jnp: Any = np
jax: Any = SimpleNamespace(
    tree=SimpleNamespace(map=_tree_map),
    nn=SimpleNamespace(relu=lambda x: np.maximum(x, 0), softmax=_softmax),
    default_backend=lambda: "cpu",
    custom_jvp=_same,
    lax=SimpleNamespace(
        scan=_scan,
        while_loop=_while_loop,
        stop_gradient=_same,
        optimization_barrier=_same,
        platform_dependent=lambda *given, cpu, default: cpu(*given),
    ),
)
eqx: Any = SimpleNamespace(Module=Module, field=_field, filter_jit=_quietly, filter_vmap=_mapped)


def controller(state: Path | None = None) -> Controller:
    """The controller that was exported; with a JSON file that keeps what is known of the cars."""
    folder = Path(__file__).parent
    facts = json.loads((folder / "decide.json").read_text(encoding="utf-8"))
    arrays = np.load(folder / "decide.npz")

    def built(described: Any) -> Any:
        if not isinstance(described, dict):
            return described
        if "array" in described:
            return arrays[described["array"]]
        kind = globals().get(described["class"], Module)
        return _record(kind, {name: built(x) for name, x in described["fields"].items()})

    policy, site = built(facts["policy"]), Site.read(folder / "site.toml")
    made = Controller(policy, facts["about"], site, **facts["options"], state=state)
    if made.past is not None:
        kept = [arrays[f"past/{f.name}"] for f in fields(EarlierDays)[1:]]
        made.past = EarlierDays(made.predictor, *kept)
    return made


def decide(now: Any, state: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
    """The set-points as `apportion allocate --json` tells them, and the state to give the next time."""
    asked = controller()
    if state is not None:
        asked.restore(state)
    return asked.allocate(now).to_json(), asked.state()


def main() -> None:
    """`python decide.py now.json --state state.json`."""
    words = argparse.ArgumentParser(description="The amperes to tell each station now, as JSON.")
    words.add_argument("now", type=Path, help="what is seen now, as of apportion allocate --now")
    words.add_argument("--state", type=Path, help="keeps what is known of the cars between calls")
    given = words.parse_args()
    try:
        print(json.dumps(controller(given.state).allocate(read_now(given.now)).to_json(), indent=1))
    except InputError as error:
        words.error(str(error))
