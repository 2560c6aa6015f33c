"""The settings of charging and the options of a live controller, frozen; nothing here starts JAX."""

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
    """Names of the file's columns if they differ from ours: arrival=Start delivered_kwh=Energy."""
    timezone: str | None = None
    """Where the garage is, such as America/Los_Angeles, for files whose times carry a zone."""
    site: tuple[str, ...] = ()
    """Sites to train on, by name or by the TOML file that describes one; by default all in the file."""
    period_minutes: int = 15
    """Minutes between two decisions: 5 or 15."""
    ideal: bool = False
    """Any power at any time, cars that never taper, meters that never fail: for comparison alone."""
    until: str | None = None
    """Last day to train on; by default the last third of each site's working days is kept for tests."""
    held_out: float = 0.3
    """Share of each site's stations that is never trained on, drawn by the seed."""
    tasks: int = 200
    """Number of tasks T, divided among the sites."""
    task_size: int = 10
    """Stations in a task, m."""
    objective: str = "energy"
    """The objective: energy, fair, promise or cost."""
    capacity: tuple[float, float] = (0.05, 0.3)
    """The least and the most a feeder gives, as a share of its stations' full rate."""
    steps: int = 1000
    """Updates of the policy."""
    recall: bool = True
    """Predict needs and stays from cars of earlier days whose drivers made similar requests, too."""
    days: int = 24
    """Days in an update, all of the drawn task."""
    hidden: int = 48
    """Units of the network's two layers."""
    learning_rate: float = 3e-3
    """First step size of Adam; it falls to 0 along a cosine."""
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
    """A garage's controller."""

    site: str | None = None
    """The TOML file that describes the garage; without it the site that was trained on, by name if there
    were several."""
    state: Path | None = None
    """JSON file with the state of the cars, so that a later call continues."""
    baseline: str = "llf"
    """The scheduler that decides if the policy fails, and for the share that it is not trusted with."""
    trust: float | None = None
    """The policy's part in the decision; the rest is the baseline's. By default what the certificate says,
    1 without one; given by hand it overrides the certificate."""
    certificate: Path | None = None
    """The certificate.json whose trust is used; one for another site is refused."""
    earlier: Path | None = None
    """Sessions of the garage's earlier days, CSV or Parquet: drivers who come again ask for the same."""
    columns: tuple[str, ...] = ()
    """Names of that file's columns if they differ from ours: arrival=Start departure=End."""


@dataclass(frozen=True)
class ChargingServeOptions(ControllerOptions):
    """Charging: a live controller, called by HTTP or connected to the charge points.

    The run's certificate, if it is for this site and against the baseline, sets the trust.
    """

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 to be reached from other machines."""
    port: int = 8080
    """Port of HTTP: the page, /allocate, /state, /health and /metrics."""
    ocpp: int | None = None
    """Port for charge points, OCPP 1.6 and 2.0.1: ws://HOST:PORT/ocpp/ID."""
    every: float | None = None
    """Seconds between two decisions; by default the site's period."""
    token_file: Path | None = None
    """File with the token that writes need; by default the environment variable APPORTION_TOKEN, else one
    that is made and kept beside the state."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients call the server, beside localhost and its address."""
    ocpp_passwords: Path | None = None
    """TOML file with the password of each charge point: ID = "password"."""
    ocpp_open: bool = False
    """Accept charge points without a password: unsafe, for a network of their own."""
    ocpp_cert: Path | None = None
    """Certificate for charge points, a PEM file: they connect by wss://."""
    ocpp_key: Path | None = None
    """The certificate's private key, a PEM file."""
