"""Settings of charging and options of a live controller. This module does not import JAX."""

from dataclasses import dataclass
from pathlib import Path

from apportion.domains.settings import TrainingSettings
from apportion.errors import InputError, check_positive
from apportion.runs.settings import suggest

OBJECTIVES = ("energy", "fair", "promise", "cost")
"""Names of the objectives."""


@dataclass(frozen=True)
class ChargingSettings(TrainingSettings):
    """Share a feeder's power among charging cars, learned from past sessions.

    Examples
    --------
    >>> ChargingSettings(method="mtl").task_size
    10
    """

    sessions: Path | None = None
    """CSV or Parquet file of charging sessions; without it, the embedded ones of two sites."""
    columns: tuple[str, ...] = ()
    """Columns with other names than the standard ones: arrival=Start delivered_kwh=Energy."""
    timezone: str | None = None
    """Time zone of the garage, such as America/Los_Angeles, for files whose times carry a zone."""
    site: tuple[str, ...] = ()
    """Sites to train on, by name or by TOML file; by default all sites in the file of sessions."""
    period_minutes: int = 15
    """Minutes between two decisions: 5 or 15."""
    ideal: bool = False
    """Simulate ideal stations for comparison: any power, no taper, no missing meter values."""
    until: str | None = None
    """Last training day; by default the last third of each site's days is kept for tests."""
    held_out: float = 0.3
    """Share of each site's stations that is held out from training, at random."""
    tasks: int = 200
    """Number of tasks T, divided among the sites."""
    task_size: int = 10
    """Stations per task, m."""
    objective: str = "energy"
    """The objective: energy, fair, promise or cost."""
    capacity: tuple[float, float] = (0.05, 0.3)
    """Smallest and largest capacity of a feeder, as a share of its stations' full rate."""
    steps: int = 1000
    """Updates of the policy."""
    recall: bool = True
    """Correct forecasts by similar requests on earlier days, and forecast later arrivals."""
    days: int = 24
    """Days per update, all for the sampled task."""
    hidden: int = 48
    """Hidden units in each of the network's two layers."""
    learning_rate: float = 3e-3
    """Initial learning rate of Adam, with a cosine decay to 0."""
    chunk: int = 50
    """Steps between two checkpoints."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "task_size", "days", "hidden", "chunk")
        low, high = self.capacity
        if not 0 < low <= high <= 1:
            raise InputError(
                f"capacity {low:g} {high:g}: give the least and the most, 0 < least <= most <= 1"
            )
        if self.objective not in OBJECTIVES:
            raise InputError(
                f"there is no objective {self.objective!r}; choose {', '.join(OBJECTIVES)}"
                f"{suggest(self.objective, list(OBJECTIVES))}"
            )
        if self.period_minutes not in (5, 15):
            raise InputError(f"period_minutes is {self.period_minutes}; it must be 5 or 15")
        if not 0 <= self.held_out < 1:
            raise InputError(
                f"held_out is {self.held_out}; it is a share of the stations, at least 0 and below 1"
            )
        check_positive(learning_rate=self.learning_rate)


@dataclass(frozen=True)
class ControllerOptions:
    """Options of a garage's controller."""

    site: str | None = None
    """TOML file that describes the garage, or name of a site that the policy was trained on; can be
    left out if there was only one."""
    state: Path | None = None
    """JSON file that keeps the state of the cars between calls."""
    baseline: str = "llf"
    """Scheduler that is used if the policy fails, and for the share that --trust leaves to it."""
    trust: float | None = None
    """Share of the policy in the decision, from 0 to 1; the baseline decides the rest. By default
    the certificate's trust, or 1 without one; a given value overrides the certificate."""
    certificate: Path | None = None
    """The certificate.json that sets the trust; one for another site is refused."""
    earlier: Path | None = None
    """CSV or Parquet file of the garage's earlier sessions, which improve the forecasts."""
    columns: tuple[str, ...] = ()
    """Columns of that file with other names than the standard ones: arrival=Start departure=End."""


@dataclass(frozen=True)
class ChargingServeOptions(ControllerOptions):
    """Charging: a live controller, called by HTTP or connected to the charge points.

    The run's certificate sets the trust if it is for this site and this baseline.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""
    port: int = 8080
    """Port for HTTP: the page, /allocate, /state, /health and /metrics."""
    ocpp: int | None = None
    """Port for charge points, OCPP 1.6 and 2.0.1: ws://HOST:PORT/ocpp/ID."""
    every: float | None = None
    """Seconds between two decisions; by default the site's period."""
    token_file: Path | None = None
    """File with the token required for writes; by default the environment variable APPORTION_TOKEN,
    or a new token that is saved beside the state."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use, besides localhost and the server's address."""
    ocpp_passwords: Path | None = None
    """TOML file with the password of each charge point: ID = "password"."""
    ocpp_open: bool = False
    """Accept charge points without a password; unsafe unless they have a network of their own."""
    ocpp_cert: Path | None = None
    """TLS certificate for charge points, a PEM file; they then connect to wss://."""
    ocpp_key: Path | None = None
    """Private key of the TLS certificate, a PEM file."""
