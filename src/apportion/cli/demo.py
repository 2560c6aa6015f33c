"""`apportion demo`: the main job on embedded data, ending with the path of its report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from apportion.cli.parsing import parse
from apportion.errors import InputError
from apportion.runs.progress import open_progress
from apportion.studies.portfolio.demo_settings import DemoSettings


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train P-MTL, MTL and STL on 20 embedded stocks, backtest them, and say what held.

    They are tested on later years, on their own stocks and on stocks never trained on. Takes
    minutes on 2 cores and ends with the path of report.html.

    Example: apportion demo
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("apportion-demo")
    """Folder to write to; an earlier demo in it is replaced."""
    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """Show no progress."""
    settings: Annotated[DemoSettings, tyro.conf.arg(name="")] = field(default_factory=DemoSettings)


def demo(arguments: Sequence[str]) -> Any:
    """Run `apportion demo`."""
    given = parse(Demo, arguments, "demo")
    _make_room(given.out)

    import jax

    from apportion.report import write_report
    from apportion.runs.environment import environment
    from apportion.runs.folder import Run
    from apportion.runs.runner import finish
    from apportion.studies.portfolio.demo import run_demo

    with open_progress(quiet=given.quiet) as progress:
        found = run_demo(given.settings, progress)
        device = jax.devices()[0]
        facts = environment(
            seed=given.settings.seed,
            device=f"{device.platform}: {device.device_kind}",
            data=found.data,
        )
        run = Run.create(given.out, "demo", given.settings, facts)
        run.write_rows("metrics", given.settings.steps, found.metrics)
        run.write_rows("probabilities", given.settings.steps, found.probabilities)
        finish(run, found.outcome)
        progress.stage("writing the report")
        report = write_report(given.out)
    if given.json:
        return {"report": str(report), "claims": found.outcome.results["claims"]}
    return f"{found.outcome.summary}\n\nwrote {report}"


def _make_room(folder: Path) -> None:
    """Remove an earlier demo; anything else that is a run is left alone."""
    from apportion.runs.folder import load_run

    if not (folder / "settings.toml").is_file():
        return
    if load_run(folder).job != "demo":
        raise InputError(f"{folder}: holds a run that is no demo; choose another folder with --out")
    for file in ("settings.toml", "results.json", "report.html"):
        (folder / file).unlink(missing_ok=True)
    for part in folder.glob("*.parquet/step-*.parquet"):
        part.unlink()
