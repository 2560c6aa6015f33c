"""Price files."""

import numpy as np
from refusals import LONG, WIDE, assert_refused, cases, cell

CHECK = "check --prices p.csv"


def head(names: str, table: str = WIDE) -> str:
    return names + "\n" + table.partition("\n")[2]


def only(rows: int, table: str = WIDE) -> str:
    return "\n".join(table.splitlines()[: rows + 1]) + "\n"


def days(write) -> str:
    first, *lines = WIDE.splitlines()
    parts = [line.partition(",") for line in lines]
    return "\n".join(
        [first, *(f"{write(n, day)},{rest}" for n, (day, _, rest) in enumerate(parts))]
    )


def columns(*places: int) -> str:
    return "\n".join(",".join(line.split(",")[p] for p in places) for line in WIDE.splitlines())


def scaled(factor: float, since: int) -> str:
    first, *lines = WIDE.splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows[since:]:
        row[1] = str(float(row[1]) * factor)
    return "\n".join([first, *(",".join(row) for row in rows)])


def files(*rows: tuple):
    """Rows (name, content, words...) of what `check` must refuse."""
    return ((name, CHECK, words, {"p.csv": content}) for name, content, *words in rows)


@cases(
    *files(
        ("empty", "", "p.csv: cannot be read"),
        ("names only", "date,A,B\n", "0 days found"),
        ("ragged", cell(2, 3, "1,2"), "cannot be read", "line 3"),
        ("two names alike", head("date,A,A,C"), "none of the layouts"),
        (
            "fields alone",
            head("Date,High,Low,Close"),
            "none of the layouts",
            "date, ticker and close",
        ),
        ("a volume", head("date,A,B,Volume"), "none of the layouts"),
        ("semicolons", WIDE.replace(",", ";"), "none of the layouts", "with commas"),
        ("text", cell(4, 2, "n/k"), "'n/k' at line 5 is no number"),
        ("text of two lines", cell(4, 2, '"n\nk"'), r"'n\nk' at line 5 is no number"),
        ("missing inside", cell(4, 2, ""), "1 missing values", " B;"),
        (
            "never priced",
            "\n".join(f"{line}," for line in WIDE.splitlines()).replace("C,", "C,D", 1),
            "40 missing values of close",
        ),
        ("a day twice", WIDE + WIDE.splitlines()[-1], "at line 42 is there twice"),
        ("not a day", cell(2, 0, "yesterday"), "'yesterday' at line 3 is no day"),
        ("days first", days(lambda n, _: f"{n % 28 + 1}/1/2019"), "no day", "2019-01-02"),
        (
            "a time in UTC",
            days(lambda _, day: f"{day} 15:00:00+00:00"),
            "at line 2 is no day of trading",
            "without a time of day",
        ),
        (
            "weekly",
            days(lambda n, _: str(np.datetime64("2019-01-04") + 7 * n)),
            "7 days apart on average",
        ),
        (
            "every second day",
            days(lambda n, _: str(np.busday_offset("2019-01-04", 2 * n, roll="forward"))),
            "2.82 days apart on average",
        ),
        (
            "tomorrow's",
            days(lambda n, _: str(np.datetime64("today") + n - 30)),
            "at line 34 is no day of trading",
            "write past days",
        ),
        (
            "a column of years",
            "\n".join(f"{line},{line[:4]}" for line in head("2000,A,B,C").splitlines()),
            "40 values that count time",
            " 2000;",
        ),
        ("a formula", head("date,=CMD(),B,C"), "'=CMD()' at line 2 is no ticker"),
        ("a ticker of two lines", head('date,"A\nB",B,C'), r"'A\nB' at line 2 is no ticker"),
        ("beyond float32", cell(4, 2, "1e39"), "no prices", " B;"),
        ("too short", only(12), "12 days found", "at least 33"),
        ("a row in 2021", cell(40, 0, "2021-01-03"), "after 2000-02-10", "gap of a year"),
        ("one ticker", columns(0, 1), "1 tickers have a price"),
        ("long, no low", "date,ticker,close,high\n2000-01-03,A,1,1\n", "none of the layouts"),
        ("long, low over high", "date,ticker,close,high,low\n2000-01-03,A,1,1,2\n", "below"),
        (
            "long, close over high",
            "date,ticker,close,high,low\n2000-01-03,A,3,2,1\n",
            '"close" above "high"',
        ),
        (
            "long, another currency",
            "".join(
                f"{line},{'currency' if n == 0 else 'GBP' if n == 20 else 'GBX'}\n"
                for n, line in enumerate(LONG.splitlines())
            ),
            "'GBP' at line 21 is another currency",
            "of A changes",
        ),
        ("long, nameless", cell(3, 1, "", LONG), "'' at line 4 is no ticker"),
        ("a split", scaled(0.5, 20), "looks like a split of 2:1", "--allow-jumps"),
        ("a spike", cell(9, 1, "999999"), "A +", "--allow-jumps A:"),
    ),
    ("absent", CHECK, ("p.csv: no such file",)),
    ("a pipe", "check --prices /dev/null", ("/dev/null: is a pipe or a device",)),
    ("a folder", "check --prices .", (".: is a folder",)),
    ("no Parquet", "check --prices p.parquet", ("p.parquet: cannot be read",), {"p.parquet": WIDE}),
    (
        "train on a split",
        "train portfolio --prices p.csv --out out",
        ("p.csv", "looks like a split of 4:1"),
        {"p.csv": scaled(0.25, 20)},
    ),
    (
        "study of a fault",
        "study fig2 --prices p.csv --out out",
        ("p.csv", "no prices"),
        {"p.csv": cell(4, 2, "-3")},
    ),
)
def test_no_command_works_on_wrong_prices(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
