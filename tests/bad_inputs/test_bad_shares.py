"""Holdings and costs of a portfolio."""

from pathlib import Path

from refusals import WIDE, assert_refused, cases, cell

ALLOCATE = "allocate run --prices p.csv --holdings"
UNITS = "ticker,quantity\nA,10\ncash,100\n"
TRAIN = (
    "train portfolio --prices p.csv --out out --task-size 2 --window 8 --batch 16 --validation 0"
)


def files(*rows: tuple[str, str | bytes, str]):
    """Rows (name, content, words) of holdings that must be refused."""
    for name, content, words in rows:
        given = {"h.csv": content, "p.csv": WIDE}
        yield name, f"{ALLOCATE} h.csv", ("h.csv", words), given, "portfolio"


@cases(
    *files(
        *(
            (f"{column}, {name}", f"ticker,{column}\n{rows}\n", words.format(column))
            for column in ("share", "quantity")
            for name, rows, words in (
                ("unknown", "D,1", "D is not among the prices"),
                ("text", "A,much", 'the {} of A is "much"'),
                ("negative", "A,1.5\nB,-0.5", 'the {} of B is "-0.5"'),
                ("infinite", "A,inf", 'the {} of A is "inf"'),
                ("nan", "A,nan", 'the {} of A is "nan"'),
                ("twice", "A,0.5\nA,0.5", "A occurs twice"),
            )
        ),
        ("empty", "", "cannot be read"),
        ("JSON", '{"A": 1.0}', "not a table of holdings"),
        ("other names", "name,weight\nA,1\n", "not a table of holdings"),
        ("no share", "ticker,share\nA,\n", 'the share of A is ""'),
        ("a number for a name", "ticker,share\n007,1\n", "007 is not among the prices"),
        ("NA for a name", "ticker,share\nNA,1\n", "NA is not among the prices"),
        ("cash without cash", "ticker,share\ncash,1\n", "cash is not among the prices"),
        ("a space apart", "ticker,share\nA,0.5\n A,0.5\n", "A occurs twice"),
        ("too little", "ticker,share\nA,0.5\n", "sum to 0.5"),
        ("too much", "ticker,share\nA,1\nB,1\n", "sum to 2"),
        ("both", "ticker,share,quantity\nA,1,1\n", "gives both shares and quantities"),
        ("cash twice", "ticker,quantity\ncash,1\ncash,1\n", "cash occurs twice"),
        ("cash below 0", "ticker,quantity\nA,1\ncash,-5\n", 'the quantity of cash is "-5"'),
        ("cash is nan", "ticker,quantity\nA,1\ncash,nan\n", 'the quantity of cash is "nan"'),
        ("nothing", "ticker,quantity\nA,0\ncash,0\n", "holds nothing"),
    )
)
def test_holdings_that_are_wrong_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


PRICES = {"p.csv": WIDE}
HELD = PRICES | {"h.csv": UNITS, "s.csv": "ticker,share\nA,1\n"}
PLACE = HELD | {"o.csv": Path.mkdir}
LATE = PRICES | {"h.csv": UNITS, "p.csv": cell(40, 1, "")}


@cases(
    ("lot of 0", f"{ALLOCATE} h.csv --lot 0", ('--lot is "0',), HELD, "portfolio"),
    ("lot below 0", f"{ALLOCATE} h.csv --lot=-1", ('--lot is "-1',), HELD, "portfolio"),
    ("lot is nan", f"{ALLOCATE} h.csv --lot nan", ('--lot is "nan',), HELD, "portfolio"),
    ("no lots", f"{ALLOCATE} h.csv --lot l.csv", ("l.csv",), HELD, "portfolio"),
    ("lots of shares", f"{ALLOCATE} s.csv --lot 1", ("s.csv", "lots"), HELD, "portfolio"),
    ("lot alone", "allocate run --prices p.csv --lot 1", ("--lot", "--holdings"), HELD, "portfolio"),
    ("other out", f"{ALLOCATE} h.csv --out o.txt", ("o.txt", ".csv"), HELD, "portfolio"),
    ("out is read", f"{ALLOCATE} h.csv --out ./h.csv", ("h.csv: is read",), HELD, "portfolio"),
    ("out a folder", f"{ALLOCATE} h.csv --out o.csv", ("a folder",), PLACE, "portfolio"),
    ("out in a file", f"{ALLOCATE} h.csv --out p.csv/o.csv", ("is a file",), HELD, "portfolio"),
    ("cut short", f"{ALLOCATE} h.csv", ("A has no price on", "--delisted A"), LATE, "portfolio"),
    ("no price", f"{ALLOCATE} h.csv --delisted A", ("A is held and has no price",), LATE, "portfolio"),
    ("in a garage", "allocate run --lot 1", ("takes no --lot",), {}, "charging"),
)  # fmt: skip
def test_orders_that_cannot_be_made_are_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


@cases(
    ("no holdings", f"{ALLOCATE} h.csv", ("h.csv: no such file",), PRICES, "portfolio"),
    ("holdings a folder", f"{ALLOCATE} .", ("cannot be read",), PRICES, "portfolio"),
    ("costs a folder", f"{TRAIN} --cost .", ("--cost",), PRICES),
    ("cost is negative", f"{TRAIN} --cost=-0.1", ("cost is -0.1",), PRICES),
    ("cost is a half", f"{TRAIN} --cost 0.5", ("cost is 0.5",), PRICES),
    ("cost is nan", f"{TRAIN} --cost nan", ("cost is nan",), PRICES),
    ("backtest", "backtest run --prices p.csv --cost 0.7", "cost is 0.7", PRICES, "portfolio"),
)
def test_no_command_works_on_wrong_shares(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
