"""The tutorials that are notebooks: run them here, and show them on the site as a hook of mkdocs.

    python docs/notebooks.py             runs all notebooks and saves their outputs
    python docs/notebooks.py FILE ...    runs these

The notebook is the only source of its page. Outputs are text and small PNGs, so that a code host shows
them too. A cell's metadata may have `alt`, the description of its picture.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tutorials"
DPI = 80
LARGEST_PICTURE = 60_000
"""Bytes of a PNG."""

Notebook = dict[str, Any]


def execute(notebook: Notebook) -> Notebook:
    """Return the notebook with the outputs of a fresh run of all cells in an empty working directory."""
    import matplotlib as mpl

    mpl.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                outputs = _run_cell("".join(cell["source"]), names, count)
                cell = cell | {"execution_count": count, "outputs": outputs}
            cells.append(cell)
    return notebook | {"cells": cells}


def _run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell and return what Jupyter would show: printed text, the last value and the figures."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    tree = ast.parse(source, f"cell {count}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    if source.rstrip().endswith(";"):
        value = None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    if isinstance(value, Figure):
        figures = [value]
    elif value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        result = {"output_type": "execute_result", "execution_count": count}
        outputs.append(result | {"data": data, "metadata": {}})
    for figure in figures:
        shown = {"image/png": _png(figure), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": shown, "metadata": {}})
    pyplot.close("all")
    return outputs


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return base64.b64encode(file.getvalue()).decode()


def outline(notebook: Notebook) -> list[tuple[str, list[str], list[str]]]:
    """Return the kinds of the outputs and their words; numbers, which differ by machine, become #."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text") or data["text/plain"])
            words = re.sub(r"[-+−]?\d[\d.,e+-]*", "#", text).split()
            found.append((output["output_type"], sorted(data), words))
    return found


def faults(notebook: Notebook) -> list[str]:
    """Return what a committed notebook lacks: outputs in order, pictures that are small and described."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = []
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("not run from top to bottom")
    shown = [
        (cell, output["data"]["image/png"])
        for cell in code
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    for cell, picture in shown:
        if len(base64.b64decode(picture)) > LARGEST_PICTURE or not cell["metadata"].get("alt"):
            found.append(f"{cell['id']}: the picture is too large or has no description")
    return found if shown else [*found, "no picture"]


def words(notebook: Notebook) -> int:
    """Count the words of the text."""
    text = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return sum(len("".join(lines).split()) for lines in text)


def as_markdown(notebook: Notebook) -> str:
    """Return the page of a notebook: its text, its code, and the committed outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                alt = cell["metadata"].get("alt", "")
                parts.append(f"![{alt}](data:image/png;base64,{data['image/png']})")
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files, config, **_):
    """Replace every notebook by its page."""
    from mkdocs.structure.files import File

    for file in [one for one in files if one.src_uri.endswith(".ipynb")]:
        page = as_markdown(json.loads(file.content_string))
        files.remove(file)
        files.append(File.generated(config, f"{file.src_uri[:-6]}.md", content=page))
    return files


def on_page_markdown(markdown, **_):
    """Let links to a notebook lead to its page."""
    return re.sub(r"(\]\([^)\s:]+)\.ipynb\b", r"\1.md", markdown)


def save(notebook: Notebook, path: Path) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for path in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        save(execute(json.loads(path.read_text())), path.absolute())
        print(f"ran {path}")


if __name__ == "__main__":
    main()
