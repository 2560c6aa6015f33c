"""Files of charging sessions, and what a garage's controller is told."""

import json

from refusals import assert_refused, cases

NAMES = "site,station,arrival,departure,stated_departure,requested_kwh,delivered_kwh"
GOOD = "here,a,2019-05-01 08:00,2019-05-01 10:00,2019-05-01 11:00,20,5"


def files(*rows: tuple):
    """A table of rows (name, lines, words...) of what `check` must refuse."""
    check = "check --sessions s.csv"
    return cases(*((name, check, words, {"s.csv": text}) for name, text, *words in rows))


def session(**changes: str) -> str:
    """A sound session and one with changes."""
    values = dict(zip(NAMES.split(","), GOOD.split(","), strict=True)) | changes
    return "\n".join([NAMES, GOOD, ",".join(values.values())]) + "\n"


@files(
    ("empty", "", "cannot be read"),
    ("names only", NAMES + "\n", "holds no session"),
    ("other names", "arrival,departure,station\n1,2,3\n", '"delivered_kwh" is missing'),
    ("no arrival", session(arrival=""), 'column "arrival" is missing', "line 3"),
    ("no departure", session(departure=""), 'column "departure" is missing', "line 3"),
    ("arrival is no time", session(arrival="early"), 'column "arrival" is no time', "early"),
    ("departure is no time", session(departure="25:00"), 'column "departure" is no time'),
    ("the year 3019", session(departure="3019-05-01 10:00"), "not of the years"),
    ("leaves before it comes", session(departure="2019-05-01 07:00"), 'is before "arrival"'),
    ("no station", session(station=""), 'column "station" is empty', "line 3"),
    ("no site", session(site=""), 'column "site" is empty'),
    ("energy is text", session(delivered_kwh="lots"), "is not a number", "lots"),
    ("energy is negative", session(delivered_kwh="-1"), "is negative"),
    ("energy is infinite", session(delivered_kwh="inf"), "is infinite"),
    ("energy is missing", session(delivered_kwh=""), 'column "delivered_kwh" is missing'),
    ("a wish is text", session(requested_kwh="much"), 'column "requested_kwh" is not a number'),
    ("a wish is negative", session(requested_kwh="-2"), 'column "requested_kwh" is negative'),
    ("some with a zone", session(arrival="2019-05-01 08:00+00:00"), "some times carry a zone"),
)
def test_a_file_of_sessions_that_is_wrong_is_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


SOUND = {"s.csv": f"{NAMES}\n{GOOD}\n"}


@cases(
    ("absent", "check --sessions s.csv", ("s.csv: no such file",)),
    ("a folder", "check --sessions .", ("no such file",)),
    ("no Parquet", "check --sessions s.parquet", ("cannot be read",), {"s.parquet": GOOD}),
    ("no such zone", "check --sessions s.csv --timezone Mars/North", ("no such time zone",), SOUND),
    ("train, absent", "train charging --sessions s.csv --out out", ("s.csv: no such file",)),
    (
        "train, too few",
        "train charging --sessions s.csv --out out",
        ("stations are trained",),
        SOUND,
    ),
    ("train, no such site", "train charging --site mars --out out", ("mars", "sites are")),
    ("train, until no day", "train charging --until 31.12.2019 --out out", ("is not a day",)),
    ("train, until a year", "train charging --until 2019 --out out", ("is not a day",)),
    *(
        (f"backtest, {name}", f"backtest run {options}", (word,), SOUND, "charging")
        for name, options, word in (
            ("absent", "--sessions none.csv", "no such file"),
            ("of which site", "", "choose one with --site"),
            ("no such site", "--site mars", "mars"),
            ("start", "--site jpl --start 1/2/2019", "not a day"),
            ("capacity", "--site jpl --capacity 2", "capacity 2"),
            ("no capacity", "--site jpl --capacity nan", "capacity"),
            ("tasks", "--site jpl --tasks 0", "tasks is 0"),
            ("stations", "--site jpl --stations 0", "stations 0"),
            ("prices", "--prices s.csv", "takes no --prices"),
            ("cost", "--cost 0.1", "takes no --cost"),
            ("jumps", "--allow-jumps", "no --allow-jumps"),
        )
    ),
)
def test_no_command_works_on_wrong_sessions(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


def told(**changes) -> str:
    sound = {"time": "2019-06-03 09:00", "capacity_kw": 20, "stations": [{"id": "A"}]}
    return json.dumps(sound | changes)


def car(**changes) -> str:
    sound = {"id": "A", "plugged": True, "arrival": "2019-06-03 08:00"}
    return told(stations=[{k: v for k, v in (sound | changes).items() if v is not None}])


def now_files(*rows: tuple):
    """A table of rows (name, text, words...) of what `allocate` must refuse."""
    ask = "allocate run --now now.json"
    return cases(*((name, ask, words, {"now.json": now}, "charging") for name, now, *words in rows))


@now_files(
    ("empty", "", "now.json", "JSON"),
    ("cut short", '{"time": ', "now.json", "JSON"),
    ("a list", "[]", "JSON object"),
    ("no time", told(time=None), "time is None", "write local time"),
    ("time is a number", told(time=9), "time is 9"),
    ("time is no time", told(time="noon"), "time is 'noon'"),
    ("no capacity", told(capacity_kw=0), "capacity_kw is 0", "above 0"),
    ("capacity is negative", told(capacity_kw=-5), "above 0"),
    ("capacity is text", told(capacity_kw="9"), "capacity_kw is '9'", "must be a number"),
    ("no stations", told(stations=[]), "at least one station"),
    ("stations are a number", told(stations=3), "at least one station"),
    ("a station without id", told(stations=[{"plugged": False}]), "station 0 has no id"),
    ("one id twice", told(stations=[{"id": "A"}, {"id": "A"}]), "station A is there twice"),
    ("plugged is text", car(plugged="yes"), "plugged is 'yes'"),
    ("no arrival", car(arrival=None), "arrival is missing"),
    ("comes later", car(arrival="2019-06-03 10:00"), "is after the time"),
    ("arrival is no time", car(arrival="soon"), "arrival is 'soon'"),
    ("wish is text", car(requested_kwh="5"), "requested_kwh is '5'"),
    ("wish is negative", car(requested_kwh=-5), "requested_kwh is -5"),
    ("rate is negative", car(max_kw=-1), "max_kw is -1"),
    ("drawn is true", car(drawn_kw=True), "drawn_kw is True"),
    ("drawn is nan", car(drawn_kw=float("nan")), "drawn_kw is nan", "must be a number"),
    ("got is negative", car(delivered_kwh=-2), "delivered_kwh is -2"),
)
def test_what_a_controller_is_told_must_make_sense(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@cases(
    ("nothing told", "allocate run", ("--now FILE.json",), {}, "charging"),
    ("absent", "allocate run --now now.json", ("now.json: cannot be read",), {}, "charging"),
    ("a folder", "allocate run --now .", ("cannot be read",), {}, "charging"),
    ("holdings", "allocate run --holdings h.csv", ("takes no --holdings",), {}, "charging"),
    ("of a portfolio", "allocate run --now now.json", ("takes no --now",), {}, "portfolio"),
    ("a past", "allocate run --earlier s.csv", ("takes no --earlier",), SOUND, "portfolio"),
    (
        "no past",
        "allocate run --now now.json --earlier s.csv",
        ("s.csv: no such file",),
        {"now.json": told()},
        "charging",
    ),
)
def test_a_controller_must_be_told(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
