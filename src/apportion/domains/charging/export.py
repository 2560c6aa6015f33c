"""A controller for a machine that has Python and NumPy alone.

Nothing is written a second time: the definitions that a controller needs are copied as they stand into one
file, each after those it needs, and what they call of JAX is NumPy's there (`exported`).
"""

import ast
import inspect
import io
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np

from apportion.domains.charging.controller import Controller
from apportion.domains.charging.site import Site
from apportion.errors import InputError
from apportion.runs.files import write_atomic, write_json

_EXPORTED = "apportion.domains.charging.exported"
_OURS = ("jax", "jnp", "eqx")
"""What `exported` has of its own."""
_UNCALLED = ("pd", "Days", "load_run", "load_about")
"""What no exported controller calls."""


def export_controller(controller: Controller, folder: Path | str) -> Path:
    """Write `decide.py`, `decide.npz`, `decide.json` and `site.toml`, and return the first.

    Copied together, they answer as the controller does: `decide(now, state)` in Python, or
    `python decide.py now.json --state state.json`. Site, baseline, trust and earlier days are those of the
    controller when it was exported.

    Raises
    ------
    InputError
        Where the policy is of a class that is not apportion's, or no TOML file describes the site.
    """
    definitions, arrays = _Definitions(), {}

    def described(value: Any, path: str) -> Any:
        if eqx.is_array(value):
            arrays[path] = np.asarray(value)
            return {"array": path}
        if not isinstance(value, eqx.Module):
            return value
        kind = type(value)
        if kind.__module__.startswith("apportion"):
            definitions.add(kind.__module__, kind.__name__)
        elif kind is not eqx.nn.Linear:
            raise InputError(f"{kind.__name__} is not part of apportion, and cannot be exported")
        parts = {
            f.name: described(getattr(value, f.name), f"{path}/{f.name}") for f in fields(kind)
        }
        return {"class": kind.__name__, "fields": parts}

    facts = {
        "about": controller.about,
        "options": {"baseline": controller.baseline, "trust": controller.trust},
        "policy": described(controller.policy, "policy"),
    }
    if controller.past is not None:
        past = controller.past
        arrays |= {f"past/{f.name}": getattr(past, f.name) for f in fields(past)[1:]}
    for name in ("decide", "main"):
        definitions.add(_EXPORTED, name)
    site = controller.site.to_toml()
    # What could not be read there is refused here.
    Site.of(tomllib.loads(site))
    folder, file = Path(folder), io.BytesIO()
    np.savez(file, **arrays)
    write_atomic(folder / "decide.npz", file.getvalue())
    write_json(folder / "decide.json", facts)
    write_atomic(folder / "site.toml", site.encode())
    write_atomic(folder / "decide.py", definitions.text().encode())
    return folder / "decide.py"


class _Definitions:
    """Definitions of apportion's modules, each after those it needs."""

    def __init__(self):
        self._imports: set[str] = set()
        self._texts: list[str] = []
        self._modules: dict[str, str] = {}

    def text(self) -> str:
        """All in one file."""
        head = (
            '"""Made by export_controller of apportion."""\n\nfrom __future__ import annotations\n'
        )
        last = 'if __name__ == "__main__":\n    main()\n'
        return "\n\n".join([head, "\n".join(sorted(self._imports)), *self._texts, last])

    def add(self, module: str, name: str) -> None:
        """Add what a name is in a module, unless it is there."""
        module = _EXPORTED if name in _OURS else module
        lines, defined = _definitions(module)
        if name not in defined or name in _UNCALLED:
            return
        node = defined[name]
        if isinstance(node, ast.Import | ast.ImportFrom):
            [alias] = [a for a in node.names if name in (a.name, a.asname)]
            origin = node.module if isinstance(node, ast.ImportFrom) else None
            if origin is not None and origin.startswith("apportion"):
                self.add(origin, name)
            else:
                start = "import" if origin is None else f"from {origin} import"
                self._imports.add(f"{start} {ast.unparse(alias)}")
            return
        known = self._modules.get(name)
        assert known in (None, module), f"{name} is another thing in {known} than in {module}"
        if known is None:
            self._modules[name] = module
            for needed in _names(node):
                self.add(module, needed)
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            self._texts.append("\n".join(lines[first - 1 : node.end_lineno]))


@cache
def _definitions(module: str) -> tuple[list[str], dict[str, ast.stmt]]:
    """A module's lines, and the statements that bind its names."""
    source, defined = inspect.getsource(import_module(module)), {}
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name for alias in node.names]
            case ast.Assign() | ast.AnnAssign():
                stored = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
                names = [n.id for n in stored if isinstance(n.ctx, ast.Store)]
            case _:
                names = []
        defined |= dict.fromkeys(names, node)
    return source.splitlines(), defined


def _names(node: ast.AST) -> Iterator[str]:
    """The names that a definition reads; annotations are not evaluated."""
    if isinstance(node, ast.Name):
        yield node.id
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _names(child)
