"""`apportion backtest`: a trained policy on data of the past, beside what people use without it."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import (
    AllowJumps,
    Folder,
    GarageOptions,
    Json,
    Prices,
    Quiet,
    Sessions,
    finished_run,
    own_data,
    read_own_prices,
    refuse_options,
)

_Day = Annotated[str | None, Parameter(metavar="DAY")]
_Names = Annotated[tuple[str, ...] | None, Parameter(metavar="NAME ...", consume_multiple=True)]

_UNFINISHED = ("table.csv", "figure.png")
"""What a backtest that was killed may have left: its results come last."""


@dataclass(frozen=True)
class ChargingOptions(GarageOptions):
    """What a backtest of a charging run may be told."""

    sessions: Sessions = None
    unseen: bool | None = None
    """Only stations that were not trained on; then all days by default."""


@dataclass(frozen=True)
class MarketOptions:
    """What a backtest of a portfolio run may be told."""

    prices: Prices = None
    cost: Annotated[float | Path | None, Parameter(metavar="NUMBER|FILE")] = None
    """Commission, or a CSV of ticker and cost (or buy and sell); by default what it was trained under."""
    tickers: _Names = None
    """Instruments to test on; by default all in the file."""
    baselines: _Names = None
    """Baselines beside Equal CRP and lazy rebalancing; by default all that suit the prices."""
    allow_jumps: AllowJumps = False


def backtest(
    folder: Folder,
    /,
    *,
    start: _Day = None,
    end: _Day = None,
    out: Annotated[Path | None, Parameter(metavar="DIR")] = None,
    json: Json = False,
    quiet: Quiet = False,
    market: Annotated[MarketOptions, Parameter(name="*", group="Portfolio")] = MarketOptions(),  # noqa: B008
    charging: Annotated[ChargingOptions, Parameter(name="*", group="Charging")] = ChargingOptions(),  # noqa: B008
) -> Any:
    """Backtest a trained policy, with every baseline or scheduler beside it.

    Portfolios: net of costs and gross. Wealth is 1 at the close before --start; the first period ends on
    the first trading day on or after it. Earlier rows of the file serve as history.

    Charging: the share of the need that was served, and the policy's lead by clusters of days.

    Example: `apportion backtest runs/first --prices prices.csv --start 2019-01-01 --baselines olmar ons`

    Example: `apportion backtest runs/garage --sessions sessions.csv --site north --capacity 0.2`

    Parameters
    ----------
    folder
        Folder of a finished portfolio or charging run.
    start
        First day, such as 2019-01-01; by default the day after the last one trained on.
    end
        Last day; by default the last in the file.
    out
        A new folder for the results: JSON, a table, and of portfolios a picture.
    """
    run = finished_run(folder, "portfolio", "charging", "demo")
    if out is not None:
        from apportion.runs.files import require_free

        require_free(out, unfinished=_UNFINISHED)
    if run.job == "charging":
        refuse_options(folder, "charging", **asdict(market))
        own = replace(charging, sessions=own_data(run, "sessions", charging.sessions))
        result = _garage(run, own, start, end)
    else:
        refuse_options(folder, "portfolio", **asdict(charging))
        result = _market(run, market, start, end, quiet)
    if out is not None:
        _write(result, out)
    return result.to_json() if json else result.summary()


def _market(run: Any, given: MarketOptions, start: str | None, end: str | None, quiet: bool) -> Any:
    # Read before JAX is started, so that a slip is told at once.
    table = read_own_prices(run, given.prices, given.allow_jumps)
    if given.tickers is not None:
        table = table.select(given.tickers)
    from apportion.domains.portfolio.job import backtest_policy
    from apportion.runs.policy_file import load_about
    from apportion.runs.progress import open_progress
    from apportion.runs.signals import stoppable

    about = load_about(run.folder)
    with open_progress(quiet=quiet) as progress:
        return stoppable(
            lambda: backtest_policy(
                run.policy,
                about,
                table,
                start=start,
                end=end,
                cost=given.cost,
                baselines=given.baselines,
                on_strategy=lambda name, done: progress.stage(f"backtest: {name}", done),
            )
        )


def _write(result: Any, out: Path) -> None:
    """Results and a table in a new folder, and of portfolios a picture."""
    from apportion.domains.portfolio.record import Backtest
    from apportion.runs.files import (
        only_writer,
        require_free,
        write_atomic,
        write_figure,
        write_json,
    )

    with only_writer(out):
        require_free(out, unfinished=_UNFINISHED)
        write_atomic(out / "table.csv", result.to_frame().to_csv(index=False).encode())
        if isinstance(result, Backtest):
            write_figure(out / "figure.png", result.plot(), dpi=120)
        write_json(out / "results.json", result.to_json())


def _garage(run: Any, given: ChargingOptions, start: str | None, end: str | None) -> Any:
    from apportion.domains.charging.sessions import read_sessions

    frame = read_sessions(given.sessions, timezone=given.timezone)
    from apportion.domains.charging.job import backtest_policy
    from apportion.runs.policy_file import load_about

    chosen = {
        name: value
        for name, value in asdict(given).items()
        if value is not None and name not in ("sessions", "timezone")
    }
    about = load_about(run.folder)
    return backtest_policy(run.policy, about, frame, start=start, end=end, **chosen)
