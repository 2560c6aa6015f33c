"""`apportion demo`: the main job on embedded data, ending with the path of its report."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import Json, Out, Quiet
from apportion.errors import InputError
from apportion.runs.progress import open_progress
from apportion.studies.portfolio.demo_settings import DemoSettings

_DEFAULTS = DemoSettings()


def demo(
    *,
    out: Out = Path("apportion-demo"),
    json: Json = False,
    quiet: Quiet = False,
    settings: Annotated[DemoSettings, Parameter(name="*", group="Settings")] = _DEFAULTS,
) -> Any:
    """Run the main job on embedded data, in minutes on 2 cores.

    Trains P-MTL, MTL and STL on 20 stocks and backtests them on later years, on the stocks they were
    trained on and on others. Ends with what held, and with the path of report.html.

    Example: `apportion demo`

    Parameters
    ----------
    out
        Folder to write to; an earlier demo in it is replaced.
    """
    _remove_earlier_demo(out)

    import jax

    from apportion.report import write_report
    from apportion.runs.environment import environment
    from apportion.runs.folder import Run
    from apportion.runs.runner import finish
    from apportion.studies.portfolio.demo import run_demo

    with open_progress(quiet=quiet) as progress:
        found = run_demo(settings, progress)
        device = jax.devices()[0]
        facts = environment(
            seed=settings.seed,
            device=f"{device.platform}: {device.device_kind}",
            data=found.data,
        )
        run = Run.create(out, "demo", settings, facts)
        run.write_rows("metrics", settings.steps, found.metrics)
        run.write_rows("probabilities", settings.steps, found.probabilities)
        finish(run, found.outcome)
        progress.stage("writing the report")
        report = write_report(out)
    if json:
        return {"report": str(report), "claims": found.outcome.results["claims"]}
    return f"{found.outcome.summary}\n\nwrote {report}"


def _remove_earlier_demo(folder: Path) -> None:
    """Make room in a folder that holds a demo; refuse one that holds another run."""
    from apportion.runs.folder import load_run

    if not (folder / "settings.toml").is_file():
        return
    if load_run(folder).job != "demo":
        raise InputError(f"{folder}: holds a run that is no demo; choose another folder with --out")
    for file in ("settings.toml", "results.json", "report.html"):
        (folder / file).unlink(missing_ok=True)
    for part in folder.glob("*.parquet/step-*.parquet"):
        part.unlink()
