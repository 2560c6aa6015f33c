"""`apportion backtest`: a trained policy on data of the past, beside what people use without it."""

from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import Folder, Json, Prices, finished_run, refuse_options
from apportion.cli.options import Sessions as SessionsFile

_Day = Annotated[str | None, Parameter(metavar="DAY")]
_Charging = Parameter(group="Charging")


def backtest(
    folder: Folder,
    /,
    *,
    start: _Day = None,
    end: _Day = None,
    json: Json = False,
    prices: Prices = None,
    sessions: SessionsFile = None,
    timezone: Annotated[str | None, _Charging] = None,
    site: Annotated[str | None, _Charging] = None,
    stations: Annotated[int | None, _Charging] = None,
    capacity: Annotated[float | None, _Charging] = None,
    tasks: Annotated[int | None, _Charging] = None,
    unseen: Annotated[bool, _Charging] = False,
) -> Any:
    """Backtest a trained policy, with every baseline or scheduler beside it.

    Portfolios: net of costs and gross. Wealth is 1 at the close before --start; the first period ends on
    the first trading day on or after it. Earlier rows of the file serve as history.

    Charging: the share of the need that was served, and the policy's lead by clusters of days.

    Example: `apportion backtest runs/first --prices prices.csv --start 2019-01-01 --json`

    Example: `apportion backtest runs/garage --sessions sessions.csv --site north --capacity 0.2`

    Parameters
    ----------
    folder
        Folder of a finished portfolio or charging run.
    start
        First day, such as 2019-01-01; by default the day after the last one trained on.
    end
        Last day; by default the last in the file.
    timezone
        Where the garage is, such as America/Los_Angeles, for files whose times carry a zone.
    site
        The site to test on; needed where the file has several.
    stations
        Stations behind one feeder; by default as in training.
    capacity
        What the feeder gives, as a share of its stations' full rate; 0.15 by default.
    tasks
        Garages to draw among the site's stations; 8 by default.
    unseen
        Only stations that were not trained on; then all days by default.
    """
    run = finished_run(folder, "portfolio", "charging", "demo")
    charging = {
        "sessions": sessions,
        "timezone": timezone,
        "site": site,
        "stations": stations,
        "capacity": capacity,
        "tasks": tasks,
        "unseen": unseen or None,
    }

    from apportion.runs.policy_file import load_about

    about = load_about(folder)
    if about.get("job") == "charging":
        refuse_options(folder, "charging", prices=prices)

        from apportion.domains.charging.job import backtest_policy as backtest_charging
        from apportion.domains.charging.sessions import read_sessions

        frame = read_sessions(sessions, timezone=timezone)
        given = {k: v for k, v in charging.items() if v is not None}
        given = {k: v for k, v in given.items() if k not in ("sessions", "timezone")}
        result = backtest_charging(run.policy, about, frame, start=start, end=end, **given)
    else:
        refuse_options(folder, "portfolio", **charging)

        from apportion.domains.portfolio.job import backtest_policy, read_prices

        result = backtest_policy(run.policy, about, read_prices(prices), start=start, end=end)
    return result.to_json() if json else result.summary()
