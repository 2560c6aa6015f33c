"""`apportion demo`: the main job on embedded data, ending with the path of its report."""

import json as jsons
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from apportion.cli.options import Json, Out, Quiet
from apportion.domains.settings import check_seed
from apportion.errors import InputError
from apportion.runs.progress import open_progress
from apportion.studies.portfolio.demo_settings import DemoSettings

_MARK = "demo.json"
"""Says in a folder which demo made it: only such a folder is replaced."""
_BEGUN = ".demo.json"
"""The same, there from the first moment on."""
_OWN = {
    *("settings.toml", "environment.json", "policy.safetensors", "policy.json", "headline.json"),
    *("results.json", "report.html", "metrics.parquet", "probabilities.parquet", "checkpoints"),
    *("values.csv", "allocations.csv", "strategies.csv", "power.csv", "cars.csv", "schedules.csv"),
    *("next.csv", "certificate.json", "certificate.png"),
    _MARK,
}
"""What a demo writes, and what the next one may remove."""
_OTHERS = {
    "recipe": (
        "the practical policy beats lazy Equal CRP on held-out tasks (log points a year)",
        "Market",
        "test years",
    ),
    "fig6": (
        "MTL beats FedAvg in final test accuracy on unseen tasks",
        "Federation",
        "seeds",
    ),
}
"""Studies at full size whose claim is shown beside the demo, where the repository is at hand, and what
their n counts."""

demo = App(
    name="demo",
    help="""Run the main job on embedded data, in minutes on 2 cores.

Trains one policy on charging stations of two sites in 2019, and tests it beside every scheduler on
stations it never saw and on 2021. `apportion demo market` does the same for portfolios. Both end with the
path of report.html.

Example: `apportion demo --out runs/demo`""",
)


@dataclass(frozen=True)
class ChargingDemoSettings:
    """The charging demo: 2019 at two sites, tested on other stations and on 2021."""

    steps: int = 600
    """Updates of the policy."""
    days: int = 24
    """Days in an update."""
    seed: int = 0
    """Decides everything random."""


@demo.default
def charging(
    *,
    out: Out = Path("apportion-demo"),
    json: Json = False,
    quiet: Quiet = False,
    settings: Annotated[
        ChargingDemoSettings, Parameter(name="*", group="Settings")
    ] = ChargingDemoSettings(),  # noqa: B008
) -> Any:
    """Share a garage's power out among its cars: train on real sessions, test beside every scheduler.

    Trains one policy on stations of two sites in 2019, and tests it on stations it never saw and on
    2021. Ends with the path of report.html. `apportion demo market` is the same for portfolios.

    Example: `apportion demo`

    Parameters
    ----------
    out
        Folder to write to; an earlier demo in it is replaced.
    """
    from apportion.domains.charging.settings import ChargingSettings

    chosen = ChargingSettings(
        method="mtl",
        until="2019-12-31",
        steps=settings.steps,
        days=settings.days,
        chunk=max(1, min(50, settings.steps)),
        seed=settings.seed,
    )
    begun = _is_begun(out, chosen)
    if not begun:
        _remove_earlier_demo(out)

    from apportion.report import write_report
    from apportion.runs.files import remove, write_json
    from apportion.runs.folder import load_run
    from apportion.runs.registry import prepare
    from apportion.runs.runner import resume_run, start_run

    prepared = prepare("charging", chosen)
    with open_progress(quiet=quiet) as progress:
        write_json(out / _BEGUN, {"demo": "charging"})
        outcome = (
            resume_run(out, prepared, progress)
            if begun
            else start_run(out, "charging", chosen, prepared, progress)
        )
        assert outcome is not None, "a finished run is no begun one"
        write_json(out / _MARK, {"demo": "charging"})
        remove(out / _BEGUN)
        cards = [*outcome.headline["cards"], *_other_domains()]
        write_json(out / "headline.json", outcome.headline | {"cards": cards})
        progress.stage("writing the report")
        report = write_report(out)
    if json:
        return {"report": str(report), "results": load_run(out).results}
    return f"{outcome.summary}\n\nwrote {report}"


@demo.command
def market(
    *,
    out: Out = Path("apportion-demo"),
    json: Json = False,
    quiet: Quiet = False,
    settings: Annotated[DemoSettings, Parameter(name="*", group="Settings")] = DemoSettings(),  # noqa: B008
) -> Any:
    """Share money out among stocks: the same method where it gains little, and says so.

    Trains P-MTL, MTL and STL on 20 stocks and backtests them on later years, on the stocks they were
    trained on and on others. Ends with what held, and with the path of report.html.

    Example: `apportion demo market`

    Parameters
    ----------
    out
        Folder to write to; an earlier demo in it is replaced.
    """
    check_seed(settings.seed)
    _remove_earlier_demo(out)

    from apportion.report import write_report
    from apportion.runs.environment import environment
    from apportion.runs.files import only_writer, write_json
    from apportion.runs.folder import Run
    from apportion.runs.runner import finish
    from apportion.studies.portfolio.demo import run_demo

    with open_progress(quiet=quiet) as progress:
        found = run_demo(settings, progress)
        facts = environment(seed=settings.seed, data=found.data)
        with only_writer(out):
            run = Run.create(out, "demo", settings, facts)
            write_json(out / _MARK, {"demo": "market"})
            run.write_rows("metrics", settings.steps, found.metrics)
            run.write_rows("probabilities", settings.steps, found.probabilities)
            finish(run, found.outcome)
        progress.stage("writing the report")
        report = write_report(out)
    if json:
        return {"report": str(report), "claims": found.outcome.results["claims"]}
    return f"{found.outcome.summary}\n\nwrote {report}"


def _other_domains() -> list[dict[str, Any]]:
    """A card each for the market and the federation, from results that lie beside the source."""
    import apportion

    results = Path(apportion.__file__).parents[2] / "docs" / "results"
    cards = []
    for study, (claim, name, units) in _OTHERS.items():
        path = results / study / "verdict.json"
        verdicts = jsons.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        for verdict in verdicts:
            if verdict["claim"] == claim:
                cards.append(_study_card(study, f"{name}: {claim}", units, verdict))
    return cards


def _is_begun(folder: Path, settings: Any) -> bool:
    """Whether a demo of these settings was stopped here before it was done."""
    from apportion.runs.folder import load_run
    from apportion.runs.settings import to_toml

    if not (folder / _BEGUN).is_file() or not (folder / "settings.toml").is_file():
        return False
    same = (folder / "settings.toml").read_text(encoding="utf-8") == to_toml(settings, "charging")
    return same and not load_run(folder).finished


def _study_card(study: str, label: str, units: str, verdict: dict[str, Any]) -> dict[str, Any]:
    """A study's verdict as a card."""
    low, high = verdict["interval"]
    return {
        "label": label,
        "value": f"{verdict['estimate']:+.3g}",
        "interval": f"[{low:+.3g}, {high:+.3g}]",
        "note": f"from the study {study} at full size; {verdict['n']} {units}",
        "outcome": verdict["outcome"],
    }


def _remove_earlier_demo(folder: Path) -> None:
    """Make room in a folder that holds a demo and nothing else; refuse one that holds anything else."""
    from apportion.runs.files import only_writer, remove, require_free, require_writable
    from apportion.runs.folder import UNFINISHED, load_run

    if not (folder / "settings.toml").is_file():
        require_free(folder, unfinished=UNFINISHED)
        return
    marked = (folder / _MARK).is_file() or (folder / _BEGUN).is_file()
    if not marked and load_run(folder).job != "demo":
        raise InputError(f"{folder}: holds a run that is no demo; choose another folder with --out")
    require_writable(folder)
    found = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    others = sorted(entry.name for entry in found if entry.name not in _OWN)
    if others:
        raise InputError(
            f"{folder}: holds {others[0]}, which no demo wrote; move it, or choose another folder "
            "with --out"
        )
    begun = [folder / _BEGUN] if (folder / _BEGUN).is_file() else []
    with only_writer(folder):
        for entry in [*found, *begun]:
            remove(entry)
