"""Price files."""

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
        ("names only", "date,A,B\n", "has names but no rows"),
        ("not UTF-8", head("date,Ä,B,C").encode("latin1"), "cannot be read", "utf-8"),
        ("ragged", cell(2, 3, "1,2"), "cannot be read", "line 3"),
        ("two names alike", head("date,A,A,C"), "columns 2", "both called A"),
        ("a space apart", head("date,A, A,C"), '(" A")', "both called A"),
        ("no name", head("date,A,,C"), "column 3 has no name"),
        ("pandas' name", head("date,A,Unnamed: 2,C"), "column 3 has no name"),
        ("fields alone", head("Date,High,Low,Close"), '"ticker" is missing beside "close"'),
        ("fields without close", head("Date,Open,High,Low"), '"ticker" is missing beside "high"'),
        ("no days", columns(1, 2, 3), '"date" is missing'),
        ("two columns of days", head("A,date,DATE,B"), 'called "date" and not the first'),
        (
            "a written index",
            head(",date,A,B"),
            'column 2 is called "date"',
            '.set_index("date").to_csv',
        ),
        ("text", cell(4, 2, "n/k"), '"B"', "not numbers", '"n/k" at line 5'),
        ("thousands", cell(4, 2, '"1,234.5"'), "1234.5, without commas"),
        ("truth", cell(4, 2, "True"), "not numbers", "True"),
        ("negative", cell(4, 2, "-3"), "negative values", "line 5"),
        ("zero", cell(4, 2, "0"), "zero values", "line 5"),
        ("infinite", cell(4, 2, "inf"), "infinite"),
        ("missing inside", cell(4, 2, ""), "missing values", "line 5"),
        (
            "never priced",
            "\n".join(f"{line}," for line in WIDE.splitlines()).replace("C,", "C,D", 1),
            "no price at all",
        ),
        ("a day twice", WIDE + WIDE.splitlines()[-1], "occurs twice at line 42"),
        ("not a day", cell(2, 0, "yesterday"), '"yesterday" at line 3'),
        ("no day", cell(2, 0, ""), 'not dates, first ""'),
        ("30 February", cell(2, 0, "2000-02-30"), '"2000-02-30"'),
        ("days first", days(lambda n, _: f"{n % 28 + 1}/1/2019"), "not dates", "dayfirst=True"),
        ("serial numbers", days(lambda n, _: 43_000 + n), "not dates", "43000"),
        ("decimal commas", WIDE.replace(".", ","), "cannot be read", "Expected 4 fields"),
        ("too short", only(12), "12 days found", "at least 33"),
        ("one ticker", columns(0, 1), "1 ticker found"),
        ("long without close", head("date,ticker,price", LONG), '"close" is missing'),
        ("long without date", head("day,ticker,close", LONG), '"date" is missing'),
        ("long, two closes", "date,ticker,close,Close\n2000-01-03,A,1,1\n", 'both called "close"'),
        *(
            (f"long, {names}", f"date,ticker,{names}\n2000-01-03,A,{row}\n", words)
            for names, row, words in (
                ("close,high", "1,1", '"low" is missing beside "high"'),
                ("adj close,high,low", "1,1,1", '"close" is missing beside "adj close"'),
                ("close,high,low", "1,1,2", '"high" below "low"'),
            )
        ),
        ("long, nameless", cell(3, 1, "", LONG), '"ticker" is empty at line 4'),
        ("long, two spellings", cell(3, 1, "A ", LONG), "differ by spaces only"),
        (
            "long, a day left out",
            cell(3, 1, "B", LONG).replace(LONG.splitlines()[43] + "\n", ""),
            "A has no row on 1 of 40 days",
        ),
        ("long, a day twice", LONG + "\n" + LONG.splitlines()[1], "occurs twice for A"),
        ("a split", scaled(0.5, 20), "looks like a split of 2:1", "--allow-jumps"),
        ("a spike", cell(9, 1, "999999"), "A +", "--allow-jumps A:"),
        ("a case apart", head("date,A,a,C"), '"A" and "a" differ by case only'),
        ("long, a case apart", LONG.replace(",B,", ",a,"), '"A" and "a" differ by case only'),
        ("a volume", head("date,A,B,Volume"), 'called "Volume", which is no instrument'),
        (
            "seconds as a price",
            "\n".join(
                f"{line},{'S' if n == 0 else 1_550_000_000 + 86_400 * n}"
                for n, line in enumerate(WIDE.splitlines())
            ),
            '"S" counts time (1550086400, 1550172800, ...)',
        ),
        ("a row in 2081", cell(40, 0, "2081-01-03"), "no day between", "and 2081-01-03"),
        ("compact times", cell(2, 0, "20190304T085300-0800"), "not dates", "20190304T085300-0800"),
    ),
    ("absent", CHECK, ("p.csv: no such file",)),
    ("a pipe", "check --prices /dev/null", ("/dev/null: is a pipe or a device",)),
    ("300 letters", f"check --prices {'p' * 300}", ("cannot be read (File name too long)",)),
    ("a folder", "check --prices .", (".: is a folder",)),
    ("no Parquet", "check --prices p.parquet", ("p.parquet: cannot be read",), {"p.parquet": WIDE}),
    (
        "train on a split",
        "train portfolio --prices p.csv --out out",
        ("p.csv", "looks like a split of 4:1"),
        {"p.csv": scaled(0.25, 20)},
    ),
    (
        "backtest on a split",
        "backtest run --prices p.csv",
        ("looks like a split of 2:1",),
        {"p.csv": scaled(0.5, 20)},
        "portfolio",
    ),
    (
        "study of a fault",
        "study fig2 --prices p.csv --out out",
        ("p.csv", "negative"),
        {"p.csv": cell(4, 2, "-3")},
    ),
)
def test_no_command_works_on_wrong_prices(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
