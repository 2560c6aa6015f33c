"""Holdings, groups and commissions of a portfolio."""

from refusals import WIDE, assert_refused, cases

ALLOCATE = "allocate run --prices p.csv --holdings"
TRAIN = (
    "train portfolio --prices p.csv --out out --task-size 2 --window 8 --batch 16 --validation 0"
)


def files(command: str, file: str, *rows: tuple, run: str = ""):
    """A table of rows (name, content, words...) of a file that a command must refuse."""
    return cases(
        *(
            (name, f"{command} {file}", (file, *words), {file: content, "p.csv": WIDE}, run)
            for name, content, *words in rows
        )
    )


@files(
    ALLOCATE,
    "h.csv",
    ("empty", "", "not a table of shares"),
    ("other names", "name,weight\nA,1\n", "not a table of shares"),
    ("text", "ticker,share\nA,much\n", "not a table of shares"),
    ("no share", "ticker,share\nA,\n", "not a table of shares"),
    ("unknown", "ticker,share\nD,1\n", "D is not among the prices"),
    ("a number for a name", "ticker,share\n007,1\n", "007 is not among the prices"),
    ("NA for a name", "ticker,share\nNA,1\n", "NA is not among the prices"),
    ("cash without cash", "ticker,share\ncash,1\n", "cash is not among the prices"),
    ("twice", "ticker,share\nA,0.5\nA,0.5\n", "a ticker occurs twice"),
    ("a space apart", "ticker,share\nA,0.5\n A,0.5\n", "a ticker occurs twice"),
    ("too little", "ticker,share\nA,0.5\n", "sum to 0.5"),
    ("too much", "ticker,share\nA,1\nB,1\n", "sum to 2"),
    ("negative", "ticker,share\nA,1.5\nB,-0.5\n", "smallest is -0.5"),
    ("not finite", "ticker,share\nA,nan\n", "sum to nan"),
    ("binary", b"\x00\xff\xfe", "not a table of shares"),
    run="portfolio",
)
def test_holdings_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@files(
    ALLOCATE,
    "h.json",
    ("cut short", '{"A": 0.5', "not a table of shares"),
    ("a list", "[1]", "not a table of shares"),
    ("a number", "1", "not a table of shares"),
    ("null", '{"A": null}', "not a table of shares"),
    ("one name twice", '{"A": 0.0, "A": 1.0}', "a ticker occurs twice"),
    ("not finite", '{"A": NaN}', "sum to nan"),
    ("too little", '{"allocation": {"A": 0.2}}', "sum to 0.2"),
    run="portfolio",
)
def test_holdings_in_json_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@files(
    f"{TRAIN} --group",
    "g.csv",
    ("empty", "", "cannot be read"),
    ("no limit", "ticker,group\nA,x\n", 'column "limit" is missing'),
    ("no rows", "ticker,group,limit\n", "names no ticker"),
    ("a hole", "ticker,group,limit\nA,,0.5\n", 'column "group" is empty at line 2'),
    ("limit is text", "ticker,group,limit\nA,x,half\n", "line 2", '"half" is not a share'),
    ("limit above 1", "ticker,group,limit\nA,x,1.5\n", '"1.5" is not a share'),
    ("limit below 0", "ticker,group,limit\nA,x,-0.1\n", '"-0.1" is not a share'),
    ("limit not finite", "ticker,group,limit\nA,x,nan\n", '"nan" is not a share'),
    ("two limits", "ticker,group,limit\nA,x,0.5\nB,x,0.6\n", "line 3", "one limit"),
    ("in two groups", "ticker,group,limit\nA,x,0.5\nA,y,0.5\n", "A occurs twice"),
)
def test_groups_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@files(
    f"{TRAIN} --cost",
    "c.csv",
    ("empty", "", "cannot be read"),
    ("no cost", "ticker,price\nA,1\n", 'column "buy" is missing'),
    ("half a side", "ticker,buy\nA,0.1\n", 'column "sell" is missing'),
    ("no rows", "ticker,cost\n", "names no ticker"),
    ("text", "ticker,cost\nA,cheap\n", "line 2", '"cheap" is no commission'),
    ("percent", "ticker,cost\nA,0.25%\n", "line 2", '"0.25%" is no commission'),
    ("too much", "ticker,cost\nA,0.5\n", "below 0.5"),
    ("negative", "ticker,buy,sell\nA,0.1,-0.1\n", '"-0.1" is no commission'),
    ("not finite", "ticker,cost\nA,nan\n", '"nan" is no commission'),
    ("nameless", "ticker,cost\n,0.1\n", "line 2: the ticker is empty"),
    ("twice", "ticker,cost\nA,0.1\nA,0.1\n", "line 3: ticker A occurs twice"),
    ("not all", "ticker,cost\nA,0.1\n", "2 of 3 tickers have no cost, first B"),
)
def test_commissions_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


PRICES = {"p.csv": WIDE}


@cases(
    ("no holdings", f"{ALLOCATE} h.csv", ("h.csv: no such file",), PRICES, "portfolio"),
    ("holdings a folder", f"{ALLOCATE} .", ("cannot be read",), PRICES, "portfolio"),
    ("no groups", f"{TRAIN} --group g.csv", ("g.csv: no such file",), PRICES),
    ("groups a folder", f"{TRAIN} --group .", ("cannot be read",), PRICES),
    (
        "unknown ticker in a group",
        f"{TRAIN} --group g.csv",
        ("g.csv: ticker D is not among",),
        PRICES | {"g.csv": "ticker,group,limit\nD,x,0.5\n"},
    ),
    (
        "groups too small",
        f"{TRAIN} --group g.csv",
        ("can together hold only 0.3",),
        PRICES | {"g.csv": "ticker,group,limit\nA,x,0.3\nB,x,0.3\nC,x,0.3\n"},
    ),
    ("costs a folder", f"{TRAIN} --cost .", ("cannot be read",), PRICES),
    ("cost is text", f"{TRAIN} --cost cheap", ("cheap: no such file",), PRICES),
    ("cost is negative", f"{TRAIN} --cost=-0.1", ("cost is -0.1",), PRICES),
    ("cost is a half", f"{TRAIN} --cost 0.5", ("cost is 0.5",), PRICES),
    ("cost is nan", f"{TRAIN} --cost nan", ("cost is nan",), PRICES),
    (
        "backtest, cost",
        "backtest run --prices p.csv --cost 0.7",
        ("commission 0.7",),
        PRICES,
        "portfolio",
    ),
    (
        "backtest, no costs",
        "backtest run --prices p.csv --cost c.csv",
        ("no such file",),
        PRICES,
        "portfolio",
    ),
)
def test_no_command_works_on_wrong_shares(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
