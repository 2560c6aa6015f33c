"""Charging as a domain of apportion: its options and commands."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.domains.domain import Demonstration, Domain
from apportion.errors import InputError, optional_import
from apportion_charging.settings import ChargingServeOptions, ChargingSettings, ControllerOptions

if TYPE_CHECKING:
    import pandas as pd

    from apportion.certify.certificate import Gains
    from apportion.problem import Problem
    from apportion.report.page import Section
    from apportion.runs.folder import Run
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob
    from apportion_charging.backtest import ChargingBacktest
    from apportion_charging.controller import Controller, PowerOffers
    from apportion_charging.sessions import CheckedSessions

_SCHEDULES = (
    "All share the same feeder among the same cars. Left short: cars with less than 80 % of their need. "
    "Fairness is Jain's index of the shares of need met. From, to: 95 % intervals by clusters of days. "
    "Clairvoyant and optimum know the future; llf-recalled is no garage's: it reads what the policy "
    "reads of earlier days."
)
_COLUMNS = (
    ("served", "need met, %", 100),
    ("left_short", "cars left short, %", 100),
    ("fairness", "fairness", 1),
    ("kept", "promises kept, %", 100),
    ("cost_per_kwh", "cost a kWh", 1),
    ("ahead", "the policy's lead, points", 100),
    ("low", "from", 100),
    ("high", "to", 100),
)
"""Columns of the table of schedules: our name, the page's name, and a factor."""


@dataclass(frozen=True)
class _FileOptions:
    """Options for reading a file of sessions."""

    columns: tuple[str, ...] = ()
    """Names of the file's columns if they differ from ours: arrival=Start delivered_kwh=Energy."""
    timezone: str | None = None
    """The garage's time zone, such as America/Los_Angeles, for files whose times carry a zone; by
    default the zone in the file, or that of training."""


@dataclass(frozen=True)
class _GarageOptions(_FileOptions):
    """Options for the garages in which a charging run is tested."""

    site: str | None = None
    """Site to test on: its name, or a TOML file, whose whole site is then tested; needed if the
    sessions are of several sites."""
    stations: int | None = None
    """Stations behind one feeder; by default as in training, or all stations of a TOML file."""
    capacity: str | None = None
    """Capacity of the feeder, as a share of its stations' full rate or in kW, such as 30kW; by
    default that of a site tested as a whole, else 0.15."""
    tasks: int = 8
    """Number of garages to draw from the site's stations."""


@dataclass(frozen=True)
class ChargingBacktestOptions(_GarageOptions):
    """Charging: the share of the need served, and the policy's lead with intervals by day."""

    sessions: Path | None = None
    """CSV or Parquet file of charging sessions; by default the training data."""
    start: str | None = None
    """First day, such as 2019-01-01; by default the day after the last one trained on."""
    end: str | None = None
    """Last day; by default the last in the file."""
    mpc: bool = False
    """Also test model-predictive control, which plans some tens of days a second."""


@dataclass(frozen=True)
class ChargingCertifyOptions(_GarageOptions):
    """Charging: a gain is the lead of a day, in shares of its need."""

    data: Path | None = None
    """Sessions newer than the training data; by default the run's own file."""
    bound: float | None = None
    """Bound of a day's gain, as a share of its need, by default 0.05. Choose it before the test."""


@dataclass(frozen=True)
class ChargingAllocateOptions(ControllerOptions):
    """Charging: the power to offer each car until the next call."""

    now: Path | None = None
    """The garage's state: a JSON object with time, capacity_kw and stations."""


@dataclass(frozen=True)
class ChargingCheckOptions(_FileOptions):
    """Charging: a file of sessions."""

    sessions: Path | None = None
    """CSV or Parquet file of charging sessions."""


class _ChargingDomain(Domain):
    """Sharing of a garage's power among the cars that are plugged in."""

    name = "charging"
    settings = ChargingSettings
    backtest_options = ChargingBacktestOptions
    allocate_options = ChargingAllocateOptions
    certify_options = ChargingCertifyOptions
    serve_options = ChargingServeOptions
    check_options = ChargingCheckOptions
    examples = (
        "demo charging",
        "train charging --sessions sessions.csv --out runs/garage",
        "backtest runs/garage --sessions sessions.csv --site north --capacity 0.2",
        "certify runs/garage --against llf --data sessions.csv --site north",
        "allocate runs/garage --now now.json",
        "serve runs/garage --site site.toml --state state.json",
        "check --sessions sessions.csv",
    )

    def prepare(self, settings: ChargingSettings) -> "PreparedJob":
        from apportion_charging.sessions import inspect_sessions, read_sessions
        from apportion_charging.site import find_zone

        # Read the file before JAX starts, so that a mistake is reported at once.
        notes, frame = [], read_sessions()
        if settings.sessions is not None:
            zone = find_zone(settings.site, settings.timezone)
            checked = inspect_sessions(settings.sessions, timezone=zone, columns=settings.columns)
            notes, frame = checked.notes, checked.frame
        from apportion_charging.training import prepare_charging

        return prepare_charging(settings, frame, notes)

    def backtest(
        self, run: "Run", options: ChargingBacktestOptions, progress: Any = None
    ) -> "ChargingBacktest":
        frame, embedded = _read_own(run, options.sessions, options)
        from apportion.runs.policy_file import load_about
        from apportion_charging.backtest import backtest_saved

        about, chosen = load_about(run.folder), asdict(options)
        del chosen["sessions"], chosen["columns"]
        return backtest_saved(run.policy, about, frame, embedded=embedded, **chosen)

    def gains(self, run: "Run", against: str, options: ChargingCertifyOptions) -> "Gains":
        frame, embedded = _read_own(run, options.data, options)
        from apportion.runs.policy_file import load_about
        from apportion_charging.backtest import GAIN_BOUND, daily_gains

        about, chosen = load_about(run.folder), asdict(options)
        del chosen["data"], chosen["columns"]
        chosen["bound"] = GAIN_BOUND if options.bound is None else options.bound
        return daily_gains(run.policy, about, frame, against, embedded=embedded, **chosen)

    def allocate(self, run: "Run", options: ChargingAllocateOptions) -> "PowerOffers":
        if options.now is None:
            raise InputError(
                f"{run.folder}: a charging run; give what the controller sees now with "
                "--now FILE.json"
            )
        from apportion_charging.controller import read_now

        seen = read_now(options.now)
        return _controller(run, options).allocate(seen)

    def serve(self, run: "Run", options: ChargingServeOptions) -> str:
        needs = "apportion serve needs starlette, uvicorn and ocpp"
        with optional_import(needs, "serve", package="apportion-charging"):
            from apportion_charging.serve import serve
        return serve(lambda: _controller(run, options), run.folder, options)

    def check(self, options: ChargingCheckOptions) -> "CheckedSessions":
        from apportion_charging.sessions import inspect_sessions

        return inspect_sessions(
            options.sessions, timezone=options.timezone, columns=options.columns
        )

    def demo(self) -> ChargingSettings:
        """Return settings for 2019 at two sites, tested at held-out stations and on 2021."""
        return ChargingSettings(method="mtl", until="2019-12-31", steps=600, days=24, chunk=50)

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration:
        from apportion_charging.demonstration import demonstrate_charging

        return demonstrate_charging(seed, progress)

    def problem(self) -> "Problem":
        """Return the problem of one site in 2019, the year before the pandemic."""
        from apportion_charging.days import Days
        from apportion_charging.forecasts import Predictor, add_forecasts
        from apportion_charging.problem import Charging
        from apportion_charging.sessions import read_sessions
        from apportion_charging.site import embedded_site

        days = Days.of(read_sessions(), "jpl", embedded_site("jpl"))
        days = days.between("2019-01-01", "2019-12-31")
        return Charging.of([add_forecasts(days, Predictor.fit(days), recall=True)])

    def sections(self, folder: Path) -> "list[Section]":
        """Return a table of all schedulers for each test."""
        from apportion.report.page import Section, Table
        from apportion.report.plots import read_table

        schedules = read_table(folder, "schedules")
        if schedules is None:
            return []
        tables = [
            Table(str(name), _shown(rows)) for name, rows in schedules.groupby("test", sort=False)
        ]
        return [Section("Against the schedulers that garages use", tables, _SCHEDULES)]


DOMAIN = _ChargingDomain()


def _controller(run: "Run", options: ControllerOptions) -> "Controller":
    from apportion.runs.policy_file import load_about
    from apportion_charging.backtest import read_certificate
    from apportion_charging.controller import Controller
    from apportion_charging.sessions import read_sessions
    from apportion_charging.site import saved_site

    about, earlier = load_about(run.folder), None
    site, trust = saved_site(about, options.site), options.trust
    if trust is None and options.certificate is not None:
        trust = read_certificate(options.certificate, site)["trust"]
    if options.earlier is not None:
        earlier = read_sessions(options.earlier, timezone=site.timezone, columns=options.columns)
    return Controller(
        run.policy,
        about,
        site,
        baseline=options.baseline,
        trust=1.0 if trust is None else trust,
        earlier=earlier,
        state=options.state,
    )


def _read_own(
    run: "Run", given: Path | None, options: _GarageOptions
) -> "tuple[pd.DataFrame, bool]":
    """Return the given sessions, else those of training, and whether they are the embedded ones."""
    from apportion_charging.sessions import read_sessions
    from apportion_charging.site import find_zone

    trained = run.settings
    path, sites, columns = given, (), options.columns
    if given is None:
        path, sites, columns = (trained.get(name) for name in ("sessions", "site", "columns"))
    if path is None:
        return read_sessions(), True
    zone = find_zone([options.site] if options.site else sites or (), options.timezone)
    usual = trained.get("timezone")
    return read_sessions(path, timezone=zone, usual_zone=usual, columns=columns or ()), False


def _shown(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Rename the columns, and convert shares to per cent and leads to points."""
    shown = {name: factor * rows[column] for column, name, factor in _COLUMNS if column in rows}
    return rows[["schedule"]].assign(**shown).round(2)
