"""The portfolio studies at the paper's size, on an accelerator: tables there, pictures anywhere.

`python -m apportion.studies.paper_scale grid --prices FILE --out DIR` trains and writes DIR/grid.csv
(likewise fig2, fig5, recipe and prioritisation); `... draw --out DIR` turns the tables in DIR into
study folders. Nothing but the table is needed to draw; tables NAME.csv, NAME.x.csv and NAME.y.csv are
drawn together, as are all of the grid.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pandas as pd

from apportion.domains.portfolio.prices import Prices, load_prices
from apportion.studies.portfolio import (
    fig2,
    fig3,
    fig4,
    fig5,
    prioritisation,
    recipe,
    recipe_runs,
)
from apportion.studies.portfolio import grid as market_grid
from apportion.studies.portfolio import scale as market_scale
from apportion.studies.study import Study

Save = Callable[[pd.DataFrame], None]
DRAWN = {
    "grid": (fig3.from_table, fig4.from_table),
    "fig2": (fig2.from_table,),
    "fig5": (fig5.from_table,),
    "recipe": (recipe.from_table,),
    "prioritisation": (prioritisation.from_table,),
}
SEEDS = 10
"""Simulated markets of the prioritisation study."""


def train(
    part: str,
    prices: Prices | None,
    save: Save,
    tell: market_grid.Progress,
    only: list[int],
    rewards: Sequence[str] = recipe_runs.REWARDS,
) -> dict:
    """Compute one part's table, save it, and return the settings it was made with."""
    if part == "prioritisation" or prices is None:
        save(prioritisation.compute(prioritisation.SETTINGS, seeds=SEEDS, progress=tell))
        return {"seeds": SEEDS, **vars(prioritisation.SETTINGS)}
    if part == "grid":
        scale = market_scale.PAPER.within(prices)
        save(market_grid.compute(prices, scale, progress=tell, save=save, only=only))
        return market_scale.describe(prices, scale)
    if part == "fig2":
        settings, runs = fig2.PAPER
        save(fig2.compute(prices, settings, runs=runs, progress=tell))
        return {"data": prices.summary(), "runs": runs, **vars(settings)}
    if part == "fig5":
        settings, watched = fig5.PAPER
        save(fig5.compute(prices, settings, watched=watched, progress=tell))
        return {"data": prices.summary(), "watched": watched, **vars(settings)}
    scale = recipe.at_paper_scale(prices)
    recipe_runs.compute(prices, scale, rewards=rewards, progress=tell, save=save)
    return recipe_runs.describe(prices, scale, rewards=rewards)


def draw(folder: Path) -> list[Study]:
    """Every study whose table is in the folder, each saved in a folder of its own."""
    studies = []
    for part, makers in DRAWN.items():
        files = sorted(folder.glob(f"{part}*.csv"))
        # Tables may have been trained in several goes, each with the same rows that learn nothing.
        groups: dict[str, list[Path]] = {}
        for file in files:
            groups.setdefault(part if part == "grid" else file.name.split(".")[0], []).append(file)
        for name, group in groups.items():
            table = pd.concat([pd.read_csv(file) for file in group]).drop_duplicates(
                ignore_index=True
            )
            settings = together([json.loads(f.with_suffix(".json").read_text()) for f in group])
            for make in makers:
                study = make(table, settings)
                place = folder / (study.name if part == "grid" else name)
                study.save(place)
                (place / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
                studies.append(study)
    return studies


def together(parts: list[dict]) -> dict:
    """The settings of a table trained in several goes: seconds add up, rewards are joined."""
    whole = dict(parts[0])
    if "seconds" in whole:
        whole["seconds"] = round(sum(part["seconds"] for part in parts), 1)
    if "rewards" in whole:
        whole["rewards"] = [reward for part in parts for reward in part["rewards"]]
    return whole


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*DRAWN, "draw"])
    parser.add_argument("--prices", type=Path, help="price file (not for draw)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="name of the table; default: the part's")
    parser.add_argument(
        "--only", type=int, nargs="*", default=[], help="grid: numbers of tasks, 1 for single-task"
    )
    parser.add_argument(
        "--rewards",
        nargs="+",
        choices=recipe_runs.REWARDS,
        default=list(recipe_runs.REWARDS),
        help="recipe: one alone is written to NAME.REWARD.csv, to be drawn with the other",
    )
    given = parser.parse_args(arguments)
    if given.part == "draw":
        for study in draw(given.out):
            print(study.summary(), end="\n\n")
        return
    if given.prices is None and given.part != "prioritisation":
        parser.error("--prices is needed to train")
    prices = None if given.prices is None else load_prices(given.prices)
    given.out.mkdir(parents=True, exist_ok=True)
    alone = f".{given.rewards[0]}" if given.part == "recipe" and len(given.rewards) == 1 else ""
    table = given.out / f"{given.name or given.part}{alone}.csv"
    start = time.perf_counter()

    def tell(what: str, fraction: float) -> None:
        seconds = time.perf_counter() - start
        print(f"{seconds:7.1f} s {fraction:4.0%}  {what}", file=sys.stderr, flush=True)

    def save(frame: pd.DataFrame) -> None:
        frame.to_csv(table, index=False, float_format="%.7g")

    settings = train(given.part, prices, save, tell, given.only, given.rewards)
    device = jax.devices()[0]
    settings |= {"device": device.device_kind, "seconds": round(time.perf_counter() - start, 1)}
    table.with_suffix(".json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
    tell(f"wrote {table}", 1.0)


if __name__ == "__main__":
    main()
