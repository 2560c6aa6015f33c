"""`apportion certify`: has a trained policy earned its place, against what decides today?"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import (
    AllowJumps,
    File,
    Folder,
    GarageOptions,
    Json,
    finished_run,
    own_data,
    read_own_prices,
    refuse_options,
)
from apportion.errors import InputError

_Name = Annotated[str, Parameter(metavar="NAME")]
_JOBS = ("charging", "portfolio", "federated", "demo")
_Options = dict[str, dict[str, Any]]
"""Of each kind of run, its own options."""


@dataclass(frozen=True)
class FederationOptions:
    """What the certificate of a federated run may be told."""

    federations: int | None = None
    """Federations to try it in, 40 by default; more go on from the same first ones."""


_Federation = Annotated[FederationOptions, Parameter(name="*", group="Federated")]


def certify(
    folder: Folder,
    /,
    *,
    against: _Name,
    data: File = None,
    alpha: float = 0.05,
    block: int = 1,
    bound: float | None = None,
    out: File = None,
    json: Json = False,
    allow_jumps: AllowJumps = False,
    garage: Annotated[GarageOptions, Parameter(name="*", group="Charging")] = GarageOptions(),  # noqa: B008
    federation: _Federation = FederationOptions(),  # noqa: B008
) -> Any:
    """Say whether a policy may be switched on: certified, not yet, or harmful.

    The policy runs in the shadow of a baseline on data it was not trained on, and two gamblers bet on its
    gains: one that it is better, one that it is worse. Who has 2/alpha has won. Ask as often as you like,
    with more data each time: a wrong verdict has probability alpha at most over all times together.

    A gain is that of a day (charging: share of the need met), of a week (portfolios: log growth, net of
    costs), of a federation (test accuracy after the last round) or of a round of one that is under way.

    Example: `apportion certify runs/garage --against llf --data sessions.csv --site north`

    Example: `apportion certify runs/first --against lazy-crp --data prices.csv --json`

    Example: `apportion certify server.safetensors --against FedAvg --block 5`

    Parameters
    ----------
    folder
        Folder of a finished charging, portfolio or federated run; or the file that a Flower server keeps.
    against
        What decides today: llf, lazy-crp, fedavg or another by its name; or the folder of another run.
    data
        Sessions, prices or mnist.npz, newer than what it was trained on; without it, the run's own file.
    alpha
        How likely a wrong verdict may be, between 0 and 1.
    block
        Consecutive periods whose mean is one bet, for gains that hang together.
    bound
        What a gain counts at most, by default 0.05 of a day's need, 0.01 of log growth a week, or 0.25 of
        accuracy. Decide on it before you look.
    out
        A .png for the plot, or a folder for plot, table and JSON; by default the run's certificate.png.
    """
    run = None if folder.is_file() else finished_run(folder, *_JOBS)
    place = folder.parent if run is None else folder
    out = place / "certificate.png" if out is None else out
    _check(alpha, block, bound)
    _check_place(out)
    jumps = {"allow_jumps": allow_jumps}
    options = {"charging": asdict(garage), "portfolio": jumps, "federated": asdict(federation)}
    given = (against, data, bound, options)
    gains = _rounds(folder, *given) if run is None else _gains(run, *given)
    made = gains.certify(alpha=alpha, block=block)
    wrote = _keep(made, place, _write(made, out))
    return made.to_json() | {"plot": str(wrote)} if json else f"{made.summary()}\nwrote {wrote}"


def _gains(
    run: Any, against: str, data: Path | None, bound: float | None, options: _Options
) -> Any:
    """The gains of a run, by what it is a run of; options of other kinds of runs are refused."""
    from apportion.runs.policy_file import load_about

    about = load_about(run.folder)
    job = about.get("job", run.job)
    for other in options.keys() - {job}:
        refuse_options(run.folder, job, **options[other])
    own = {name: value for name, value in options[job].items() if value is not None}
    if bound is not None:
        own["bound"] = bound
    by_job = {"charging": _charging, "portfolio": _portfolio, "federated": _federated}
    return by_job[job](run, about, data, against, own)


def _rounds(
    file: Path, against: str, data: Path | None, bound: float | None, options: _Options
) -> Any:
    """The gains that a federation's server has kept; options of runs are refused."""
    from apportion.domains.federated.round_gains import BOUND, kept_gains

    for others in ({"data": data}, *options.values()):
        refuse_options(file, "server's", **others)
    return kept_gains(file, against, bound=BOUND if bound is None else bound)


def _check(alpha: float, block: int, bound: float | None) -> None:
    """Refuse numbers that make no certificate, before anything slow is started."""
    if not 0 < alpha < 1:
        raise InputError(f"--alpha is {alpha:g}; it must be above 0 and below 1")
    if block < 1:
        raise InputError(f"--block is {block}; it must be at least 1 period")
    if bound is not None and not 0 < bound < float("inf"):
        raise InputError(f"--bound is {bound:g}; it must be above 0")


def _check_place(out: Path) -> None:
    from apportion.runs.files import require_place, require_writable

    alone = out.suffix == ".png"
    if (out.is_dir() and alone) or (out.is_file() and not alone):
        raise InputError(f"{out}: give a .png file, or a folder")
    (require_place if alone else require_writable)(out)


def _charging(
    run: Any, about: dict[str, Any], data: Path | None, against: str, options: dict[str, Any]
) -> Any:
    from apportion.domains.charging.backtest import daily_gains
    from apportion.domains.charging.sessions import read_sessions

    zone = options.pop("timezone", None if data else run.settings.get("timezone"))
    frame = read_sessions(own_data(run, "sessions", data), timezone=zone)
    return daily_gains(run.policy, about, frame, against, **options)


def _portfolio(
    run: Any, about: dict[str, Any], data: Path | None, against: str, options: dict[str, Any]
) -> Any:
    from apportion.domains.portfolio.backtest import weekly_gains

    prices = read_own_prices(run, data, options.pop("allow_jumps"))
    return weekly_gains(run.policy, about, prices, against, **options)


def _federated(
    run: Any, about: dict[str, Any], data: Path | None, against: str, options: dict[str, Any]
) -> Any:
    from dataclasses import replace

    from apportion.domains.federated.gains import federation_gains
    from apportion.domains.federated.settings import FederatedSettings
    from apportion.domains.federated.training import read_digits
    from apportion.runs.settings import from_mapping

    source = str(run.folder / "settings.toml")
    settings = from_mapping(run.settings, FederatedSettings, source)
    settings = settings if data is None else replace(settings, mnist=data)
    return federation_gains(run.policy, about, settings, read_digits(settings), against, **options)


def _write(made: Any, out: Path) -> Path:
    """Write the plot, and with it table and JSON where a folder is asked for; returns the plot's path."""
    from apportion.runs.files import write_atomic, write_figure, write_json

    alone = out.suffix == ".png"
    plot = out if alone else out / "certificate.png"
    if not alone:
        write_json(out / "certificate.json", made.to_json())
        write_atomic(out / "certificate.csv", made.to_frame().to_csv(index=False).encode())
    write_figure(plot, made.plot(), dpi=130)
    return plot


def _keep(made: Any, folder: Path, plot: Path) -> Path:
    """Keep the result in the run's folder, for its page, unless that is read-only; returns the plot."""
    import warnings
    from datetime import UTC, datetime

    from apportion.runs.files import write_json

    own = plot.resolve() == (folder / "certificate.png").resolve()
    about = {"made": datetime.now(UTC).isoformat(timespec="seconds")}
    about |= {"plot": plot.name if own else str(plot)}
    try:
        write_json(folder / "certificate.json", made.to_json() | about)
    except OSError as error:
        warnings.warn(f"{folder}: does not keep the certificate ({error.strerror})", stacklevel=2)
    return plot
