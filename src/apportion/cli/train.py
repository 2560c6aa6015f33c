"""`apportion train` and `apportion resume`."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from apportion.cli.options import File, Folder, Json, Out, Quiet, TensorBoard, refuse_fractions
from apportion.runs.folder import UNFINISHED
from apportion.runs.progress import open_progress
from apportion.runs.registry import JOBS, prepare, settings_of
from apportion.runs.settings import from_mapping, read_settings

_DETAILS = """The folder keeps everything about the run: settings, metrics, checkpoints, policy.
What --config leaves out has the default shown; what the command line gives goes before both.
Ctrl-C saves, and `apportion resume DIR` continues exactly there."""

_EXAMPLES = """For example:

- `apportion train budget --out runs/budget`
- `apportion train portfolio --prices prices.csv --out runs/first --method mtl --steps 3000`
- `apportion train portfolio --config runs/first/settings.toml --out runs/again`"""


def _command(job: str) -> Callable[..., Any]:
    """The command that trains one job: the fields of the job's settings are its options."""
    kind = settings_of(job)

    def command(
        *,
        out: Out,
        config: File = None,
        json: Json = False,
        quiet: Quiet = False,
        tensorboard: TensorBoard = False,
        settings: Annotated[kind, Parameter(name="*", group="Settings")] = kind(),  # noqa: B008 # pyright: ignore
    ) -> Any:
        """Train a policy.

        Parameters
        ----------
        out
            Folder of the run, made by it.
        config
            TOML file of settings; any run's settings.toml is one.
        """
        from apportion.runs.files import require_free

        require_free(out, unfinished=UNFINISHED)
        _read_early(settings)
        given = _absolute(settings)
        prepared = prepare(job, given)
        from apportion.runs.runner import start_run

        with open_progress(quiet=quiet) as progress:
            outcome = start_run(out, job, given, prepared, progress, tensorboard=tensorboard)
        return _describe(out, outcome, json)

    return command


def _read_early(settings: Any) -> None:
    """Read the prices before JAX is started, so that a slip is told at once."""
    from apportion.domains.portfolio.settings import PortfolioJob

    if isinstance(settings, PortfolioJob) and settings.prices is not None:
        from apportion.domains.portfolio.prices import read_prices

        read_prices(settings.prices, allow_jumps=settings.allow_jumps)


def _apply_config(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take from the file of `--config` what the command line does not give."""
    for token in arguments["--config"].tokens:
        values = read_settings(token.value, commands[-1], settings_of(commands[-1]))
        Dict(values, source=token.value, use_commands_as_keys=False)(app, commands, arguments)


train = App(
    name="train",
    help=f"Train a policy and keep it in a folder.\n\n{_EXAMPLES}",
    config=(refuse_fractions, _apply_config),
)
for _job in JOBS:
    _purpose = (settings_of(_job).__doc__ or "").partition("\n")[0]
    train.command(_command(_job), name=_job, help=f"{_purpose}\n\n{_DETAILS}")


def resume(
    folder: Folder, /, *, json: Json = False, quiet: Quiet = False, tensorboard: TensorBoard = False
) -> Any:
    """Continue a run exactly where it stopped.

    Every number comes out as if the run had never stopped.

    Example: `apportion resume runs/first`

    Parameters
    ----------
    folder
        Folder of the run.
    """
    from apportion.runs.folder import load_run

    run = load_run(folder)
    outcome = None
    if not run.finished:
        source = str(run.folder / "settings.toml")
        prepared = prepare(run.job, from_mapping(run.settings, settings_of(run.job), source))
        from apportion.runs.runner import resume_run

        with open_progress(quiet=quiet) as progress:
            outcome = resume_run(folder, prepared, progress, tensorboard=tensorboard)
    return _describe(folder, outcome, json)


def _describe(folder: Path, outcome: Any, as_json: bool) -> Any:
    """The result, which a run that was finished before has on disk."""
    from apportion.runs.folder import load_run

    if as_json:
        return {"folder": str(folder), "results": load_run(folder).results}
    if outcome is None:
        return f"the run in {folder} is finished; nothing was left to do"
    return f"{outcome.summary}\nwrote {folder}"


def _absolute(settings: Any) -> Any:
    """Files by their full path, so that the run's settings serve from any folder."""
    paths = {
        field.name: value.resolve()
        for field in fields(settings)
        if isinstance(value := getattr(settings, field.name), Path)
    }
    return replace(settings, **paths)
