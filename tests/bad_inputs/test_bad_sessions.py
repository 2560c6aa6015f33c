"""Files of charging sessions, and the state of a garage for its controller."""

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
    ("the year 3019", session(departure="3019-05-01 10:00"), "not of the years"),
    (
        "energy is in Wh",
        session(delivered_kwh="9000").replace(",20,5\n", ",20,5000\n"),
        'if it is in Wh, divide: frame["delivered_kwh"] = frame["delivered_kwh"] / 1000',
    ),
    ("some requests in Wh", session(requested_kwh="20000"), "in Wh", "line 3", "only these rows"),
    (
        "delivered in MWh",
        session(delivered_kwh="0.004").replace(",20,5\n", ",20,0.005\n"),
        'column "delivered_kwh" is below 0.2 kWh in 2 sessions',
        "if it is in MWh, multiply",
    ),
    (
        "power is in W",
        session().replace("\n", ",7400\n").replace("kwh,7400", "kwh,max_kw")[:-5] + "0\n",
        'column "max_kw" is 0 or above 1,000 kW in 2 sessions, first at line 2 ("7400")',
        "in W",
    ),
    (
        "no length",
        session(arrival="2019-05-01 10:00").replace("08:00", "10:00"),
        '"departure" equals "arrival" in 2 sessions',
        "correct the times",
    ),
    (
        "months",
        session(arrival="2019-05"),
        'column "arrival" is no time in 1 session, first at line 3 ("2019-05")',
    ),
    ("stations by case", session(station="A"), 'stations "A" and "a" differ by case', "line"),
    (
        "sites by encoding",
        session(site="Zu\u0308rich").replace("here,", "Z\u00fcrich,"),
        "differ by case or by the encoding of accents only",
    ),
    ("a stay of years", session(departure="2081-05-01 10:00"), "more than a year after"),
    ("some with a zone", session(arrival="2019-05-01 08:00+00:00"), "some times carry a zone"),
)
def test_a_file_of_sessions_that_is_wrong_is_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


SOUND = {"s.csv": f"{NAMES}\n{GOOD}\n"}


@cases(
    ("a folder", "check --sessions .", (".: is a folder",)),
    ("no Parquet", "check --sessions s.parquet", ("cannot be read",), {"s.parquet": GOOD}),
    (
        "semicolons",
        "check --sessions s.csv",
        ('separated by ";"', 'sep=";", decimal=","'),
        {"s.csv": f"{NAMES}\n{GOOD}\n".replace(",", ";")},
    ),
    (
        "no such column",
        "check --sessions s.csv --columns arrival=arival",
        ("has no column 'arival' for arrival", "did you mean arrival?"),
        SOUND,
    ),
    ("no such zone", "check --sessions s.csv --timezone Mars/North", ("no such time zone",), SOUND),
    *(
        (
            f"{command} with {offset}",
            f"{command} s.csv --timezone Asia/Bangkok",
            ('column "arrival" is no time', "07:30:00+07:00"),
            {"s.csv": SOUND["s.csv"].replace(" 08:00,", f" 08:00{offset},")},
        )
        for command in ("check --sessions", "train charging --out out --sessions")
        for offset in ("+7:00", "-8:00", "+7", "+070")
    ),
    (
        "an hour that the clock skips",
        "check --sessions s.csv --timezone Europe/Berlin",
        ('"departure" equals "arrival"', "a clock that changes skips an hour"),
        {"s.csv": f"{NAMES}\nhere,a,2019-03-31 02:10,2019-03-31 02:50,,,5\n"},
    ),
    ("train, few", "train charging --sessions s.csv --out out", "stations are trained", SOUND),
    *(
        (f"backtest, {name}", f"backtest run {options}", (word,), SOUND, "charging")
        for name, options, word in (
            ("of which site", "", "choose one with --site"),
            ("no such site", "--site mars", "mars"),
            ("capacity", "--site jpl --capacity 2", "capacity 2"),
        )
    ),
)
def test_no_command_works_on_wrong_sessions(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


NOW = json.dumps({"time": "2019-06-03 09:00", "capacity_kw": 20, "stations": [{"id": "A"}]})


@cases(
    ("no --now", "allocate run", ("--now FILE.json",), {}, "charging"),
    ("absent", "allocate run --now now.json", ("now.json: cannot be read",), {}, "charging"),
    (
        "of no site",
        "allocate run --now now.json",
        "describe no site",
        {"now.json": NOW},
        "charging",
    ),
    ("a past", "allocate run --earlier s.csv", ("no option --earlier",), SOUND, "portfolio"),
)
def test_a_controller_needs_the_state_of_its_garage(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
